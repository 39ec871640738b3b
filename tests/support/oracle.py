"""The oracle: the unsplit model, in eager mode, in one process.

A pipelined step must have the loss and the gradients of `eager_step`: for each microbatch in turn,
seed, forward, and backward of loss / m. The factor enters as the tangent of the loss; dividing the
gradients afterwards gives other bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.skip_models import EncoderDecoder, UNet

Loss = Callable[[Any, Any], Tensor]
Gradients = dict[str, Tensor | None]
SEQUENCE, WIDTH = 16, 32


@dataclass(frozen=True)
class Batch:
    """The arguments of one `step`."""

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    target: Tensor | None = None

    def parts(self, count: int) -> Iterator["Batch"]:
        """`count` equal microbatches: every tensor cut along dimension 0."""
        for i in range(count):
            cut = partial(_part, index=i, count=count)
            target = None if self.target is None else cut(self.target)
            yield Batch(
                tuple(map(cut, self.args)), {k: cut(v) for k, v in self.kwargs.items()}, target
            )


def _part(tensor: Tensor, index: int, count: int) -> Tensor:
    return tensor.chunk(count)[index]


@dataclass(frozen=True)
class Problem:
    """A model to train: how it is made, its loss (None: the model returns it) and its batches by
    size."""

    make: Callable[[], nn.Module]
    loss: Loss | None
    batch: Callable[[int], Batch]

    def model(self) -> nn.Module:
        """The same model at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()

    def batches(self, count: int, size: int) -> list[Batch]:
        """The same batches at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return [self.batch(size) for _ in range(count)]


class Skips(nn.Module):
    """Values that pass over several layers, one of them consumed in three places; a permuted
    activation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.norm(x).transpose(1, 2).transpose(0, 1)
        passed = []
        for layer in self.down:
            x = torch.tanh(layer(x.permute(1, 2, 0)).permute(2, 0, 1))
            passed.append(x)
        for layer, second in zip(self.up, reversed(passed), strict=True):
            x = torch.sigmoid(layer((x * second).permute(1, 2, 0)).permute(2, 0, 1)) + first
        return x.permute(1, 2, 0)


class WithLoss(nn.Module):
    """A model that computes its own loss from a keyword and returns it in one of the forms that are
    understood."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        )

    def forward(self, x: Tensor, goal: Tensor) -> Any:
        y = self.layers(x)
        loss = F.mse_loss(y, goal)
        forms: dict[str, Any] = {
            "scalar": loss,
            "mapping": {"loss": loss, "output": y},
            "object": SimpleNamespace(loss=loss, output=y),
        }
        return forms[self.form]


class Frozen(nn.Module):
    """Parameters that eager leaves without a gradient: frozen, never used, and used without
    gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.observed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.observed(x).abs().mean()
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
        return x


class MLP(nn.Module):
    """The least that can be cut into eight stages."""

    def __init__(self, layers: int = 8, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _text(size: int) -> Batch:
    tokens = torch.randint(0, 256, (size, SEQUENCE + 1))
    return Batch((tokens[:, :-1].contiguous(),), {}, tokens[:, 1:].contiguous())


def _rows(size: int) -> Batch:
    return Batch((torch.randn(size, WIDTH),), {}, torch.randn(size, WIDTH))


def _sequences(size: int) -> Batch:
    return Batch((torch.randn(size, 6, WIDTH),), {}, torch.randn(size, 6, WIDTH))


def _own_goal(size: int) -> Batch:
    return Batch((torch.randn(size, WIDTH),), {"goal": torch.randn(size, WIDTH)})


_gpt = partial(GPT, layers=2, width=WIDTH, heads=2, length=SEQUENCE)  # can be cut into eight stages
_small_gpt = partial(GPT, layers=1, width=WIDTH, heads=2, length=SEQUENCE)

PROBLEMS: Mapping[str, Problem] = {
    "gpt": Problem(_gpt, next_byte_loss, _text),
    "gpt-tied": Problem(partial(_gpt, tied=True), next_byte_loss, _text),
    "gpt-dropout": Problem(partial(_gpt, dropout=0.2), next_byte_loss, _text),
    "small-dropout": Problem(partial(_small_gpt, dropout=0.2), next_byte_loss, _text),
    "small-tied": Problem(partial(_small_gpt, tied=True), next_byte_loss, _text),
    "mlp": Problem(MLP, F.mse_loss, _rows),
    "short-mlp": Problem(partial(MLP, layers=4), F.mse_loss, _rows),
    "frozen": Problem(Frozen, F.mse_loss, _rows),
    "skips": Problem(Skips, F.mse_loss, _sequences),
    "u-net": Problem(UNet, F.mse_loss, _rows),
    "encoder-decoder": Problem(EncoderDecoder, F.mse_loss, _rows),
    "loss-scalar": Problem(partial(WithLoss, "scalar"), None, _own_goal),
    "loss-mapping": Problem(partial(WithLoss, "mapping"), None, _own_goal),
    "loss-object": Problem(partial(WithLoss, "object"), None, _own_goal),
}


def microbatch_loss(model: nn.Module, loss: Loss | None, batch: Batch) -> Tensor:
    """The loss of one microbatch."""
    output = model(*batch.args, **batch.kwargs)
    if loss is not None:
        return loss(output, batch.target)
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output.loss


def eager_step(
    model: nn.Module, loss: Loss | None, batch: Batch, microbatches: int, step: int
) -> Tensor:
    """Gradient accumulation over the microbatches; the step's loss, gradients in `.grad`."""
    total = None
    for i, part in enumerate(batch.parts(microbatches)):
        torch.manual_seed(zbcompile.microbatch_seed(step, i))
        scaled = microbatch_loss(model, loss, part) / microbatches
        scaled.backward()
        total = scaled.detach() if total is None else total + scaled.detach()
    assert total is not None
    return total


def eager_step_in_order(
    model: nn.Module,
    loss: Loss | None,
    batch: Batch,
    step: int,
    orders: Mapping[str, Sequence[int]],
) -> Tensor:
    """Like `eager_step`, but each parameter's per-microbatch gradients are added in the order that
    `orders` gives."""
    microbatches = len(next(iter(orders.values())))
    full = [
        eager_gradients(model, loss, part, microbatches, step, i)
        for i, part in enumerate(batch.parts(microbatches))
    ]
    for name, parameter in model.named_parameters():
        for i in orders[name]:
            gradient = full[i][1][name]
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    total = full[0][0]
    for scaled, _ in full[1:]:
        total = total + scaled
    return total


def eager_gradients(
    model: nn.Module, loss: Loss | None, part: Batch, microbatches: int, step: int, index: int
) -> tuple[Tensor, Gradients]:
    """One microbatch alone: its share of the loss, and its gradients by parameter name."""
    torch.manual_seed(zbcompile.microbatch_seed(step, index))
    scaled = microbatch_loss(model, loss, part) / microbatches
    names, parameters = zip(
        *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
    )
    gradients = torch.autograd.grad(scaled, parameters, allow_unused=True)
    return scaled.detach(), dict.fromkeys(dict(model.named_parameters())) | dict(
        zip(names, gradients, strict=True)
    )


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW decays what has a zero gradient and skips what has none: a difference between the two
    shows."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
