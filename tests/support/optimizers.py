"""Small optimizers of the kinds that people bring along."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Plain(Optimizer):
    """Subtracts `direction` of each gradient."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.direction(parameter), alpha=-group["lr"])

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad.sign()


class EightBits(Plain):
    """Keeps the momentum in bytes, with a scale for each block of 64 elements of a parameter."""

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        state, rest = self.state[parameter], -parameter.numel() % 64
        gradient = nn.functional.pad(parameter.grad.reshape(-1), (0, rest)).view(-1, 64)
        momentum = gradient + (0.9 * state["scale"] * state["bytes"] if state else 0)
        state["scale"] = momentum.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / 127
        state["bytes"] = (momentum / state["scale"]).round().to(torch.int8)
        return momentum.view(-1)[: parameter.numel()].view(parameter.shape)


class Lars(Plain):
    """Scales a gradient by the norms of its parameter."""

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad * (parameter.norm() / parameter.grad.norm().clamp(min=1e-9))


class Lion(Plain):
    """The sign of a momentum that leads its gradient."""

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        momentum = state.setdefault("momentum", torch.zeros_like(parameter.grad))
        towards = (0.9 * momentum + 0.1 * parameter.grad).sign()
        momentum.mul_(0.99).add_(parameter.grad, alpha=0.01)
        return towards


class Shampoo(Plain):
    """Divides a matrix by the roots of the sums of its gradients' products, along either side."""

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        result = (
            parameter.grad.view(len(parameter), -1) if parameter.ndim else parameter.grad.view(1, 1)
        )
        state, (rows, columns) = self.state[parameter], result.shape
        for side, size, product in (
            ("rows", rows, result @ result.T),
            ("columns", columns, result.T @ result),
        ):
            saved = state.setdefault(side, 1e-4 * torch.eye(size, dtype=result.dtype))
            values, vectors = torch.linalg.eigh(saved.add_(product))
            root = vectors @ (values.clamp(min=1e-9) ** -0.25).diag() @ vectors.T
            result = root @ result if side == "rows" else result @ root
        return result.view(parameter.shape)


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {  # and their options
    **{
        name: (getattr(torch.optim, name), {})
        for name in ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Muon")
    },
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Lion": (Lion, {}),
    "EightBits": (EightBits, {}),
    "Shampoo": (Shampoo, {}),
    "Lars": (Lars, {}),
}
