"""Tests of the answers in docs/faq.md, and situations that users of other pipelines reported.

Each test has a tiny model and uses public names only. A strict xfail is a situation that is not
handled yet; its reason says what a user meets today.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

MICROBATCHES, TOKENS, WIDTH = 4, 30, 16
Microbatch = tuple[tuple[Any, ...], dict[str, Any], Any]
Loss = Callable[[Any, Any], Tensor]


def pipeline(model: nn.Module, loss: Loss | None = None, **options: Any) -> zbcompile.Pipeline:
    """Returns a pipeline of two ranks in this process."""
    options = {"schedule": "zb-h1", "microbatches": MICROBATCHES, "ranks": 2} | options
    return zbcompile.pipeline(model, loss=loss, **options)


def accumulate(model: nn.Module, loss: Loss, microbatches: Sequence[Microbatch]) -> Tensor:
    """Adds the gradients of eager's mean loss to `model`; returns that loss."""
    losses = []
    for args, kwargs, target in microbatches:
        losses.append(loss(model(*args, **kwargs), target) / len(microbatches))
        losses[-1].backward()
    return torch.stack(losses).sum().detach()


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), (_, reference) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            one.grad,
            reference.grad,
            rtol=1e-4,
            atol=1e-6,
            msg=lambda text, n=name: f"{n}: {text}",
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


def test_offsets_of_a_whole_batch_are_refused_with_a_remedy() -> None:
    model, tokens, labels = documents()
    offsets = torch.tensor([0, 3, 10, 14, 20, 26, 30, 36, 40])
    with pytest.raises(zbcompile.PipelineError, match=r"microbatches=\["):
        pipeline(copy.deepcopy(model), token_loss).step(tokens, offsets, target=labels)


def test_offsets_of_each_microbatch() -> None:
    model, tokens, labels = documents()
    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    offsets = [torch.tensor([0, middle, 10]) for middle in (3, 4, 6, 6)]
    microbatches: list[Microbatch] = [
        ((part, part_of_batch), {}, target)
        for (part, target), part_of_batch in zip(rows_of(tokens, labels), offsets, strict=True)
    ]
    pipeline(ours, token_loss).step(microbatches=microbatches)
    accumulate(plain, token_loss, microbatches)
    assert_same_gradients(ours, plain)


class WithPictures(nn.Module):
    """Replaces some tokens of each row by patches of pictures. `patches` has those of all rows."""

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


def test_patches_of_a_whole_batch_are_refused_with_a_remedy() -> None:
    tokens, patches, labels = rows_with_patches([4, 0, 2, 4, 0, 2, 8, 4])
    with pytest.raises(zbcompile.PipelineError, match=r"microbatches=\["):
        pipeline(WithPictures(), token_loss).step(tokens, patches, target=labels)


def test_patches_of_each_microbatch() -> None:
    """Also of a second batch, whose microbatches have other numbers of patches."""
    torch.manual_seed(0)
    model = WithPictures()
    plain, pipe = copy.deepcopy(model), pipeline(model, token_loss)
    for counts in ([4, 0, 2, 4, 0, 4, 8, 2], [2, 2, 4, 0, 4, 4, 0, 6]):
        tokens, patches, labels = rows_with_patches(counts)
        sizes = [int((part == WithPictures.PICTURE).sum()) for part in tokens.chunk(MICROBATCHES)]
        microbatches: list[Microbatch] = [
            ((part, part_of_batch), {}, target)
            for (part, target), part_of_batch in zip(
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


def train_compiled(compile_blocks: bool, compile_model: bool) -> None:
    """Compares a step of a model that has compiled parts, or is compiled as a whole, with eager."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Activated() for _ in range(4)))
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    for block in model if compile_blocks else ():
        block.compile(backend="eager")
    wrapped: Any = torch.compile(model, backend="eager") if compile_model else model
    pipeline(wrapped, F.mse_loss).step(x, target=y)
    accumulate(plain, F.mse_loss, [((a,), {}, b) for a, b in rows_of(x, y)])
    assert_same_gradients(model, plain)


def test_a_compiled_function_inside_of_the_model() -> None:
    train_compiled(compile_blocks=False, compile_model=False)


def test_blocks_that_are_compiled_in_place() -> None:
    train_compiled(compile_blocks=True, compile_model=False)


def test_a_model_that_is_compiled_as_a_whole() -> None:
    train_compiled(compile_blocks=False, compile_model=True)


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


def test_pairs_within_a_loss() -> None:
    """A loss sees the rows of one microbatch, as in eager accumulation; pairs that are rows stay
    pairs."""
    torch.manual_seed(0)
    model, x, weight = Scores(), torch.randn(16, WIDTH), torch.rand(16)
    loss_of_batch = preference_of_halves(model(x), weight)
    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    loss = pipeline(ours, preference_of_halves).step(x, target=weight)
    expected = accumulate(
        plain, preference_of_halves, [((a,), {}, b) for a, b in rows_of(x, weight)]
    )
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, loss_of_batch)

    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    pairs = torch.stack(x.chunk(2), 1)
    torch.testing.assert_close(
        pipeline(ours, preference).step(pairs, target=weight.chunk(2)[0]), loss_of_batch.detach()
    )
    preference_of_halves(plain(x), weight).backward()
    assert_same_gradients(ours, plain)


BUILD_SECONDS = 0.3
BUILT: dict[str, tuple[float, float]] = {}


def build(kernel: str) -> None:
    """Builds a kernel at its first call, as a library with lazily compiled kernels does."""
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


def test_ranks_build_their_kernels_at_the_same_time(pool: Pool) -> None:
    first, second = pool.run(builds_of_first_step)[0]
    assert first.keys() == second.keys() == {"forward", "backward"}
    for kernel in first:
        assert max(first[kernel][0], second[kernel][0]) < min(first[kernel][1], second[kernel][1])


def network(dropout: float = 0.0, outputs: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, outputs))


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step))
    return numbers[0], numbers[1]


def train(pipe: zbcompile.Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs, target = batch(step)
        losses.append(pipe.step(inputs, target=target).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same_parameters(model: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), reference in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        assert torch.equal(parameter, reference), name


def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    straight, interrupted = network(), network()
    pipe = pipeline(straight, F.mse_loss, exact=True)
    train(pipe, pipe.optimizer(torch.optim.AdamW, lr=1e-2), range(4))

    pipe = pipeline(interrupted, F.mse_loss, exact=True)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    train(pipe, optimizer, range(2))
    zbcompile.save_checkpoint(tmp_path, pipe, optimizer)

    resumed = network()
    pipe = pipeline(resumed, F.mse_loss, exact=True, schedule="zb-v", ranks=3)
    inputs, target = batch(0)
    pipe.compile(inputs, target=target)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    checkpoint = zbcompile.load_checkpoint(tmp_path, pipe, optimizer)
    assert checkpoint.step == 2
    train(pipe, optimizer, range(checkpoint.step, 4))
    assert_same_parameters(resumed, straight)


def test_weights_go_to_the_hub_layout_and_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes)
    model, tokens = transformers.LlamaForCausalLM(config), torch.randint(64, (8, 6))
    pipe = pipeline(model)
    pipe.step(input_ids=tokens, labels=tokens)
    zbcompile.save_weights(tmp_path / "trained", pipe)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert_same_parameters(again, model)
    zbcompile.load_weights(tmp_path / "trained", pipe)


def test_a_heavy_output_layer_is_named_and_can_be_sharded(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, inputs = network(outputs=20_000), batch(0)[0]
    labels = torch.randint(20_000, (8,))
    plain, sharded = copy.deepcopy(model), copy.deepcopy(model)
    loss = pipeline(plain, F.cross_entropy).step(inputs, target=labels)
    assert "vocab=1" in capfd.readouterr().out
    with_shards = pipeline(sharded, F.cross_entropy, vocab=1)
    torch.testing.assert_close(with_shards.step(inputs, target=labels), loss)
    assert "vocab=1" not in capfd.readouterr().out


def test_initialisation_does_not_depend_on_the_number_of_ranks() -> None:
    """`init` is called with names, so it can seed each tensor by its name."""

    def fill(name: str, tensor: Tensor) -> None:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        tensor.normal_(0, 0.1, generator=generator)

    losses = []
    for ranks in (1, 2, 4):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        pipe = pipeline(model, F.mse_loss, ranks=ranks, init=fill, exact=True)
        inputs, target = batch(0)
        losses.append(pipe.step(inputs, target=target))
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_dropout_is_seeded_by_step_and_microbatch(recompute: str) -> None:
    """The masks are those of eager mode with `microbatch_seed`, also where the forward runs
    twice."""
    ours, plain = network(dropout=0.3), network(dropout=0.3)
    inputs, target = batch(0)
    pipeline(ours, F.mse_loss, exact=True, recompute=recompute).step(inputs, target=target)
    for microbatch, (x, y) in enumerate(rows_of(inputs, target)):
        torch.manual_seed(zbcompile.microbatch_seed(0, microbatch))
        (F.mse_loss(plain(x), y) / MICROBATCHES).backward()
    for (name, parameter), reference in zip(
        ours.named_parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(parameter.grad, reference.grad), name


class Router(nn.Module):
    """Sends each row to the best two of four experts, computed densely, with a balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.drop = nn.Linear(WIDTH, 4), nn.Dropout(0.2)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x).softmax(-1).topk(2)
        outputs = torch.einsum("bi,eij->bej", self.drop(x), self.experts)
        picked = outputs.gather(1, chosen[..., None].expand(-1, -1, x.shape[1]))
        return x + (picked * weights[..., None]).sum(1)


def test_recomputation_keeps_routes_and_masks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Router() for _ in range(4)))
    copies = [copy.deepcopy(model) for _ in range(2)]
    inputs, target = batch(0)
    for variant, recompute in zip(copies, ("off", "full"), strict=True):
        pipeline(variant, F.mse_loss, exact=True, recompute=recompute).step(inputs, target=target)
    for (name, parameter), reference in zip(
        copies[0].named_parameters(), copies[1].parameters(), strict=True
    ):
        assert torch.equal(parameter.grad, reference.grad), name


def test_layers_are_frozen_and_trained_again() -> None:
    model = network()
    model[0].requires_grad_(False)
    pipe = pipeline(model, F.mse_loss)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    first = model[0][0].weight.detach().clone()
    train(pipe, optimizer, range(1))
    assert torch.equal(model[0][0].weight, first)
    model[0].requires_grad_(True)
    train(pipe, optimizer, range(1, 2))
    assert not torch.equal(model[0][0].weight, first)


def test_a_teacher_beside_a_student() -> None:
    """The teacher is a pipeline that evaluates; its outputs are targets of the student's step."""
    teacher, student, plain = network().requires_grad_(False), network(), network()
    with torch.no_grad():
        teacher[-1].weight.mul_(2)

    def distillation(output: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(
            output.log_softmax(-1), target.log_softmax(-1), None, None, "batchmean", True
        )

    inputs, _ = batch(0)
    logits = pipeline(teacher).eval(inputs)
    pipeline(student, distillation).step(inputs, target=logits)
    accumulate(plain, distillation, [((x,), {}, teacher(x)) for x in inputs.chunk(MICROBATCHES)])
    assert_same_gradients(student, plain)


class FusedLoss(torch.autograd.Function):
    """Output layer and cross entropy in chunks of rows; the forward computes the gradients, as
    Liger's fused kernels do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss, parts, by_weight = hidden.new_zeros(()), [], torch.zeros_like(weight)
        for rows, goal in zip(hidden.split(1), labels.split(1), strict=True):
            logits = rows @ weight.t()
            loss = loss + F.cross_entropy(logits, goal, reduction="sum") / len(labels)
            error = (logits.softmax(-1) - F.one_hot(goal, len(weight))) / len(labels)
            parts.append(error @ weight)
            by_weight = by_weight + error.t() @ rows
        ctx.save_for_backward(torch.cat(parts), by_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        by_hidden, by_weight = ctx.saved_tensors
        return gradients[0] * by_hidden, gradients[0] * by_weight, None


class WithFusedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = network(), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return FusedLoss.apply(self.body(x), self.head.weight, labels)


def test_a_fused_loss() -> None:
    model, inputs, labels = WithFusedLoss(), batch(0)[0], torch.randint(TOKENS, (8,))
    plain = copy.deepcopy(model)
    pipeline(model).step(inputs, labels)
    for x, goal in rows_of(inputs, labels):
        (F.cross_entropy(plain.head(plain.body(x)), goal) / MICROBATCHES).backward()
    assert_same_gradients(model, plain)


def test_evaluation_before_and_between_steps() -> None:
    model = network(dropout=0.5)
    pipe = pipeline(model, F.mse_loss)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    inputs, _ = batch(0)
    for step in range(2):
        expected = copy.deepcopy(model).eval()(inputs)
        torch.testing.assert_close(pipe.eval(inputs), expected.detach())
        train(pipe, optimizer, range(step, step + 1))
    assert model.training


def test_accumulation_over_calls_with_a_count_of_tokens() -> None:
    """Two calls add up to the gradients of one batch whose loss is a mean over all valid tokens."""

    def loss(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        labels, count = target
        return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-1) / count

    model, inputs = network(outputs=TOKENS), torch.cat([batch(0)[0], batch(1)[0]])
    labels = torch.randint(TOKENS, (16,))
    labels[:5] = -1
    plain, count = copy.deepcopy(model), (labels != -1).sum()
    pipe = pipeline(model, loss, loss_reduction="sum")
    losses = [
        pipe.step(x, target=(goal, count))
        for x, goal in zip(inputs.chunk(2), labels.chunk(2), strict=True)
    ]
    expected = F.cross_entropy(plain(inputs), labels, ignore_index=-1)
    expected.backward()
    torch.testing.assert_close(torch.stack(losses).sum(), expected.detach())
    assert_same_gradients(model, plain)


def test_a_record_says_where_time_goes() -> None:
    pipe = pipeline(network(), F.mse_loss)
    inputs, target = batch(0)
    pipe.step(inputs, target=target)
    pipe.record = True
    pipe.step(inputs, target=target)
    assert "idle" in str(pipe.last_step)


def fail_on_one_rank() -> str:
    """Rank 1 gets a batch that cannot be split."""
    pipe = zbcompile.pipeline(network(), schedule="zb-h1", microbatches=4, loss=F.mse_loss)
    inputs, target = batch(0)
    size = 8 if dist.get_rank() == 0 else 6
    with contextlib.closing(pipe), pytest.raises(zbcompile.PipelineError) as error:
        pipe.step(inputs[:size], target=target[:size])
    return str(error.value)


def test_one_rank_fails_and_all_say_so(pool: Pool) -> None:
    first, second = pool.run(fail_on_one_rank)
    pool.group = None  # its connections are closed
    assert "rank 1" in first
    assert "a batch of 6 samples cannot be split into 4" in first
    assert "a batch of 6 samples cannot be split into 4" in second


def test_a_smaller_last_batch() -> None:
    model = network()
    plain, pipe = copy.deepcopy(model), pipeline(model, F.mse_loss)
    inputs, target = batch(0)
    pipe.step(inputs, target=target)
    pipe.zero_grad()
    loss = pipe.step(inputs[:6], target=target[:6])
    assert len(pipe.compilations) == 1
    expected = F.mse_loss(plain(inputs[:6]), target[:6])
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same_gradients(model, plain)


def test_clipping_uses_the_norm_of_the_whole_model() -> None:
    model = network()
    plain, pipe = copy.deepcopy(model), pipeline(model, F.mse_loss, exact=True)
    inputs, target = batch(0)
    pipe.step(inputs, target=target)
    accumulate(plain, F.mse_loss, [((x,), {}, y) for x, y in rows_of(inputs, target)])
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert torch.equal(pipe.clip_grad_norm_(0.01), norm)
    assert_same_gradients(model, plain)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(TOKENS, WIDTH), network()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


def test_a_tied_embedding() -> None:
    model, tokens = Tied(), torch.randint(TOKENS, (8, 5))
    plain, pipe = copy.deepcopy(model), pipeline(model, token_loss)
    pipe.step(tokens, target=tokens)
    accumulate(plain, token_loss, [((x,), {}, x) for (x,) in rows_of(tokens)])
    assert_same_gradients(model, plain)
    assert {"embed.weight", "head.weight"} <= pipe.state_dict(full=True).keys()


def test_outputs_and_metrics_of_a_step() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return F.mse_loss(output, target), {"largest": output.abs().amax(1)}

    model, (inputs, target) = network(), batch(0)
    plain, pipe = copy.deepcopy(model), pipeline(model, loss)
    value, (outputs, metrics) = pipe.step(inputs, target=target, return_outputs=True)
    expected = plain(inputs)
    torch.testing.assert_close(outputs, expected.detach())
    torch.testing.assert_close(value, F.mse_loss(expected, target).detach())
    torch.testing.assert_close(metrics["largest"], expected.abs().amax(1).detach())


def gradients_of_replicas() -> list[Tensor]:
    """Trains two replicas of a pipeline of one rank, on different batches."""
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    pipe = zbcompile.pipeline(
        network(), mesh=mesh, schedule="zb-h1", microbatches=4, loss=F.mse_loss
    )
    with contextlib.closing(pipe):
        inputs, target = batch(dist.get_rank())
        pipe.step(inputs, target=target)
        return [parameter.grad.clone() for parameter in pipe.parameters()]


def test_replicas_add_up_their_gradients(pool: Pool) -> None:
    plain = network()
    microbatches = [((x,), {}, y) for step in range(2) for x, y in rows_of(*batch(step))]
    accumulate(plain, F.mse_loss, microbatches)
    for gradients in pool.run(gradients_of_replicas):
        for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)
