"""Every kind of operation that a weight reaches, as the middle of three stages, has gradients of
eager autograd: with B then W immediately, W after all other microbatches, and both in one. W has the
contractions that belong there.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.middle_stage import MICROBATCHES, ORDERS, compile_middle, differences_of_order
from zbcompile.passes.graph.roles import SAVED, WEIGHT_GRADIENT
from zbcompile.passes.step_graph import Label

D = 6


class Function(nn.Module):
    """A function of the input and parameters of the given shapes."""

    def __init__(
        self, function: Callable[..., Tensor], *shapes: tuple[int, ...], **options: Any
    ) -> None:
        super().__init__()
        self.function = function
        self.p = nn.ParameterList(
            nn.Parameter(torch.randn(shape, **options) * 0.5) for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.p)


def f(
    function: Callable[..., Tensor], *shapes: tuple[int, ...], **options: Any
) -> Callable[[], nn.Module]:
    return lambda: Function(function, *shapes, **options)


class Adapter(nn.Module):
    """A frozen linear layer and a low-rank path."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Looked(nn.Module):
    """Rows of a table with one for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, D, padding_idx=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.tensor([1, 0, 3, 1]))


class Attention(nn.Module):
    """Attention of four heads, with the projections of a transformer."""

    def __init__(self, key_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.options, self.key_heads = options, key_heads
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 4 * key_heads)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, -1, 2).transpose(1, 2)
        k, v = (t.view(batch, length, -1, 2).transpose(1, 2) for t in self.kv(x).chunk(2, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, 8))


class Spectral(nn.Module):
    """A weight divided by its largest singular value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64) @ self.weight


@torch.library.custom_op("zbcompile_tests::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.exp()


@scaled.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("zbcompile_tests::scaled_backward", mutates_args=())
def scaled_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.exp()
    return gradient * scale, (gradient * x * scale).sum(0)


@scaled_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


scaled.register_autograd(
    lambda ctx, gradient: scaled_backward(gradient, *ctx.saved_tensors),  # type: ignore[arg-type]
    setup_context=_remember,
)


def _twice(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) @ w


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _indexed(x: Tensor, w: Tensor) -> Tensor:
    return x + w[torch.tensor([0, 2, 2, 4])]


def _gathered(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.gather(w, 0, torch.tensor([[0, 1, 2, 1, 0, 3]] * 4))


def _scattered(x: Tensor, w: Tensor) -> Tensor:
    return x @ torch.zeros(D, D).scatter(0, torch.tensor([[0, 1, 2, 5, 4, 3]]), w)


def _selected(x: Tensor, w: Tensor) -> Tensor:
    return x + torch.index_select(w, 0, torch.tensor([0, 2, 2, 4]))


def _added_at(x: Tensor, w: Tensor) -> Tensor:
    return x @ torch.zeros(D, D).index_put((torch.tensor([0, 2, 0]),), w, accumulate=True)


def _biased_attention(x: Tensor, bias: Tensor) -> Tensor:
    q = x.unflatten(-1, (4, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias).transpose(1, 2).flatten(2)


def _weighted_bags(x: Tensor, w: Tensor, by: Tensor) -> Tensor:
    rows = torch.tensor([[1, 0], [3, 1], [2, 2], [0, 4]])
    return x + F.embedding_bag(rows, w, per_sample_weights=by, mode="sum")


def _embedded(x: Tensor, w: Tensor) -> Tensor:
    return x + F.embedding(torch.tensor([1, 0, 3, 1]), w)


def _bagged(x: Tensor, w: Tensor) -> Tensor:
    return x + F.embedding_bag(torch.tensor([1, 0, 3, 1, 2, 2]), w, torch.tensor([0, 1, 3, 4]))


def _conv(
    dims: int, transposed: bool = False, groups: int = 1, bias: bool = True
) -> Callable[[], nn.Module]:
    name = f"Conv{'Transpose' * transposed}{dims}d"
    return lambda: getattr(nn, name)(4, 8, 3, stride=2, padding=1, groups=groups, bias=bias)


ROWS, SEQUENCE, HEADS = (4, D), (2, 5, D), (2, 5, 8)
IMAGE = {1: (2, 4, 9), 2: (2, 4, 7, 7), 3: (2, 4, 5, 5, 5)}

# name: (module, shape of its input, whether W has contractions: those that only a sum or a view
# follows)
OPERATIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "linear": (lambda: nn.Linear(D, D), ROWS, True),
    "linear-3d": (lambda: nn.Linear(D, D, bias=False), SEQUENCE, True),
    "bilinear": (
        f(lambda x, w: F.bilinear(x, x, w), (D, D, D)),
        ROWS,
        False,
    ),  # torch counts no FLOPs of it
    "matmul": (f(torch.matmul, (D, D)), SEQUENCE, True),
    "matmul-transposed": (f(lambda x, w: x @ w.t(), (D, D)), ROWS, True),
    "matmul-of-transposed": (f(lambda x, w: x.t() @ w, (4, D)), ROWS, True),
    "matmul-left": (f(lambda x, w: w @ x, (D, 4)), ROWS, True),
    "matmul-batched": (f(torch.matmul, (2, D, 3)), SEQUENCE, True),
    "matmul-vector": (f(lambda x, w: x @ w, (D,)), ROWS, True),
    "addmm": (f(lambda x, w, b: torch.addmm(b, x, w), (D, D), (D,)), ROWS, True),
    "bmm": (f(torch.bmm, (2, D, D)), SEQUENCE, True),
    "baddbmm": (f(lambda x, w, b: torch.baddbmm(b, x, w), (2, D, D), (2, 1, D)), SEQUENCE, True),
    "einsum": (f(lambda x, w: torch.einsum("btd,dhk->bhtk", x, w), (D, 2, 3)), SEQUENCE, True),
    "embedding": (f(_embedded, (5, D)), ROWS, False),
    "embedding-bag": (f(_bagged, (5, D)), ROWS, False),
    "embedding-bag-weighted": (f(_weighted_bags, (5, D), (4, 2)), ROWS, False),
    "embedding-padding": (lambda: Looked(), ROWS, False),
    "conv1d": (_conv(1), IMAGE[1], True),
    "conv2d": (_conv(2), IMAGE[2], True),
    "conv2d-no-bias": (_conv(2, bias=False), IMAGE[2], True),
    "conv2d-grouped": (_conv(2, groups=4), IMAGE[2], True),
    "conv2d-channels-last": (
        lambda: _conv(2)().to(memory_format=torch.channels_last),
        IMAGE[2],
        True,
    ),
    "conv3d": (_conv(3), IMAGE[3], True),
    "conv1d-transposed": (_conv(1, transposed=True), IMAGE[1], True),
    "conv2d-transposed": (_conv(2, transposed=True), IMAGE[2], True),
    "conv3d-transposed": (_conv(3, transposed=True, groups=2), IMAGE[3], True),
    "layer-norm": (lambda: nn.LayerNorm(D), ROWS, False),
    "rms-norm": (lambda: nn.RMSNorm(D), ROWS, False),
    "rms-norm-by-hand": (f(_rms, (D,)), SEQUENCE, False),
    "group-norm": (lambda: nn.GroupNorm(2, 4), IMAGE[2], False),
    "batch-norm": (lambda: nn.BatchNorm2d(4), IMAGE[2], False),
    "attention": (lambda: Attention(), HEADS, True),
    "attention-causal": (lambda: Attention(is_causal=True), HEADS, True),
    "attention-masked": (lambda: Attention(attn_mask=torch.randn(5, 5)), HEADS, True),
    "attention-bias": (f(_biased_attention, (5, 5)), HEADS, False),
    "attention-dropout": (lambda: Attention(dropout_p=0.3), HEADS, True),
    "attention-dropout-of-a-half": (lambda: Attention(dropout_p=0.5), HEADS, True),
    "distance": (f(lambda x, w: x + torch.dist(x, w, 4), (D,)), ROWS, False),
    "attention-grouped-queries": (lambda: Attention(key_heads=1, enable_gqa=True), HEADS, True),
    "index": (f(_indexed, (5, D)), ROWS, False),
    "index-select": (f(_selected, (5, D)), ROWS, False),
    "index-put": (f(_added_at, (3, D)), ROWS, True),
    "gather": (f(_gathered, (4, D)), ROWS, False),
    "scatter": (f(_scattered, (1, D)), ROWS, True),
    "twice": (f(lambda x, w: x @ w @ w, (D, D)), ROWS, True),
    "twice-nonlinear": (f(_twice, (D, D)), ROWS, True),
    "square-of-weight": (f(lambda x, w: x @ (w @ w), (D, D)), ROWS, True),
    "weight-norm": (
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, D)),
        ROWS,
        True,
    ),
    "spectral-norm": (Spectral, ROWS, True),
    "adapter": (Adapter, ROWS, True),
    "frozen": (lambda: nn.Linear(D, D).requires_grad_(False), ROWS, False),
    "bias-alone": (f(lambda x, b: torch.tanh(x * 2) + b, (D,)), SEQUENCE, False),
    "orthogonal": (lambda: torch.nn.utils.parametrizations.orthogonal(nn.Linear(D, D)), ROWS, True),
    "complex": (Complex, ROWS, True),
    "complex-double": (
        f(lambda x, w: x.to(w.dtype) @ w, (D, D), dtype=torch.complex128),
        ROWS,
        True,
    ),
    "double": (f(lambda x, w: x.double() @ w, (D, D), dtype=torch.float64), ROWS, True),
    "custom-operator": (f(lambda x, w: scaled(x, w), (D,)), ROWS, False),
    "prelu": (lambda: nn.PReLU(), ROWS, False),
}


@pytest.mark.mostly_slow(every=16, suite=8)
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_have_eagers_bits(name: str) -> None:
    make, shape, contracts = OPERATIONS[name]
    torch.manual_seed(0)
    compiled, model = compile_middle(make(), torch.randn(shape))
    flops = compiled.passes[Label(1, "W")].flops
    assert compiled.fused[1].flops == compiled.passes[Label(1, "B")].flops + flops
    assert bool(flops) == contracts
    batches = [((torch.randn(shape),), {}, None) for _ in range(MICROBATCHES)]
    for order, actions in ORDERS.items():
        assert not differences_of_order(compiled, model, batches, actions), order


def test_the_weights_of_a_frozen_base_are_in_no_w() -> None:
    """W has the two products of an adapter's low-rank path; a frozen layer has no W."""
    adapter, _ = compile_middle(Adapter(), torch.randn(ROWS))
    weight = adapter.passes[Label(1, "W")]
    assert weight.flops == 2 * (2 * ROWS[0] * D * 2)
    gradients = {slot.name for slot in weight.outputs if slot.role == WEIGHT_GRADIENT}
    assert gradients == {"inner.down.weight", "inner.up.weight"}
    frozen, _ = compile_middle(nn.Linear(D, D).requires_grad_(False), torch.randn(ROWS))
    assert frozen.passes[Label(1, "W")].empty
    assert not [slot for slot in frozen.passes[Label(1, "B")].outputs if slot.role == SAVED]
