"""Accumulation: what adds into gradient buffers, and in which dtype sums are formed."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile

MICROBATCHES, ROWS, LENGTH, WIDTH, WORDS = 4, 2, 6, 16, 64


class ManyLayouts(nn.Module):
    """Weights in einsum, bmm and views, used twice, tied, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.query = nn.Parameter(torch.randn(WIDTH, 4, 4) / 4)
        self.out = nn.Parameter(torch.randn(4, 4, WIDTH) / 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        heads = torch.einsum("btd,dhk->bthk", x, self.query)
        x = x + torch.einsum("bthk,hkd->btd", heads, self.out)
        x = x + torch.bmm(x.reshape(4, -1, WIDTH), self.experts).reshape(x.shape)
        x = torch.tanh(self.linear(x)) @ self.square @ self.square.t()
        return self.head(x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make() -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(0, WORDS, (2, MICROBATCHES * ROWS, LENGTH))
    tokens[0, :, 0] = 0  # padding
    return ManyLayouts(), tokens[0], tokens[1]


def sums(
    model: nn.Module, loss: Any, x: Tensor, y: Tensor, parts: int = MICROBATCHES
) -> dict[str, Tensor]:
    """The sums over microbatches of eager's gradients in its dtype, in float32."""
    totals = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
        one = torch.autograd.grad(loss(model(part), target) / parts, list(model.parameters()))
        for name, gradient in zip(totals, one, strict=True):
            totals[name] += gradient
    return totals


def test_gemms_and_embeddings_add_into_their_buffers() -> None:
    """A gradient that was there before with other strides than the parameter's stays as it is."""
    model, x, y = make()
    expected = sums(copy.deepcopy(model), loss, x, y)
    model.out.grad = odd = torch.zeros(4, WIDTH, 4).transpose(1, 2)
    options = {"schedule": "1f1b", "ranks": 1, "microbatches": MICROBATCHES}
    pipe = zbcompile.pipeline(model, loss=loss, **options)
    pipe.step(x, target=y)
    assert model.out.grad is odd
    for name, parameter in model.named_parameters():
        bound = 1e-6 * expected[name].abs().max()
        assert (parameter.grad - expected[name]).abs().max() <= bound, name
    graph = pipe.program.stages[0].pieces["W"].module.graph
    targets = Counter(str(node.target) for node in graph.nodes)
    assert targets["aten.addmm_.default"] == 4  # linear, square twice, head
    assert targets["aten.baddbmm_.default"] == 3  # query, out, experts
    assert targets["aten.index_add_.default"] == 1
    assert targets["aten.add_.Tensor"] == 1  # the bias
    assert not targets["aten.embedding_dense_backward.default"]


@pytest.mark.parametrize("exact", [False, True])
def test_half_precision_is_summed_in_float32(exact: bool) -> None:
    """Eager's bfloat16 gradients, their sum in float32, rounded into `.grad` once per step."""
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    model = nn.Sequential(*layers).bfloat16()
    eager, x = copy.deepcopy(model), torch.randn(16 * ROWS, WIDTH).bfloat16()
    options = {"exact": True, "accumulate_dtype": torch.float32} if exact else {}
    options |= {"schedule": "zb-h1", "ranks": 2, "microbatches": 16, "loss": F.mse_loss}
    pipe = zbcompile.pipeline(model, **options)
    for _ in range(2):
        pipe.step(x, target=-x)
    one = sums(eager, F.mse_loss, x, -x, 16)
    for name, parameter in model.named_parameters():
        expected = (one[name] + one[name].bfloat16()).bfloat16()
        assert torch.equal(parameter.grad, expected), name


@pytest.mark.parametrize("dtype", [torch.int32, "int32", "float33"])
def test_a_wrong_dtype_is_refused(dtype: Any) -> None:
    message = r"accumulate_dtype=.*expected a floating-point dtype"
    with pytest.raises(zbcompile.PipelineError, match=message):
        zbcompile.pipeline(nn.Linear(2, 2), ranks=1, accumulate_dtype=dtype)
