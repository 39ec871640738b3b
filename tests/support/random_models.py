"""Random models: a seed becomes a directed acyclic graph of operations over values that are reused
at any distance, so that skip connections cross one another and whatever cuts there are."""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES = 12, 5


class RandomModel(nn.Module):
    """The model of a seed. `recipe` has for each operation its name, the values it reads and one of
    the shared layers; the last value gathers what nobody else has used."""

    width = WIDTH

    def __init__(self, seed: int, steps: int = 14) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
            self.narrow, self.head = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH)
            self.table, self.norm = nn.Embedding(CLASSES, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.recipe = recipe_of(seed, steps)

    def forward(self, x: Tensor) -> Tensor:
        values = [x, torch.tanh(self.layers[0](x))]
        used = {0}
        for name, reads, layer in self.recipe:
            values.append(
                OPERATIONS[name][1](self, self.layers[layer], *(values[i] for i in reads))
            )
            used.update(reads)
        unused = [value for i, value in enumerate(values) if i not in used]
        return self.head(torch.stack(unused).sum(0) if len(unused) > 1 else unused[0])


def recipe_of(seed: int, steps: int) -> list[tuple[str, tuple[int, ...], int]]:
    choose, result, observed = random.Random(seed), [], False
    for index in range(2, 2 + steps):
        name = choose.choice([n for n in OPERATIONS if n != "observe" or not observed])
        observed |= name == "observe"  # a buffer that two stages change is refused
        recent = max(index - choose.choice([1, 1, 1, 3, index]), 0)
        reads = (recent, *(choose.randrange(index) for _ in range(OPERATIONS[name][0] - 1)))
        result.append((name, reads, choose.randrange(5)))
    return result


def halves(model: RandomModel, layer: nn.Module, x: Tensor) -> Tensor:
    """Both halves of one tensor: two results of one operation, with gaps between their rows."""
    left, right = x.chunk(2, dim=1)
    return torch.cat([torch.sigmoid(right) * left, left], dim=1)


def no_grad(model: RandomModel, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(layer(y))
    return x * gate


def observe(model: RandomModel, layer: nn.Module, x: Tensor) -> Tensor:
    model.seen.mul_(0.9).add_(x.detach().mean(0))  # type: ignore[operator,union-attr]
    return torch.tanh(x)


OPERATIONS: dict[str, tuple[int, Callable[..., Tensor]]] = {  # how many values each reads
    "linear": (1, lambda model, layer, x: torch.tanh(layer(x))),
    "residual": (1, lambda model, layer, x: x + F.silu(layer(x))),
    "add": (2, lambda model, layer, x, y: x + y),
    "multiply": (2, lambda model, layer, x, y: x * y),
    "subtract": (2, lambda model, layer, x, y: x - 0.5 * y),
    "concatenate": (2, lambda m, layer, x, y: torch.cat([m.narrow(x), y[:, : WIDTH // 2]], 1)),
    "halves": (1, halves),
    "permute": (1, lambda m, _, x: F.gelu(x.view(-1, 3, 4).transpose(1, 2)).reshape(-1, WIDTH)),
    "view": (1, lambda model, layer, x: x.view(-1, 2, WIDTH // 2).view(-1, WIDTH)),
    "detach": (2, lambda model, layer, x, y: x * torch.sigmoid(y.detach())),
    "no_grad": (2, no_grad),
    "index": (2, lambda model, layer, x, y: x + model.table(y.argmax(1) % CLASSES)),
    "compare": (3, lambda model, layer, x, y, z: torch.where(x > 0, y, z)),
    "scalar": (2, lambda model, layer, x, y: x * torch.cos(y.mean())),
    "expand": (2, lambda m, _, x, y: x + torch.sin(y.mean(1, keepdim=True).expand(-1, WIDTH))),
    "normalise": (1, lambda m, _, x: F.batch_norm(x, None, None, *m.norm.parameters(), True)),
    "twice": (1, lambda model, layer, x: x * x + x),
    "empty": (2, lambda model, layer, x, y: torch.cat([x, torch.exp(y[:, :0])], 1)),
    "dropout": (1, lambda model, layer, x: F.dropout(x, 0.2, model.training)),
    "observe": (1, observe),
}
