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
    """Weights that reach their products through einsum, bmm and views, used twice, tied, and an
    embedding."""

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


def make(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(0, WORDS, (2, MICROBATCHES * ROWS, LENGTH))
    return ManyLayouts().to(dtype), tokens[0], tokens[1]


def pipeline(model: nn.Module, **options: Any) -> zbcompile.Pipeline:
    return zbcompile.pipeline(
        model, schedule="1f1b", ranks=1, microbatches=MICROBATCHES, loss=loss, **options
    )


def microbatch_gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Eager's gradient of every parameter for every microbatch alone."""
    actual = []
    for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        gradients = torch.autograd.grad(
            loss(model(part), target) / MICROBATCHES, list(model.parameters())
        )
        actual.append(dict(zip(dict(model.named_parameters()), gradients, strict=True)))
    return actual


@pytest.mark.slow
def test_gemms_and_embeddings_add_into_their_buffers() -> None:
    model, x, y = make()
    eager = copy.deepcopy(model)
    pipe = pipeline(model)
    pipe.step(x, target=y)
    for gradients in microbatch_gradients(eager, x, y):
        for name, parameter in eager.named_parameters():
            parameter.grad = (
                gradients[name] if parameter.grad is None else parameter.grad + gradients[name]
            )
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).abs().max() <= 1e-6 * theirs.grad.abs().max()
    targets = Counter(
        str(node.target) for node in pipe.program.stages[0].pieces["W"].module.graph.nodes
    )
    assert targets["aten.addmm_.default"] == 4  # linear, square twice, head
    assert targets["aten.baddbmm_.default"] == 3  # query, out, experts
    assert targets["aten.index_add_.default"] == 1
    assert targets["aten.add_.Tensor"] == 1  # the bias
    assert not targets["aten.embedding_dense_backward.default"]


@pytest.mark.parametrize("exact", [False, True])
def test_half_precision_is_summed_in_float32(exact: bool) -> None:
    """Per microbatch eager's bfloat16 gradients, their sum in float32, rounded into `.grad` once
    per step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    ).bfloat16()
    eager, x = copy.deepcopy(model), torch.randn(16 * ROWS, WIDTH).bfloat16()
    options = {"exact": True, "accumulate_dtype": torch.float32} if exact else {}
    pipe = zbcompile.pipeline(
        model, schedule="zb-h1", ranks=2, microbatches=16, loss=F.mse_loss, **options
    )
    expected: dict[str, Tensor] = {}
    for step in range(2):
        pipe.step(x, target=-x)
        sums = {name: torch.zeros(p.shape) for name, p in eager.named_parameters()}
        for part in x.chunk(16):
            one = torch.autograd.grad(F.mse_loss(eager(part), -part) / 16, list(eager.parameters()))
            for name, gradient in zip(sums, one, strict=True):
                sums[name] += gradient
        expected = {n: (sums[n] + expected[n] if step else sums[n]).bfloat16() for n in sums}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.bfloat16
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.slow
def test_exact_sums_half_precision_as_eager_does() -> None:
    model, x, y = make(torch.bfloat16)
    eager = copy.deepcopy(model)
    pipeline(model, exact=True).step(x, target=y)
    for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (loss(eager(part), target) / MICROBATCHES).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_an_odd_gradient_that_was_there_before() -> None:
    """Strides other than the parameter's are left as they are."""
    model, x, y = make()
    eager = copy.deepcopy(model)
    odd = torch.ones(4, WIDTH, 4).transpose(1, 2)
    assert isinstance(model.out, nn.Parameter)
    model.out.grad = odd
    pipeline(model).step(x, target=y)
    expected = sum(gradients["out"] for gradients in microbatch_gradients(eager, x, y))
    assert model.out.grad is odd
    torch.testing.assert_close(odd - 1, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, "int32", "float33"])
def test_a_wrong_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(
        zbcompile.PipelineError, match=r"accumulate_dtype=.*expected a floating-point dtype"
    ):
        pipeline(nn.Linear(2, 2), accumulate_dtype=dtype)
