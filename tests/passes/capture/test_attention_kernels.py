"""`sdpa_kernel` in a model and around its steps: eager's kernel, or a refusal with the line."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.training import AsEager
from zbcompile.passes.errors import CaptureError

WIDTH, LENGTH, ODD, HEADS = 16, 8, 17, 2
ALL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def heads(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in x.chunk(3, -1))


class Attention(nn.Module):
    """Two attentions, the first inside a region for `kernels`."""

    def __init__(self, kernels: Any, **options: Any) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.kernels, self.options = kernels, options

    def forward(self, x: Tensor) -> Tensor:
        for into, options in zip(self.into, (self.options, {"is_causal": True}), strict=True):
            with sdpa_kernel(self.kernels if options is self.options else ALL):
                mixed = F.scaled_dot_product_attention(*heads(into(x)), **options)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x


def compared(model: nn.Module) -> AsEager:
    return AsEager(model, 2, schedule="zb-h1", ranks=2)


def batch(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 4, length, WIDTH).unbind()


MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("options", [{"attn_mask": MASK}, {}, {"dropout_p": 0.2}], ids=list)
def test_the_formula_where_the_model_asks_for_it(options: dict[str, Any]) -> None:
    both, (x, target) = compared(Attention(SDPBackend.MATH, **options)), batch()
    both.step(x, target=target)
    codes = [stage.pieces["F"].module.code for stage in both.pipe.program.stages]
    assert ["flash_attention_for_cpu" in code for code in codes] == [False, True]
    if "dropout_p" not in options:
        assert torch.equal(both.pipe.eval(x), both.eager.eval()(x))


class Biased(nn.Module):
    """Two attentions with a trained bias by the distance of query and key; an odd length."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.tables = nn.ParameterList(torch.randn(HEADS, 2 * ODD - 1) for _ in range(2))
        self.slopes = nn.ModuleList(nn.Linear(WIDTH, HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(ODD)
        for into, table, slope in zip(self.into, self.tables, self.slopes, strict=True):
            bias = table[:, places[:, None] - places + ODD - 1]
            bias = bias - F.softplus(slope(x).transpose(1, 2).mul(2))[:, :, None]
            mixed = F.scaled_dot_product_attention(*heads(into(x)), attn_mask=bias)
            x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x


@pytest.mark.slow
def test_a_mask_that_is_trained() -> None:
    """Eager computes it by the formula, whose strides are not the kernel's."""
    x, target = batch(ODD)
    compared(Biased()).step(x, target=target)


@pytest.mark.slow
def test_a_region_around_the_step() -> None:
    """Steps inside and outside of a region have different programs."""
    both, (x, target) = compared(Attention(SDPBackend.MATH)), batch()
    for kernels in (ALL, SDPBackend.MATH, ALL):
        with sdpa_kernel(kernels):
            both.step(x, target=target)


def test_a_kernel_that_is_not_there_is_said_by_line() -> None:
    """Eager mode has no such kernel on a CPU either."""
    x, target = batch()
    pipe = compared(Attention(SDPBackend.EFFICIENT_ATTENTION)).pipe
    message = r"fails \(.*test_attention_kernels\.py:\d+\) .*No viable backend"
    with pytest.raises(CaptureError, match=message):
        pipe.compile(x, target=target)


class TorchsLayers(nn.Module):
    """Layers of torch, which call attention out of sight, one inside a region."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.encoder(x, src_key_padding_mask=padding)
        with sdpa_kernel(SDPBackend.MATH):
            return x + self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.slow
def test_layers_of_torch() -> None:
    """With padding, where eager's fast path of evaluations leaves zeros, and dropout."""
    both, (x, target) = compared(TorchsLayers()), batch()
    padding = torch.arange(LENGTH).expand(4, -1) >= torch.tensor([[8], [3], [4], [2]])
    both.step(x, padding, target=target)
    output, expected = both.pipe.eval(x, padding), both.eager.eval()(x, padding).detach()
    torch.testing.assert_close(output[~padding], expected[~padding])
