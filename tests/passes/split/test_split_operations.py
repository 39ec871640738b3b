"""Every kind of operation that a weight reaches, as the middle of three stages, has eager's bits in
any order of B and W. W has the contractions that belong there."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import register_flop_formula

from tests.support.pass_graph_runner import Runner, differences, eager_step
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.compile_step import CompiledStep, compile_graph
from zbcompile.passes.graph.roles import SAVED, WEIGHT_GRADIENT
from zbcompile.passes.partition.cut_points import ForwardLine
from zbcompile.passes.step_graph import Label, StepGraph
from zbcompile.schedules.ir.actions import Action

D, MICROBATCHES = 6, 2
ORDERS = ("F0 B0 W0 F1 B1 W1", "F0 B0 F1 B1 W0 W1", "F0 BW0 F1 BW1")


class Middle(nn.Module):
    """`inner` between a layer that makes its input differentiable and a loss."""

    def __init__(self, inner: nn.Module, like: Tensor) -> None:
        super().__init__()
        self.before = nn.ParameterList([nn.Parameter(torch.rand_like(like[:1]) + 0.5)])
        self.inner = inner
        self.after = nn.ParameterList([nn.Parameter(torch.tensor(0.7))])

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x * self.before[0])
        y = torch.view_as_real(y) if y.is_complex() else y
        return (y * torch.sin(y) * self.after[0]).sum()


def compile_middle(inner: nn.Module, x: Tensor) -> tuple[CompiledStep, Middle]:
    """`inner` compiled as stage 1 of 3; `x` is one microbatch of its input."""
    model = Middle(inner, x)
    step = export_training_step(model, (x,), {})
    return compile_graph(step, ranks_of=range(3), exact=True, choose_cuts=_around_inner), model


def _around_inner(step: StepGraph, line: ForwardLine) -> tuple[int, int]:
    """The cut before the first operation of `inner`, and the one after its last."""
    stacks = [str(node.meta.get("nn_module_stack")) for node in line.nodes]
    inner = [index for index, stack in enumerate(stacks) if "inner" in stack]
    first = max((cut for cut in line.cuts if cut <= min(inner)), default=line.cuts[0])
    return first, next(cut for cut in line.cuts if cut > max(first, *inner))


class Function(nn.Module):
    """A function of the input and parameters of the given shapes."""

    def __init__(self, function: Callable, *shapes: tuple[int, ...], **options: Any) -> None:
        super().__init__()
        self.function = function
        weights = (nn.Parameter(torch.randn(shape, **options) * 0.5) for shape in shapes)
        self.p = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.p)


def f(function: Callable, *shapes: tuple[int, ...], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Function(function, *shapes, **options)


def adapter() -> nn.Module:
    """A frozen linear layer and a low-rank path."""
    model = Function(lambda x, up, down: model.base(x) + x @ down @ up, (2, D), (D, 2))
    model.base = nn.Linear(D, D).requires_grad_(False)
    return model


class Attention(nn.Module):
    """Attention of four heads, with the projections of a transformer."""

    def __init__(self, key_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 4 * key_heads), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.q(x), *self.kv(x).chunk(2, dim=-1))
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in (q, k, v))
        return self.out(
            F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)
        )


@torch.library.custom_op("zbcompile_tests::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.exp()


@torch.library.custom_op("zbcompile_tests::scaled_backward", mutates_args=())
def scaled_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.exp()
    return gradient * scale, (gradient * x * scale).sum(0)


scaled.register_fake(lambda x, weight: torch.empty_like(x))
scaled_backward.register_fake(lambda g, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
scaled.register_autograd(
    lambda ctx, gradient: scaled_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def split_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return gradient * weight, scale_gradient(gradient, x)


@torch.library.custom_op("zbcompile_tests::split_scaled", mutates_args=())
def split_scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


@torch.library.custom_op("zbcompile_tests::scale_gradient", mutates_args=())
def scale_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return (gradient * x).sum(0)


split_scaled.register_fake(lambda x, weight: torch.empty_like(x))
scale_gradient.register_fake(lambda gradient, x: gradient.new_empty(gradient.shape[1:]))
split_scaled.register_autograd(
    split_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
register_flop_formula(torch.ops.zbcompile_tests.scale_gradient)(
    lambda gradient, x, **_: 2 * math.prod(gradient)
)
PLACES, BAGS = torch.tensor([0, 2, 2, 4]), torch.tensor([[1, 0], [3, 1], [2, 2], [0, 4]])


def _added_at(x: Tensor, w: Tensor) -> Tensor:
    return x @ torch.zeros(D, D).index_put((torch.tensor([0, 2, 0]),), w, accumulate=True)


def _biased_attention(x: Tensor, bias: Tensor) -> Tensor:
    q = x.unflatten(-1, (4, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias).transpose(1, 2).flatten(2)


def _conv(dims: int, transposed: bool = False, **options: Any) -> Callable[[], nn.Module]:
    name = f"Conv{'Transpose' * transposed}{dims}d"
    return lambda: getattr(nn, name)(4, 8, 3, stride=2, padding=1, **options)


ROWS, SEQUENCE, HEADS = (4, D), (2, 5, D), (2, 5, 8)
IMAGE = {1: (2, 4, 9), 2: (2, 4, 7, 7), 3: (2, 4, 5, 5, 5)}
# (module, shape of its input, whether W has contractions: those that only a sum or a view follows)
OPERATIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "linear": (lambda: nn.Linear(D, D), ROWS, True),
    # torch counts no FLOPs of it
    "bilinear": (f(lambda x, w: F.bilinear(x, x, w), (D, D, D)), ROWS, False),
    "matmul-of-transposed": (f(lambda x, w: x.t() @ w, (4, D)), ROWS, True),
    "addmm": (f(lambda x, w, b: torch.addmm(b, x, w), (D, D), (D,)), ROWS, True),
    "einsum": (f(lambda x, w: torch.einsum("btd,dhk->bhtk", x, w), (D, 2, 3)), SEQUENCE, True),
    "embedding-bag": (f(lambda x, w: x + F.embedding_bag(BAGS, w), (5, D)), ROWS, False),
    "embedding-padding": (
        f(lambda x, w: x + F.embedding(PLACES, w, padding_idx=2), (5, D)),
        ROWS,
        False,
    ),
    "conv2d-grouped": (_conv(2, groups=4), IMAGE[2], True),
    "conv2d-last": (lambda: _conv(2)().to(memory_format=torch.channels_last), IMAGE[2], True),
    "conv3d-transposed": (_conv(3, transposed=True, groups=2), IMAGE[3], True),
    "layer-norm": (lambda: nn.LayerNorm(D), ROWS, False),
    "group-norm": (lambda: nn.GroupNorm(2, 4), IMAGE[2], False),
    "batch-norm": (lambda: nn.BatchNorm2d(4), IMAGE[2], False),
    "attention-masked": (lambda: Attention(attn_mask=torch.randn(5, 5)), HEADS, True),
    "attention-bias": (f(_biased_attention, (5, 5)), HEADS, False),
    "attention-dropout": (lambda: Attention(dropout_p=0.3), HEADS, True),
    "distance": (f(lambda x, w: x + torch.dist(x, w, 4), (D,)), ROWS, False),
    "index": (f(lambda x, w: x + w[PLACES], (5, D)), ROWS, False),
    "index-put": (f(_added_at, (3, D)), ROWS, True),
    "twice": (f(lambda x, w: torch.tanh(x @ w) @ w, (D, D)), ROWS, True),
    "weight-norm": (lambda: parametrizations.weight_norm(nn.Linear(D, D)), ROWS, True),
    "spectral-norm": (lambda: parametrizations.spectral_norm(nn.Linear(D, D)).eval(), ROWS, True),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(D, D)), ROWS, True),
    "adapter": (adapter, ROWS, True),
    "complex": (f(lambda x, w: x.to(w.dtype) @ w, (D, D), dtype=torch.complex64), ROWS, True),
    "custom-operator": (f(lambda x, w: scaled(x, w), (D,)), ROWS, False),
    "custom-product": (f(lambda x, w: split_scaled(x, w), (D,)), ROWS, True),
    "prelu": (lambda: nn.PReLU(), ROWS, False),
}


@pytest.mark.mostly_slow(every=6, suite=3)
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_have_eagers_bits(name: str) -> None:
    make, shape, contracts = OPERATIONS[name]
    compiled, model = compile_middle(make(), torch.randn(shape))
    flops = compiled.passes[Label(1, "W")].flops
    assert compiled.fused[1].flops == compiled.passes[Label(1, "B")].flops + flops
    assert bool(flops) == contracts
    batches = [((torch.randn(shape),), {}, None) for _ in range(MICROBATCHES)]
    for order in ORDERS:
        orders = [[Action(a[:-1], stage, int(a[-1])) for a in order.split()] for stage in range(3)]
        result = Runner(compiled, model, batches).run(orders)
        assert not differences(result, eager_step(model, batches, None)), order


def test_the_weights_of_a_frozen_base_are_in_no_w() -> None:
    """W has the two products of an adapter's low-rank path; a frozen layer has no W."""
    compiled, _ = compile_middle(adapter(), torch.randn(ROWS))
    weight = compiled.passes[Label(1, "W")]
    assert weight.flops == 2 * (2 * ROWS[0] * D * 2)
    gradients = {slot.name for slot in weight.outputs if slot.role == WEIGHT_GRADIENT}
    assert gradients == {"inner.p.0", "inner.p.1"}
    frozen, _ = compile_middle(nn.Linear(D, D).requires_grad_(False), torch.randn(ROWS))
    assert frozen.passes[Label(1, "W")].empty
    assert not [slot for slot in frozen.passes[Label(1, "B")].outputs if slot.role == SAVED]
