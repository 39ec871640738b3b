"""Tests of the answers in docs/faq.md, and situations that users of other pipelines reported.

Each test has a tiny model and uses public names only. A strict xfail is a situation that is not
handled yet; its reason says what a user meets today.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile

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
            one.grad, reference.grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def rows_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.chunk(MICROBATCHES) for tensor in tensors), strict=True)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


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


@pytest.mark.parametrize("part", ["function", "blocks", "wrapped blocks", "model"])
def test_blocks_that_are_compiled_in_place(part: str) -> None:
    """Also a compiled function, and a model that is compiled as a whole."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Activated() for _ in range(4)))
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    for block in model if part == "blocks" else ():
        block.compile(backend="eager")
    for i in range(4) if part == "wrapped blocks" else ():
        model[i] = torch.compile(model[i], backend="eager")
    wrapped: Any = torch.compile(model, backend="eager") if part == "model" else model
    pipeline(wrapped, F.mse_loss).step(x, target=y)
    accumulate(plain, F.mse_loss, [((a,), {}, b) for a, b in rows_of(x, y)])
    assert_same_gradients(model, plain)


def network(dropout: float = 0.0, outputs: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, outputs))


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step))
    return numbers[0], numbers[1]


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


def test_a_teacher_beside_a_student() -> None:
    """The teacher is a pipeline that evaluates; its outputs are targets of the student's step."""
    teacher, student, plain = network().requires_grad_(False), network(), network()
    with torch.no_grad():
        teacher[-1].weight.mul_(2)

    def distillation(output: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(output.log_softmax(-1), target.softmax(-1), reduction="batchmean")

    inputs, _ = batch(0)
    logits = pipeline(teacher).eval(inputs)
    pipeline(student, distillation).step(inputs, target=logits)
    accumulate(plain, distillation, [((x,), {}, teacher(x)) for x in inputs.chunk(MICROBATCHES)])
    assert_same_gradients(student, plain)
