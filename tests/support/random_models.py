"""Random models: a seed becomes a directed acyclic graph of operations over values that are reused
at any distance.

Every value is a float tensor [rows, WIDTH] unless an operation says otherwise. A value may be used
by any number of later operations, so skip connections cross one another and whatever cuts there
are.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 12
CLASSES = 5


class Step(NamedTuple):
    """One operation of a recipe: its name, the values it reads, and which of the shared layers it
    uses."""

    operation: str
    reads: tuple[int, ...]
    layer: int


class RandomModel(nn.Module):
    """The model of a seed. Its forward follows `recipe`; the last value gathers what nobody else
    has used."""

    width = WIDTH

    def __init__(self, seed: int, steps: int = 14) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
            self.narrow = nn.Linear(WIDTH, WIDTH // 2)
            self.table = nn.Embedding(CLASSES, WIDTH)
            self.norm = nn.BatchNorm1d(WIDTH)
            self.head = nn.Linear(WIDTH, WIDTH)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.recipe = _recipe(seed, steps)

    def forward(self, x: Tensor) -> Tensor:
        values = [x, torch.tanh(self.layers[0](x))]
        used = {0}
        for step in self.recipe:
            values.append(
                OPERATIONS[step.operation](self, step.layer, *(values[i] for i in step.reads))
            )
            used.update(step.reads)
        unused = [value for i, value in enumerate(values) if i not in used]
        return self.head(torch.stack(unused).sum(0) if len(unused) > 1 else unused[0])


def _recipe(seed: int, steps: int) -> list[Step]:
    choose = random.Random(seed)
    result, done = [], set[str]()
    for index in range(2, 2 + steps):
        operation = choose.choice(
            [name for name in OPERATIONS if name != "observe" or name not in done]
        )
        done.add(operation)
        recent = max(index - choose.choice([1, 1, 1, 3, index]), 0)
        reads = (recent, *(choose.randrange(index) for _ in range(ARITY.get(operation, 1) - 1)))
        result.append(Step(operation, reads, choose.randrange(5)))
    return result


def _linear(model: RandomModel, layer: int, x: Tensor) -> Tensor:
    return torch.tanh(model.layers[layer](x))


def _residual(model: RandomModel, layer: int, x: Tensor) -> Tensor:
    return x + F.silu(model.layers[layer](x))


def _concatenate(model: RandomModel, layer: int, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([model.narrow(x), y[:, : WIDTH // 2]], dim=1)


def _halves(model: RandomModel, layer: int, x: Tensor) -> Tensor:
    """Both halves of one tensor: two results of one operation, with gaps between their rows."""
    left, right = x.chunk(2, dim=1)
    return torch.cat([torch.sigmoid(right) * left, left], dim=1)


def _permute(model: RandomModel, layer: int, x: Tensor) -> Tensor:
    return F.gelu(x.view(-1, 3, WIDTH // 3).transpose(1, 2)).reshape(-1, WIDTH)


def _view(model: RandomModel, layer: int, x: Tensor) -> Tensor:
    return x.view(-1, 2, WIDTH // 2).view(-1, WIDTH)


def _detach(model: RandomModel, layer: int, x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(y.detach())


def _no_grad(model: RandomModel, layer: int, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(model.layers[layer](y))
    return x * gate


def _index(model: RandomModel, layer: int, x: Tensor, y: Tensor) -> Tensor:
    """An integer value: which row of the table."""
    return x + model.table(y.argmax(1) % CLASSES)


def _compare(model: RandomModel, layer: int, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.where(x > 0, y, z)


def _scalar(model: RandomModel, layer: int, x: Tensor, y: Tensor) -> Tensor:
    return x * torch.cos(y.mean())


def _expand(model: RandomModel, layer: int, x: Tensor, y: Tensor) -> Tensor:
    return x + torch.sin(y.mean(dim=1, keepdim=True).expand(-1, WIDTH))


def _normalise(model: RandomModel, layer: int, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, model.norm.weight, model.norm.bias, training=True)


def _twice(model: RandomModel, layer: int, x: Tensor) -> Tensor:
    return x * x + x


def _empty(model: RandomModel, layer: int, x: Tensor, y: Tensor) -> Tensor:
    """A value without elements."""
    return torch.cat([x, torch.exp(y[:, :0])], dim=1)


def _observe(model: RandomModel, layer: int, x: Tensor) -> Tensor:
    """A running mean in a buffer; once per model, for a buffer that two stages change is
    refused."""
    model.seen.mul_(0.9).add_(x.detach().mean(0))
    return torch.tanh(x)


def _dropout(model: RandomModel, layer: int, x: Tensor) -> Tensor:
    return F.dropout(x, 0.2, model.training)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "linear": _linear,
    "residual": _residual,
    "add": lambda model, layer, x, y: x + y,
    "multiply": lambda model, layer, x, y: x * y,
    "subtract": lambda model, layer, x, y: x - 0.5 * y,
    "concatenate": _concatenate,
    "halves": _halves,
    "permute": _permute,
    "view": _view,
    "detach": _detach,
    "no_grad": _no_grad,
    "index": _index,
    "compare": _compare,
    "scalar": _scalar,
    "expand": _expand,
    "normalise": _normalise,
    "twice": _twice,
    "empty": _empty,
    "dropout": _dropout,
    "observe": _observe,
}
_OF_TWO = "add multiply subtract concatenate detach no_grad index scalar expand empty"
ARITY = dict.fromkeys(_OF_TWO.split(), 2) | {"compare": 3}
