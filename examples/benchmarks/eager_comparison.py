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
    *("bitwise", "within the bound", "refused", "torch.export fails"),
    *("eager fails", "not built", "wrong", "crash"),
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
        except OURS as error:
            if isinstance(error, zbcompile.FaultError):
                return Outcome("crash", one_line(error))
            kind = "refused" if _exports(model, batch) else "torch.export fails"
            return Outcome(kind, one_line(error))
        except Exception as error:
            return Outcome("crash", f"{schedule}: {one_line(error)}")
    if worst is None:
        return Outcome("bitwise")
    said = [str(w.message) for w in seen if str(w.message).startswith("zbcompile:")]
    kind = "within the bound" if worst[0] <= BOUND and said else "wrong"
    return Outcome(kind, f"{schedule}: {worst[1]} by {worst[0]:.1e} {(said or [''])[0]}"[:600])


def _pipelined(schedule: str, model: nn.Module, loss: Loss | None, batch: Batch) -> Step:
    local, rows = copy.deepcopy(model).train(), ROWS * MICROBATCHES
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "ranks": RANKS, "exact": True}
    options["split"] = {f"kwargs['{n}']": True for n, t in batch.kwargs.items() if len(t) != rows}
    pipe = zbcompile.pipeline(local, schedule=schedule, loss=loss, **options)
    named: dict[str, Any] = {**batch.kwargs}
    if batch.target is not None:
        named["target"] = batch.target
    total = pipe.step(*batch.args, **named)
    return {"loss": total, **gradients_of(pipe), **_buffers(local.named_buffers())}


def _exports(model: nn.Module, batch: Batch) -> bool:
    """Returns whether torch.export captures the forward of a microbatch."""
    rows = {name: tensor[: len(tensor) // MICROBATCHES] for name, tensor in batch.kwargs.items()}
    args = tuple(tensor[:ROWS] for tensor in batch.args)
    try:
        torch.export.export(copy.deepcopy(model).train(), args, rows)
    except Exception:
        return False
    return True


def _difference(result: Step, expected: Step) -> tuple[float, str] | None:
    """The largest difference, relative to the largest entry of its tensor, and where; None if every
    bit is equal. Gradients that are zero but for rounding (that of a key's bias) count relative to
    the largest of all."""
    return max(_differences(result, expected), default=None)


def _differences(result: Step, expected: Step) -> Iterator[tuple[float, str]]:
    full = {name: item for name, item in expected.items() if item is not None and item.numel()}
    sizes = {name: float(item.double().abs().max()) for name, item in full.items()}
    largest = max(sizes.values())
    for name in result.keys() | expected.keys():
        ours, theirs = result.get(name), expected.get(name)
        if ours is None or theirs is None:
            yield from [] if ours is theirs else [(float("inf"), name)]
        elif ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            yield float("inf"), name
        elif not bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()):
            scale = sizes[name] if sizes[name] > 1e-6 * largest else largest
            yield float((ours.double() - theirs.double()).abs().max()) / scale, name


def one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:600]
