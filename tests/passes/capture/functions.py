"""Ways of writing a torch.autograd.Function, each as a step `way(x, layer)` of a model: `x` has
WIDTH columns, `layer` is a Linear of WIDTH by WIDTH."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import Function, once_differentiable

WIDTH = 8
Way = Callable[[Any, Any], Any]  # (x [rows, WIDTH], layer) -> [rows, WIDTH]


def function(forward: Any, backward: Any, **more: Any) -> Any:
    """Returns the `apply` of a Function, bound before any capture as many models keep it."""
    methods = {"forward": forward, "backward": backward, **more}
    return type("Made", (Function,), {n: staticmethod(m) for n, m in methods.items() if m}).apply


def saved(ctx: Any, result: Any, *tensors: Any, **more: Any) -> Any:
    ctx.save_for_backward(*tensors)
    for name, value in more.items():
        setattr(ctx, name, value)
    return result


def of_linear(ctx: Any, gradient: Any) -> Any:
    x, weight = ctx.saved_tensors
    gradient = gradient * ctx.scale
    return gradient @ weight, gradient.t() @ x, gradient.sum(0), None


def set_up(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, ctx.power = inputs
    ctx.save_for_backward(x, weight)


def of_power(ctx: Any, gradient: Any) -> Any:
    x, weight = ctx.saved_tensors
    inner = gradient * ctx.power * (x @ weight).pow(ctx.power - 1)
    return inner @ weight.t(), x.t() @ inner, None


def of_product(ctx: Any, gradient: Any) -> Any:
    weight, x = ctx.saved_tensors
    of_x = gradient @ weight.t() if ctx.needs_input_grad[0] else None
    return of_x, x.t() @ gradient if ctx.needs_input_grad[1] else None


def sort(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    values, order = x.sort(1)
    ctx.mark_non_differentiable(order)
    return saved(ctx, (values, order), order)


def masking(ctx: Any, x: Tensor) -> Tensor:
    mask = (torch.rand_like(x) > 0.25).to(x.dtype)  # random numbers, kept for backward
    return saved(ctx, x * mask * F.dropout(torch.ones_like(x), 0.5), mask)


def several(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
    ctx.set_materialize_grads(False)  # gradients that did not arrive stay None
    ctx.save_for_backward(x, weight)
    return x * weight[0], x.sin(), None, x.exp()


def of_several(ctx: Any, one: Any, two: Any, _: Any, three: Any) -> Any:
    x, weight = ctx.saved_tensors
    of_weight = F.pad((one * x).sum(0, keepdim=True), (0, 0, 0, WIDTH - 1))
    of_x = one * weight[0] + two * x.cos()
    return of_x if three is None else of_x + three * x.exp(), of_weight


def of_choose(ctx: Any, gradient: Any) -> Any:
    sign = {"plus": 1, "minus": -1}[ctx.mode]
    of_x = sign * ctx.run(gradient * ctx.saved_tensors[0], ctx.given["scale"])
    return None, of_x, None, None, None, None


def of_outer(ctx: Any, gradient: Any) -> Any:
    with torch.enable_grad():
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        result = VJP(SAVING(x, weight, weight[0], 2.0))
    return torch.autograd.grad(result, (x, weight), gradient)


def of_module(ctx: Any, gradient: Any) -> Any:
    with torch.enable_grad():
        x = ctx.saved_tensors[0].detach().requires_grad_()
        result = ctx.module(x)
    torch.autograd.backward(result, gradient)
    return x.grad, None


def early(ctx: Any, x: Tensor, weight: Tensor, functional: bool) -> Tensor:
    """The gradient is computed in forward, by autograd or by torch.func, as losses in chunks do."""
    if functional:
        gradients, result = torch.func.grad_and_value(_size, (0, 1))(x, weight)
    else:
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
            result = _size(*inputs)
        gradients = torch.autograd.grad(result, inputs)
    ctx.save_for_backward(*gradients)
    return result.detach()


def _size(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight).pow(2).sum()


@custom_bwd(device_type="cpu")
def of_plain_product(ctx: Any, gradient: Any) -> Any:
    x, weight = ctx.saved_tensors
    return gradient @ weight.t(), x.t() @ gradient


SAVING = function(
    lambda ctx, x, w, bias, scale: saved(ctx, (x @ w.t() + bias) * scale, x, w, scale=scale),
    of_linear,
)
SETUP = function(lambda x, weight, power=3: (x @ weight).pow(power), of_power, setup_context=set_up)
VJP = function(  # the other name of backward; it reads the output
    lambda ctx, x: saved(ctx, result := x.tanh(), result),
    None,
    vjp=lambda ctx, g: g * (1 - ctx.saved_tensors[0].square()),
)
ONCE = function(lambda ctx, x: x.data.clone().mul_(2), once_differentiable(lambda ctx, g: g * 2))
SORTED = function(sort, lambda ctx, g, _: g.gather(1, ctx.saved_tensors[0].argsort(1)))
NEEDED = function(
    lambda ctx, x, w: saved(
        ctx, x @ w, *(t if n else None for t, n in zip((w, x), ctx.needs_input_grad, strict=True))
    ),
    of_product,
)
SEVERAL = function(several, of_several)
CHOSEN = function(  # arguments that are no tensors
    lambda ctx, run, x, inputs, _, mode, dtype: saved(
        ctx, run(x, inputs["scale"]).to(dtype), x, run=run, given=inputs, mode=mode
    ),
    of_choose,
)
OUTER = function(lambda ctx, x, w: saved(ctx, VJP(SAVING(x, w, w[0], 2.0)), x, w), of_outer)
# parameters of the module are no arguments, and get gradients from a backward in the backward
MODULE = function(lambda ctx, x, module: saved(ctx, module(x), x, module=module), of_module)
MASKING = function(masking, lambda ctx, g: g * ctx.saved_tensors[0])
EARLY = function(early, lambda ctx, g: (*(saved * g for saved in ctx.saved_tensors), None))
PASSED = function(lambda ctx, x: x, lambda ctx, g: g * 0.5)  # the input itself, as Megatron's f
REVERSED = function(lambda ctx, x: x.view_as(x), lambda ctx, g: g.neg())
TURNED = function(lambda ctx, x: x.t(), lambda ctx, g: g.t() * 2)  # nothing is contiguous
LOWERED, CAST = (
    function(
        custom_fwd(lambda ctx, x, w: saved(ctx, x @ w, x, w), device_type="cpu", **cast),
        of_plain_product,
    )
    for cast in ({}, {"cast_inputs": torch.float32})
)


def halves(x: Any, layer: nn.Linear) -> Any:
    one, two, nothing, _ = SEVERAL(x, layer.weight)
    assert nothing is None
    return one + two


def chosen(x: Any, layer: nn.Linear) -> Any:
    one = CHOSEN(torch.mul, x, {"scale": layer.bias}, None, "minus", torch.float32)
    return one + CHOSEN(torch.mul, x, {"scale": 2}, None, "plus", torch.float32)


def under_autocast(function: Any) -> Way:
    def way(x: Any, layer: nn.Linear) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return function(torch.tanh(layer(x)), layer.weight).float()

    return way


def made_here(x: Any, layer: nn.Linear) -> Any:
    """A class made in forward, whose code reads an activation around it."""
    y = layer(x).detach()
    return function(lambda ctx, x: x * y, lambda ctx, gradient: gradient * y)(x)


def reentrant(x: Any, layer: nn.Linear) -> Any:
    return torch.utils.checkpoint.checkpoint(
        lambda x: F.dropout(torch.tanh(layer(x)), 0.25), x, use_reentrant=True
    )


def unread(x: Any, layer: nn.Linear) -> Any:
    with torch.no_grad():
        scale = SAVING(x, layer.weight, layer.bias, 0.5)
    return x * scale


WAYS: dict[str, Way] = {
    "saving": lambda x, layer: SAVING(x, layer.weight, layer.bias, 0.5),
    "with_setup": lambda x, layer: SETUP(x, layer.weight),
    "vjp": lambda x, layer: VJP(layer(x)),
    "once_differentiable": lambda x, layer: ONCE(layer(x)),
    "non_differentiable": lambda x, layer: SORTED(layer(x))[0],
    "needs_input_grad": lambda x, layer: NEEDED(x, layer.weight) + NEEDED(x.detach(), layer.weight),
    "materialize_grads": halves,
    "arguments": chosen,
    "nested": lambda x, layer: OUTER(x, layer.weight),
    "module": lambda x, layer: MODULE(x, layer),
    "view": lambda x, layer: REVERSED(layer(x)),
    "itself": lambda x, layer: layer(PASSED(x)),
    "random": lambda x, layer: MASKING(layer(x)),
    "autocast": under_autocast(LOWERED),
    "cast_inputs": under_autocast(CAST),
    "turned": lambda x, layer: TURNED(TURNED(layer(x)) * 2),
    "made_here": made_here,
    "gradient_in_forward": lambda x, layer: x * EARLY(x, layer.weight, False),
    "torch_func": lambda x, layer: x * EARLY(x, layer.weight, True),
    "no_grad": unread,
    "reentrant_checkpoint": reentrant,
}


class Step(nn.Module):
    """One way, with a layer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return WAYS[self.name](x, self.layer)


class Ways(nn.Module):
    """Some of the ways, in turn. `steps.<i>` is a cut before a way, `norms.<i>` one behind it."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Step(name) for name in names)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in names)

    def forward(self, x: Tensor) -> Tensor:
        for step, norm in zip(self.steps, self.norms, strict=True):
            x = norm(step(x))
        return x
