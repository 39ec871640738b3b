"""Situations that users of other pipelines have reported, each with a tiny model.

A strict xfail is a situation that is not handled yet; its reason says what a user meets today.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.pool import Pool

MICROBATCHES, TOKENS, WIDTH = 4, 30, 16
Microbatch = tuple[tuple[Any, ...], dict[str, Any], Any]
Loss = Callable[[Any, Any], Tensor]


def pipeline(model: nn.Module, loss: Loss) -> zbcompile.Pipeline:
    return zbcompile.pipeline(
        model, schedule="zb-h1", microbatches=MICROBATCHES, ranks=2, loss=loss
    )


def accumulate(model: nn.Module, loss: Loss, microbatches: Sequence[Microbatch]) -> Tensor:
    """Adds the gradients of eager's mean loss to `model`; returns that loss."""
    losses = []
    for args, kwargs, target in microbatches:
        losses.append(loss(model(*args, **kwargs), target) / len(microbatches))
        losses[-1].backward()
    return torch.stack(losses).sum().detach()


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def rows_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.chunk(MICROBATCHES) for tensor in tensors), strict=True)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Potential(nn.Module):
    """An energy of atoms, and the forces on them: its negative gradient by their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()
        )
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_()
        energy = self.energy(self.layers(positions)).sum((1, 2))
        (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -gradient


def energies_and_forces(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    energy, forces = output
    return (energy - target.sum((1, 2))).square().mean() + (forces - target).square().mean()


@pytest.mark.slow
def test_forces_that_are_gradients_of_an_energy() -> None:
    torch.manual_seed(0)
    model, positions, target = Potential(), torch.randn(8, 5, 3), torch.randn(8, 5, 3)
    plain = copy.deepcopy(model)
    pipeline(model, energies_and_forces).step(positions, target=target)
    accumulate(plain, energies_and_forces, [((x,), {}, y) for x, y in rows_of(positions, target)])
    assert_same_gradients(model, plain)


class PackedDocuments(nn.Module):
    """Attention within documents, which begin at `offsets` of the flattened rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        place = torch.arange(tokens.numel())
        document = (place[:, None] >= offsets[1:]).sum(1)
        mask = (document[:, None] == document) & (place[:, None] >= place)
        x = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            q, k, v = layer(x)[None, None].chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0, 0]
        return self.head(x).unflatten(0, tokens.shape)


@cache
def documents() -> tuple[PackedDocuments, Tensor, Tensor]:
    torch.manual_seed(0)
    return PackedDocuments(), torch.randint(TOKENS, (8, 5)), torch.randint(TOKENS, (8, 5))


REMEDY_IS_SPLIT = (
    "the message proposes split={...: False}, which trains with wrong rows without a word"
)


@pytest.mark.xfail(strict=True, reason=REMEDY_IS_SPLIT)
def test_offsets_of_a_whole_batch_are_refused_with_a_remedy() -> None:
    model, tokens, labels = documents()
    whole = torch.tensor([0, 3, 10, 14, 20, 26, 30, 36, 40])
    with pytest.raises(zbcompile.PipelineError, match=r"microbatches=\["):
        pipeline(copy.deepcopy(model), token_loss).step(tokens, whole, target=labels)


@pytest.mark.slow
def test_offsets_of_each_microbatch() -> None:
    model, tokens, labels = documents()
    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    offsets = [torch.tensor([0, middle, 10]) for middle in (3, 4, 6, 6)]
    microbatches: list[Microbatch] = [
        ((part, each), {}, target)
        for (part, target), each in zip(rows_of(tokens, labels), offsets, strict=True)
    ]
    pipeline(ours, token_loss).step(microbatches=microbatches)
    accumulate(plain, token_loss, microbatches)
    assert_same_gradients(ours, plain)


class WithPictures(nn.Module):
    """Rows of tokens, some of which stand for patches of pictures; `patches` has those of
    all rows."""

    PICTURE = TOKENS - 1

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(12, WIDTH)
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x.masked_scatter((tokens == self.PICTURE)[..., None].expand_as(x), self.patch(patches))
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).cumsum(1)
        return self.head(x)


def rows_with_patches(counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, patches and labels of a batch whose rows have `counts` patches."""
    tokens = torch.randint(WithPictures.PICTURE, (len(counts), 10))
    for row, count in zip(tokens, counts, strict=True):
        row[1 : 1 + count] = WithPictures.PICTURE
    return tokens, torch.randn(sum(counts), 12), torch.randint(TOKENS, tokens.shape)


@pytest.mark.xfail(strict=True, reason=REMEDY_IS_SPLIT)
def test_patches_of_a_whole_batch_are_refused_with_a_remedy() -> None:
    tokens, patches, labels = rows_with_patches([4, 0, 2, 4, 0, 2, 8, 4])
    with pytest.raises(zbcompile.PipelineError, match=r"microbatches=\["):
        pipeline(WithPictures(), token_loss).step(tokens, patches, target=labels)


@pytest.mark.slow
def test_patches_of_each_microbatch() -> None:
    """Also of a second batch, whose microbatches have other numbers of patches."""
    torch.manual_seed(0)
    model = WithPictures()
    plain, pipe = copy.deepcopy(model), pipeline(model, token_loss)
    for counts in ([4, 0, 2, 4, 0, 4, 8, 2], [2, 2, 4, 0, 4, 4, 0, 6]):
        tokens, patches, labels = rows_with_patches(counts)
        sizes = [int((part == WithPictures.PICTURE).sum()) for part in tokens.chunk(MICROBATCHES)]
        microbatches: list[Microbatch] = [
            ((part, each), {}, target)
            for (part, target), each in zip(
                rows_of(tokens, labels), patches.split(sizes), strict=True
            )
        ]
        pipe.step(microbatches=microbatches)
        accumulate(plain, token_loss, microbatches)
        assert_same_gradients(model, plain)


@torch.compile(backend="eager")
def quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(1.702 * x) * x


class Activated(nn.Module):
    """A layer whose activation is a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + quick_gelu(self.linear(x))


def train_compiled(of_blocks: bool, whole: bool) -> None:
    """Compares a step of a model that has compiled parts, or is compiled as a whole, with eager."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Activated() for _ in range(4)))
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    for block in model if of_blocks else ():
        block.compile(backend="eager")
    given: Any = torch.compile(model, backend="eager") if whole else model
    pipeline(given, F.mse_loss).step(x, target=y)
    accumulate(plain, F.mse_loss, [((a,), {}, b) for a, b in rows_of(x, y)])
    assert_same_gradients(model, plain)


@pytest.mark.slow
def test_a_compiled_function_inside_of_the_model() -> None:
    train_compiled(of_blocks=False, whole=False)


@pytest.mark.slow
def test_blocks_that_are_compiled_in_place() -> None:
    train_compiled(of_blocks=True, whole=False)


@pytest.mark.slow
def test_a_model_that_is_compiled_as_a_whole() -> None:
    train_compiled(of_blocks=False, whole=True)


def preference(scores: Tensor, first: Tensor) -> Tensor:
    """A loss of pairs, from the scores of chosen and rejected answers side by side."""
    chosen, rejected = scores.unbind(1)
    return -F.logsigmoid(first * (chosen - rejected)).mean()


def preference_of_halves(scores: Tensor, first: Tensor) -> Tensor:
    """The same where the first half of the rows was chosen."""
    return preference(torch.stack(scores.chunk(2), 1), first.chunk(2)[0])


class Scores(nn.Module):
    """A number for each row of a batch, whatever its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(-1)


@pytest.mark.slow
def test_pairs_within_a_loss() -> None:
    """A loss sees the rows of one microbatch, as in eager accumulation; pairs that are rows stay
    pairs."""
    torch.manual_seed(0)
    model, x, weight = Scores(), torch.randn(16, WIDTH), torch.rand(16)
    whole = preference_of_halves(model(x), weight)
    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    loss = pipeline(ours, preference_of_halves).step(x, target=weight)
    expected = accumulate(
        plain, preference_of_halves, [((a,), {}, b) for a, b in rows_of(x, weight)]
    )
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, whole)

    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    pairs = torch.stack(x.chunk(2), 1)
    torch.testing.assert_close(
        pipeline(ours, preference).step(pairs, target=weight.chunk(2)[0]), whole.detach()
    )
    preference_of_halves(plain(x), weight).backward()
    assert_same_gradients(ours, plain)


BUILD_SECONDS = 0.3
BUILT: dict[str, tuple[float, float]] = {}


def build(kernel: str) -> None:
    """What a library that compiles its kernels does at their first call."""
    if kernel not in BUILT:
        begin = time.monotonic()
        time.sleep(BUILD_SECONDS)
        BUILT[kernel] = (begin, time.monotonic())


@torch.library.custom_op("reported_situations::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    build("forward")
    return x * weight


@torch.library.custom_op("reported_situations::scaled_backward", mutates_args=())
def scaled_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    build("backward")
    return gradient * weight, (gradient * x).sum(0)


@scaled.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@scaled_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gradient), torch.empty_like(weight)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


scaled.register_autograd(
    lambda ctx, g: scaled_backward(g, *ctx.saved_tensors), setup_context=_keep_inputs
)


class Scaled(nn.Module):
    """A layer with the operator whose kernels are built when they are first called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(scaled(x, self.weight)))


def builds_of_first_step() -> list[dict[str, tuple[float, float]]]:
    """The times between which each rank built its kernels."""
    BUILT.clear()
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    pipe = zbcompile.pipeline(
        nn.Sequential(*(Scaled() for _ in range(4))),
        schedule="zb-h1",
        microbatches=MICROBATCHES,
        loss=F.mse_loss,
    )
    pipe.step(x, target=x)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, BUILT)
    return ranks


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="stages build their kernels one after the other"
)
def test_ranks_build_their_kernels_at_the_same_time(pool: Pool) -> None:
    first, second = pool.run(builds_of_first_step)[0]
    assert first.keys() == second.keys() == {"forward", "backward"}
    for kernel in first:
        assert max(first[kernel][0], second[kernel][0]) < min(first[kernel][1], second[kernel][1])
