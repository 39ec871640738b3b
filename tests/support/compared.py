"""What became of a model: trained for a step under some schedules, against eager gradient
accumulation, bit by bit."""

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import Batch, Gradients, Loss, Problem, eager_step, microbatch_loss
from tests.support.training import gradients_of

BOUND = 2e-6  # of the largest entry of each gradient
ROWS, MICROBATCHES, RANKS = 2, 4, 2
OURS = (zbcompile.CompileError, zbcompile.PipelineError)
KINDS = (
    "bitwise",
    "within the bound",
    "refused",
    "torch.export fails",
    "eager fails",
    "not built",
    "wrong",
    "crash",
)


@dataclass(frozen=True)
class Outcome:
    """One of `KINDS`, and the reason."""

    kind: str
    why: str = ""


def outcome_of(problem: Problem, schedules: Sequence[str]) -> Outcome:
    """The worst outcome of `problem` under `schedules`."""
    try:
        model = problem.model()
        (batch,) = problem.batches(1, ROWS * MICROBATCHES)
    except Exception as error:
        return Outcome("not built", one_line(error))
    try:
        expected = _eager(model, problem.loss, batch)
        itself = _difference(_eager(model, problem.loss, batch), expected)
    except Exception as error:
        return Outcome("eager fails", one_line(error))
    if itself:
        return Outcome("eager fails", f"eager differs from itself: {itself[1]} by {itself[0]:.1e}")
    result = [_under(schedule, model, problem.loss, batch, expected) for schedule in schedules]
    return max(result, key=lambda outcome: KINDS.index(outcome.kind))


Step = Gradients


def _eager(model: nn.Module, loss: Loss | None, batch: Batch) -> Step:
    """The loss, every gradient, and every buffer after the step; `model` stays as it is.

    Some models change their own layers in their first forward, and draw random numbers for it: a
    step begins after it.
    """
    local = copy.deepcopy(model).train()
    before = _buffers(local.named_buffers())
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        microbatch_loss(local, loss, next(batch.parts(MICROBATCHES)))
    for name, buffer in local.named_buffers():
        if f"buffer {name}" in before:
            buffer.copy_(before[f"buffer {name}"])
    total = eager_step(local, loss, batch, MICROBATCHES, 0)
    return {"loss": total, **gradients_of(local), **_buffers(local.named_buffers())}


def _buffers(named: Any) -> dict[str, Tensor]:
    return {f"buffer {name}": tensor.clone() for name, tensor in named}


def _under(
    schedule: str, model: nn.Module, loss: Loss | None, batch: Batch, expected: Step
) -> Outcome:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            worst = _difference(_pipelined(schedule, model, loss, batch), expected)
        except zbcompile.FaultError as error:
            return Outcome("crash", one_line(error))
        except OURS as error:
            kind = "refused" if _exports(model, batch) else "torch.export fails"
            return Outcome(kind, one_line(error))
        except Exception as error:
            return Outcome("crash", f"{schedule}: {one_line(error)}")
    if worst is None:
        return Outcome("bitwise")
    cause = next(
        (item for item in map(str, (w.message for w in seen)) if item.startswith("zbcompile:")), ""
    )
    kind = "within the bound" if worst[0] <= BOUND and cause else "wrong"
    return Outcome(kind, f"{schedule}: {worst[1]} by {worst[0]:.1e} {cause}"[:600])


def _pipelined(schedule: str, model: nn.Module, loss: Loss | None, batch: Batch) -> Step:
    local = copy.deepcopy(model).train()
    split: dict[str, bool | int] = {
        f"kwargs['{name}']": True
        for name, tensor in batch.kwargs.items()
        if len(tensor) != ROWS * MICROBATCHES
    }
    pipe = zbcompile.pipeline(
        local,
        schedule=schedule,
        microbatches=MICROBATCHES,
        ranks=RANKS,
        loss=loss,
        exact=True,
        split=split,
    )
    target = {} if batch.target is None else {"target": batch.target}
    total = pipe.step(*batch.args, **batch.kwargs, **target)
    return {"loss": total, **gradients_of(pipe), **_buffers(local.named_buffers())}


def _exports(model: nn.Module, batch: Batch) -> bool:
    """Returns whether torch.export captures the forward of a microbatch."""
    rows = {
        name: t[: len(t) // MICROBATCHES] if isinstance(t, torch.Tensor) else t
        for name, t in batch.kwargs.items()
    }
    args = tuple(t[:ROWS] for t in batch.args)
    try:
        torch.export.export(copy.deepcopy(model).train(), args, rows)
    except Exception:
        return False
    return True


def _difference(result: Step, expected: Step) -> tuple[float, str] | None:
    """The largest difference, relative to the largest entry of its tensor, and where; None if every
    bit is equal.

    Gradients that are zero but for rounding (that of a key's bias) count relative to the largest of
    all.
    """
    return max(_differences(result, expected), default=None)


def _differences(result: Step, expected: Step) -> Iterator[tuple[float, str]]:
    sizes = {
        name: float(item.double().abs().max())
        for name, item in expected.items()
        if item is not None and item.numel()
    }
    noise = 1e-6 * max(sizes.values())
    for name in result.keys() | expected.keys():
        ours, theirs = result.get(name), expected.get(name)
        if (
            ours is None
            or theirs is None
            or ours.shape != theirs.shape
            or ours.dtype != theirs.dtype
        ):
            if ours is not None or theirs is not None:
                yield float("inf"), name
        elif not bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()):
            scale = sizes[name] if sizes[name] > noise else max(sizes.values())
            yield float((ours.double() - theirs.double()).abs().max()) / scale, name


def one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:600]
