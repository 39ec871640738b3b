"""Ways of writing a torch.autograd.Function, each as a step `way(x, layer)` of a model: `x` has
WIDTH columns, `layer` is a Linear of WIDTH by WIDTH."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import Function, once_differentiable

WIDTH = 8
Way = Callable[[Any, Any], Any]  # (x [rows, WIDTH], layer) -> [rows, WIDTH]


class Saving(Function):
    """forward with ctx; tensors saved, a number on ctx, None for what needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return (x @ weight.t() + bias) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0] * ctx.scale
        return gradient @ weight, gradient.t() @ x, gradient.sum(0), None


class WithSetup(Function):
    """forward without ctx, with setup_context and a default argument."""

    @staticmethod
    def forward(x: Any, weight: Any, power: int = 3) -> Any:
        return (x @ weight).pow(power)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.power = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        inner = gradients[0] * ctx.power * (x @ weight).pow(ctx.power - 1)
        return inner @ weight.t(), x.t() @ inner, None


class AsVjp(Function):
    """vjp, the other name of backward; what it saves is its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.tanh()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def vjp(ctx: Any, *gradients: Any) -> Any:
        (result,) = ctx.saved_tensors
        return gradients[0] * (1 - result * result)


class Ranked(Function):
    """An output without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = x.sort(1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        return values, order

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradients[0]).scatter(1, order, gradients[0])


class Once(Function):
    """once_differentiable; forward takes `.data` and works in place on its copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        copy = x.data.clone()
        copy.sin_().mul_(2)
        ctx.save_for_backward(x)
        return copy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        result = gradients[0].clone()
        result *= x.cos()
        return result.mul_(2)


class Needed(Function):
    """Gradients only for what needs one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(
            x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None
        )
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        of_x = gradients[0] @ weight.t() if ctx.needs_input_grad[0] else None
        return of_x, x.t() @ gradients[0] if ctx.needs_input_grad[1] else None


class Halves(Function):
    """Several outputs; gradients that did not arrive stay None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return x * weight[0], x.sin(), None, x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        one, two, _, three = gradients
        of_weight = F.pad((one * x).sum(0, keepdim=True), (0, 0, 0, WIDTH - 1))
        of_x = one * weight[0] + two * x.cos()
        return of_x if three is None else of_x + three * x.exp(), of_weight


class Chosen(Function):
    """Arguments that are no tensors: a function, a mapping with a tensor in it, None, a string, a
    type."""

    @staticmethod
    def forward(
        ctx: Any, run: Any, x: Tensor, inputs: Any, nothing: None, mode: str, dtype: torch.dtype
    ) -> Tensor:
        ctx.run, ctx.given, ctx.mode = run, inputs, mode
        ctx.save_for_backward(x)
        return run(x, inputs["scale"]).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        sign = {"plus": 1, "minus": -1}[ctx.mode]
        return None, sign * ctx.run(gradients[0] * x, ctx.given["scale"]), None, None, None, None


class Outer(Function):
    """A Function that calls a Function, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return AsVjp.apply(Saving.apply(x, weight, weight[0], 2.0))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            result = AsVjp.apply(Saving.apply(x, weight, weight[0], 2.0))
        return torch.autograd.grad(result, (x, weight), gradients)


class Module(Function):
    """A module inside: its parameters are no arguments, and get their gradients from a backward
    inside the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Any:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            result = ctx.module(x)
        torch.autograd.backward(result, gradients)
        return x.grad, None


class Frozen(Function):
    """A module inside that is only read: its parameters get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Any:
        ctx.module = module
        return x + module(x).sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.module.weight.abs().sum(), None


class Early(Function):
    """The gradient is computed in forward, by autograd or by torch.func, as losses in chunks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, functional: bool) -> Tensor:
        if functional:
            *gradients, result = _flat(torch.func.grad_and_value(_size, (0, 1))(x, weight))
        else:
            with torch.enable_grad():
                inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
                result = _size(*inputs)
            gradients = list(torch.autograd.grad(result, inputs))
        ctx.save_for_backward(*gradients)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *(saved * gradients[0] for saved in ctx.saved_tensors), None


def _size(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight).pow(2).sum()


def _flat(pair: Any) -> list[Tensor]:
    return [*pair[0], pair[1]]


class Reversed(Function):
    """A view of the input, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].neg() * ctx.factor, None


class Passed(Function):
    """The input itself, as Megatron's f returns it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 0.5


class Rounded(Function):
    """Straight through: no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Masking(Function):
    """Random numbers in forward, kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = (torch.rand_like(x) > 0.25).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask * F.dropout(torch.ones_like(x), 0.5)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0]


class Lowered(Function):
    """Autocast as it was in forward, in backward too."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


class Kept(Function):
    """Inputs cast by custom_fwd, and no autocast inside."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


class Blocked(Function):
    """No gradient at all for one input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None


class Turned(Function):
    """Results and gradients that are not contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].t() * 2


def halves(x: Any, layer: nn.Linear) -> Any:
    one, two, nothing, _ = Halves.apply(x, layer.weight)
    assert nothing is None
    return one + two


def ranked(x: Any, layer: nn.Linear) -> Any:
    values, order = Ranked.apply(layer(x))
    return values + F.one_hot(order[:, 0], WIDTH)


def scaled(x: Tensor, by: Any) -> Tensor:
    return x * by


def chosen(x: Any, layer: nn.Linear) -> Any:
    one = Chosen.apply(scaled, x, {"scale": layer.bias}, None, "minus", torch.float32)
    two = Chosen.apply(scaled, x, {"scale": 2}, None, "plus", torch.float32)
    return one + Chosen.apply(scaled, two, {"scale": 2.0}, None, "plus", torch.float32)


def bloom(x: Any, layer: nn.Linear) -> Any:
    from transformers.models.bloom.modeling_bloom import GeLUFunction

    return GeLUFunction.apply(layer(x))


def under_autocast(function: Any) -> Way:
    def way(x: Any, layer: nn.Linear) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return function(torch.tanh(layer(x)), layer.weight).float()

    return way


def made_here(x: Any, layer: nn.Linear) -> Any:
    """A class made in forward, whose code reads an activation around it."""
    around = SimpleNamespace(y=layer(x).detach())

    class Made(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * around.y

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * around.y

    return Made.apply(x)


def reentrant(x: Any, layer: nn.Linear) -> Any:
    return torch.utils.checkpoint.checkpoint(
        lambda x: F.dropout(torch.tanh(layer(x)), 0.25), x, use_reentrant=True
    )


def unread(x: Any, layer: nn.Linear) -> Any:
    with torch.no_grad():
        scale = Saving.apply(x, layer.weight, layer.bias, 0.5)
    return x * scale


SAVING = Saving.apply  # as many models keep it: bound before any capture

WAYS: dict[str, Way] = {
    "saving": lambda x, layer: SAVING(x, layer.weight, layer.bias, 0.5),
    "with_setup": lambda x, layer: WithSetup.apply(x, layer.weight),
    "vjp": lambda x, layer: AsVjp.apply(layer(x)),
    "non_differentiable": ranked,
    "once_differentiable": lambda x, layer: Once.apply(layer(x)),
    "needs_input_grad": lambda x, layer: (
        Needed.apply(x, layer.weight) + Needed.apply(x.detach(), layer.weight)
    ),
    "materialize_grads": halves,
    "arguments": chosen,
    "nested": lambda x, layer: Outer.apply(x, layer.weight),
    "module": lambda x, layer: Module.apply(x, layer),
    "module_read": lambda x, layer: Frozen.apply(x, layer),
    "view": lambda x, layer: Reversed.apply(layer(x), 0.5),
    "itself": lambda x, layer: layer(Passed.apply(x)),
    "straight_through": lambda x, layer: Rounded.apply(layer(x)),
    "random": lambda x, layer: Masking.apply(layer(x)),
    "autocast": under_autocast(Lowered.apply),
    "cast_inputs": under_autocast(Kept.apply),
    "blocked": lambda x, layer: Blocked.apply(x, layer(x)),
    "turned": lambda x, layer: Turned.apply(Turned.apply(layer(x)) * 2),
    "made_here": made_here,
    "gradient_in_forward": lambda x, layer: x * Early.apply(x, layer.weight, False),
    "torch_func": lambda x, layer: x * Early.apply(x, layer.weight, True),
    "no_grad": unread,
    "bloom_gelu": bloom,
    "reentrant_checkpoint": reentrant,
}


class Step(nn.Module):
    """One way, with a layer of its own."""

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
