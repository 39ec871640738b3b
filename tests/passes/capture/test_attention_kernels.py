"""`sdpa_kernel` inside a model, and around its steps: eager's kernel, or a refusal that names the
line."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zbcompile
from tests.support.oracle import Batch, eager_step, microbatch_loss
from tests.support.training import assert_same_tensors, gradients_of
from zbcompile.passes.errors import CaptureError

WIDTH, LENGTH, ODD, HEADS = 16, 8, 17, 2
ALL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(nn.Module):
    """Two attentions, the second with a mask, the first inside a region for `kernels`."""

    def __init__(self, kernels: Any, mask: str = "") -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.kernels, self.mask = kernels, mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._heads(0, x)
        with sdpa_kernel(self.kernels):
            x = x + self._joined(0, F.scaled_dot_product_attention(q, k, v, **self._options(x)))
        q, k, v = self._heads(1, x)
        return x + self._joined(1, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def _options(self, x: Tensor) -> dict[str, Any]:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril()
        case = {
            "bool": {"attn_mask": mask},
            "float": {"attn_mask": mask.float()},
            "causal": {"is_causal": True},
        }
        return case.get(self.mask, {"dropout_p": 0.2} if self.mask == "dropout" else {})

    def _heads(self, i: int, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.into[i](x).chunk(3, -1)
        )

    def _joined(self, i: int, x: Tensor) -> Tensor:
        return self.out[i](x.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def made(kernels: Any, mask: str = "") -> Attention:
    torch.manual_seed(0)
    return Attention(kernels, mask)


def batch() -> Batch:
    torch.manual_seed(1)
    return Batch((torch.randn(4, LENGTH, WIDTH),), {}, torch.randn(4, LENGTH, WIDTH))


def pipeline(model: nn.Module) -> zbcompile.Pipeline:
    return zbcompile.pipeline(
        model, schedule="zb-h1", ranks=2, microbatches=2, loss=F.mse_loss, exact=True
    )  # type: ignore[no-any-return]


def kernels_of(pipe: zbcompile.Pipeline) -> set[bool]:
    """Returns whether forwards have torch's fused kernel."""
    codes = [stage.pieces["F"].module.code for stage in pipe.program.stages]
    return {"flash_attention_for_cpu" in code for code in codes}


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("mask", ["", "bool", "float", "causal", "dropout"])
def test_the_formula_where_the_model_asks_for_it(mask: str) -> None:
    model, eager, case = made(SDPBackend.MATH, mask), made(SDPBackend.MATH, mask), batch()
    pipe = pipeline(model)
    assert torch.equal(
        pipe.step(*case.args, target=case.target), eager_step(eager, F.mse_loss, case, 2, 0)
    )
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
    assert kernels_of(pipe) == {False, True}
    if mask != "dropout":
        assert torch.equal(pipe.eval(*case.args), eager.eval()(*case.args))


class Biased(nn.Module):
    """Two attentions whose scores a trained table is added to, by the distance of query and key; an
    odd length."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.tables = nn.ParameterList(torch.randn(HEADS, 2 * ODD - 1) for _ in range(2))
        self.slopes = nn.ModuleList(nn.Linear(WIDTH, HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(ODD)
        for into, table, slope in zip(self.into, self.tables, self.slopes, strict=True):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in into(x).chunk(3, -1))
            bias = table[:, places[:, None] - places + ODD - 1]
            bias = bias - F.softplus(slope(x).transpose(1, 2).mul(2))[:, :, None]
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(
                x.shape
            )
        return x


@pytest.mark.slow
def test_a_mask_that_is_trained() -> None:
    """Eager computes it by the formula, whose result and gradients have other strides than the
    kernel's."""
    torch.manual_seed(0)
    model, case = Biased(), Batch((torch.randn(4, ODD, WIDTH),), {}, torch.randn(4, ODD, WIDTH))
    eager = copy.deepcopy(model)
    pipe = pipeline(model)
    assert torch.equal(
        pipe.step(*case.args, target=case.target), eager_step(eager, F.mse_loss, case, 2, 0)
    )
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")


@pytest.mark.slow
def test_a_region_around_the_step() -> None:
    """Steps inside and outside of a region have different programs."""
    model, eager, case = made(ALL), made(ALL), batch()
    model.kernels = eager.kernels = SDPBackend.MATH
    pipe = pipeline(model)
    for step, kernels in enumerate((ALL, SDPBackend.MATH, ALL)):
        model.zero_grad()
        eager.zero_grad()
        with sdpa_kernel(kernels):
            loss = pipe.step(*case.args, target=case.target)
            assert torch.equal(loss, eager_step(eager, F.mse_loss, case, 2, step))
        assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")


def test_a_kernel_that_is_not_there_is_said_by_line() -> None:
    """Eager mode has no such kernel on a CPU either."""
    case = batch()
    with pytest.raises(
        CaptureError, match=r"fails \(.*test_attention_kernels\.py:\d+\) .*No viable backend"
    ):
        pipeline(made(SDPBackend.EFFICIENT_ATTENTION)).compile(*case.args, target=case.target)


def test_a_mask_that_is_frozen() -> None:
    """Without gradients eager's attention runs a kernel, whose result has another layout than its
    formula's."""
    model = Biased().requires_grad_(False).eval()
    x = torch.randn(4, ODD, WIDTH)
    pipe = zbcompile.pipeline(copy.deepcopy(model), schedule="1f1b", ranks=1)
    assert torch.equal(pipe.eval(x, microbatches=1), model(x))


class TorchsLayers(nn.Module):
    """Layers of torch, which call attention out of sight, one inside a region."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.encoder(x, src_key_padding_mask=padding)
        with sdpa_kernel(SDPBackend.MATH):
            return x + self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("half", [True, pytest.param(False, marks=pytest.mark.beyond_sample)])
def test_layers_of_torch(half: bool) -> None:
    """With padding, dropout, and under autocast. An evaluation agrees where there is no padding:
    eager's fast path leaves zeros there."""
    model, eager, case = TorchsLayers(), TorchsLayers(), batch()
    padding = torch.arange(LENGTH).expand(4, -1) >= torch.tensor([[8], [3], [4], [2]])
    case = Batch((*case.args, padding), {}, case.target)
    pipe = pipeline(model)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        warnings.filterwarnings("error", "warm-up")  # which runs outside of the region
        loss = pipe.step(*case.args, target=case.target)
    total = torch.zeros(())
    for i, part in enumerate(case.parts(2)):
        torch.manual_seed(zbcompile.microbatch_seed(0, i))
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            one = microbatch_loss(eager, F.mse_loss, part) / 2
        one.backward()
        total = total + one.detach()
    assert torch.equal(loss, total)
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
    output, expected = pipe.eval(*case.args), eager.eval()(*case.args).detach()
    torch.testing.assert_close(output[~padding], expected[~padding])
