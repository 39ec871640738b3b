"""A small model that trains under several schedules, and in eager mode: what checkpoints are tested
with."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.oracle import Batch, Problem, eager_step, optimizer_of

LENGTH, MICROBATCHES, SIZE = 8, 4, 8


def _text(size: int) -> Batch:
    tokens = torch.randint(0, 256, (size, LENGTH + 1))
    return Batch((tokens[:, :-1].contiguous(),), {}, tokens[:, 1:].contiguous())


# tied, so that two ranks hold one matrix; with dropout, so that the number of the step matters
PROBLEM = Problem(
    partial(GPT, layers=1, width=16, heads=2, length=LENGTH, dropout=0.2, tied=True),
    next_byte_loss,
    _text,
)


@dataclass(frozen=True)
class State:
    """The weights and the optimizer's state, by parameter name."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


def save_program(directory: Path, schedule: str, ranks: int) -> Path:
    """Compile the model once, in one process."""
    batch = PROBLEM.batches(1, SIZE)[0]
    pipe = zbcompile.pipeline(
        PROBLEM.model(),
        schedule=schedule,
        ranks=ranks,
        microbatches=MICROBATCHES,
        loss=PROBLEM.loss,
        exact=True,
    )
    pipe.compile(*batch.args, target=batch.target).program.save(directory)
    return directory


def begin(program: str) -> tuple[zbcompile.Pipeline, torch.optim.Optimizer]:
    """The program with its first weights."""
    pipe = zbcompile.load(program, state_dict=PROBLEM.model().state_dict())
    return pipe, optimizer_of(pipe.parameters())


def train_pipe(program: str, folder: str, until: int, every: int = 10) -> list[Tensor]:
    """Train from the newest checkpoint to step `until`, leaving checkpoints on the way."""
    pipe, optimizer = begin(program)
    at = zbcompile.load_checkpoint(folder, pipe, optimizer, required=False)
    assert pipe.step_index == at.step
    losses = []
    for step, batch in list(enumerate(PROBLEM.batches(until, SIZE)))[at.step :]:
        losses.append(pipe.step(*batch.args, target=batch.target))
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0 or step + 1 == until:
            zbcompile.save_checkpoint(folder, pipe, optimizer, keep=2)
    pipe.close()
    return losses


def train_eager(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, until: int
) -> list[Tensor]:
    """The same steps by the oracle."""
    losses = []
    for step, batch in list(enumerate(PROBLEM.batches(until, SIZE)))[first:]:
        losses.append(eager_step(model, PROBLEM.loss, batch, MICROBATCHES, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    names = {id(p): name for name, p in model.named_parameters()}
    moments = {
        f"{names[id(p)]}.{key}": value
        for p, saved in optimizer.state.items()
        for key, value in saved.items()
    }
    return State(dict(model.state_dict()), moments)
