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
                    direction = self.direction(parameter, parameter.grad)
                    parameter.add_(direction, alpha=-group["lr"])

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient.sign()


class EightBits(Plain):
    """Keeps the momentum in bytes, with a scale for each block of 64 elements of a parameter."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        state, rest = self.state[parameter], -parameter.numel() % 64
        blocks = nn.functional.pad(gradient.reshape(-1), (0, rest)).view(-1, 64)
        momentum = blocks + (0.9 * state["scale"] * state["bytes"] if state else 0)
        state["scale"] = momentum.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / 127
        state["bytes"] = (momentum / state["scale"]).round().to(torch.int8)
        return momentum.view(-1)[: parameter.numel()].view(parameter.shape)


class Lion(Plain):
    """The sign of a momentum that leads its gradient."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(gradient))
        towards = (0.9 * momentum + 0.1 * gradient).sign()
        momentum.mul_(0.99).add_(gradient, alpha=0.01)
        return towards


class Shampoo(Plain):
    """Divides a matrix by the roots of the sums of its gradients' products, along either side."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        result = gradient.view(len(parameter), -1) if parameter.ndim else gradient.view(1, 1)
        products = {"rows": result @ result.T, "columns": result.T @ result}
        for side, product in products.items():
            start = 1e-4 * torch.eye(len(product), dtype=result.dtype)
            saved = self.state[parameter].setdefault(side, start)
            values, vectors = torch.linalg.eigh(saved.add_(product))
            root = vectors @ (values.clamp(min=1e-9) ** -0.25).diag() @ vectors.T
            result = root @ result if side == "rows" else result @ root
        return result.view(parameter.shape)


_TORCHS = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Muon", "Adafactor")
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {  # and their options
    **{name: (getattr(torch.optim, name), {}) for name in _TORCHS},
    **{kind.__name__: (kind, {}) for kind in (Lion, EightBits, Shampoo)},
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
}
