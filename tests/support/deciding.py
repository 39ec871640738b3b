"""A model that decides by the values of its mask, streams of batches for it, and eager accumulation
next to it."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zbcompile

WIDTH, ROWS, LENGTH = 8, 2, 5
KINDS = ("full", "padded", "both", "full", "both", "padded")


class Attending(nn.Module):
    """Means over a sequence: by the fast way if nothing is padded, as transformers' attention does.
    `extra` trains only where something is padded, and `often` is used in both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.often, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.to(torch.bool)
        hidden = self.dropout(self.first(x).tanh())
        if mask.all():
            return self.last(self.often(hidden).mean(1))
        weight = mask / mask.sum(1, keepdim=True)
        hidden = self.often(hidden + self.dropout(self.extra(hidden)))
        return self.last((hidden * weight[..., None]).sum(1))


def batch_of(kind: str, microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a mask and targets: nothing padded, something in every microbatch, or in every second
    one."""
    generator = torch.Generator().manual_seed(seed)
    rows = ROWS * microbatches
    x = torch.randn(rows, LENGTH, WIDTH, generator=generator)
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    padded = {"full": [], "padded": range(microbatches), "both": range(1, microbatches, 2)}[kind]
    for i in padded:
        mask[i * ROWS + 1, -1 - i % 2 :] = 0
    return x, mask, torch.randn(rows, WIDTH, generator=generator)


@dataclass
class Eager:
    """Gradient accumulation without a pipeline."""

    model: nn.Module
    microbatches: int
    steps: int = 0

    def step(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        parts = zip(*(item.chunk(self.microbatches) for item in (x, mask, target)), strict=True)
        total: Any = 0
        for i, (rows, saved, expected) in enumerate(parts):
            torch.manual_seed(zbcompile.microbatch_seed(self.steps, i))
            loss = nn.functional.mse_loss(self.model(rows, saved), expected) / self.microbatches
            loss.backward()
            total = total + loss.detach()
        self.steps += 1
        return total


def different(pipe: Any, eager: Eager) -> list[str]:
    """The names of the parameters whose gradients differ from eager's in a bit, or in being
    there."""
    theirs = dict(eager.model.named_parameters())
    return [
        name for name, ours in pipe.named_parameters() if not _same(ours.grad, theirs[name].grad)
    ]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def follow(
    kinds: tuple[str, ...],
    schedule: str,
    microbatches: int,
    model: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Train on a stream of batches, each compared with eager; the pipeline."""
    torch.manual_seed(0)
    model = model or Attending()
    eager = Eager(copy.deepcopy(model), microbatches)
    pipe = zbcompile.pipeline(
        model,
        schedule=schedule,
        microbatches=microbatches,
        loss=nn.functional.mse_loss,
        exact=True,
        **options,
    )
    for seed, kind in enumerate(kinds):
        x, mask, target = batch_of(kind, microbatches, seed)
        loss = pipe.step(x, mask, target=target)
        assert torch.equal(loss, eager.step(x, mask, target)), kind
        assert different(pipe, eager) == [], kind
    norm = nn.utils.get_total_norm([p.grad for p in eager.model.parameters() if p.grad is not None])
    torch.testing.assert_close(
        pipe.clip_grad_norm_(1e9), norm
    )  # what other answers have trained counts as well
    return pipe


class Reusing(nn.Module):
    """Uses its first layer once more, at the end, if something is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = x.mean(1)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden if mask.all() else self.layers[0](hidden)
