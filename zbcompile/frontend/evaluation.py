"""Evaluation: the model's own output from forward passes alone, on every rank.

An evaluation is a forward-only program: the same actions, messages and buffers as in a step carry it out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zbcompile.compiler.inference import Inference, compile_inference, forward_program
from zbcompile.distributed.ranks import Ranks
from zbcompile.frontend.answers import ByAnswers, captured_alike
from zbcompile.model.batch import Batch
from zbcompile.passes.capture.guards import Guards
from zbcompile.passes.capture.questions import Given
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.roles import Slot
from zbcompile.program.program import Program
from zbcompile.runtime.engine import Engine, Executable, StepInput, StepRuns, make_executable
from zbcompile.runtime.gradient_buffers import Gradients
from zbcompile.runtime.nan_check import inspected
from zbcompile.runtime.stage_plan import prepare_stage, rebind
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.torch_private import pytree

Resident = Mapping[Slot, torch.Tensor]


@dataclass
class Evaluation:
    """The evaluation of one shape of batch: `count` equal chunks, each through `inference`; right for batches that
    answer `guards` alike."""

    inference: Inference
    count: int
    guards: Guards | None
    executable: Executable | None = None

    def bind(self, program: Program, ranks: Ranks, resident: Resident, debug_nan: bool) -> Executable:
        """This process's executable, beside the training program `program`, on the tensors that are `resident` now."""
        if self.executable is None:
            self.executable = _prepare(self, program, ranks, resident, debug_nan)
        stages = {i: rebind(stage, resident) for i, stage in self.executable.stages.items()}
        return replace(self.executable, stages=stages)


def choose_evaluation(
    found: ByAnswers[Evaluation], model: nn.Module, batch: Batch, program: Program, ranks: Ranks
) -> Evaluation:
    """The evaluation in `found` for the answers of a batch to what forward asks; compiled if there is none."""

    def add(new: int | None) -> None:
        with ranks.watch.position.turn_to(f"compiling eval for {batch.whole.summary()}"):
            plan = partial(plan_evaluation, model, batch, program, ranks.mesh.labels)
            made = captured_alike(ranks, "compiling eval", plan, lambda each: each.guards, leads=new is not None)
            found.add(made.guards, made, made.inference.exchanges)

    (answers,), _ = found.find(ranks, [batch.whole.tensors], add)
    return found[answers]


def plan_evaluation(
    model: nn.Module, batch: Batch, program: Program, dimensions: Mapping[str, str], given: Given | None = None
) -> Evaluation:
    """Compile the forward for this batch, with its own answers to what forward asks, or those `given`. `dimensions` are
    those of `Captured`.

    It runs in microbatches when every output has one row per sample; an output of another kind (a loss, say) is
    computed on the whole batch, so that it is what the model itself returns. So is a forward that changes buffers,
    which a batch changes once. What forward asks is answered for the batch as a whole, as in eager mode.
    """
    whole = compile_inference(model, batch.whole, program, dimensions, given)
    guards = whole.captured.guards
    wanted = program.schedule.microbatches
    count = max(n for n in range(1, wanted + 1) if batch.divides_into(n))
    if count == 1 or not _has_rows(whole, batch.size) or whole.changes_buffers:
        return Evaluation(whole, 1, guards)
    alike = guards.given if guards else None
    try:
        chunk = compile_inference(model, batch.microbatch(0, count), program, dimensions, alike)
    except CaptureError:
        if guards is None:
            raise
        return Evaluation(whole, 1, guards)  # a chunk asks other questions
    asks = guards is None and chunk.captured.guards is not None  # nobody would ask the other chunks
    fits = not asks and _has_rows(chunk, batch.size // count) and _rest(chunk) == _rest(whole)
    return Evaluation(chunk, count, guards) if fits else Evaluation(whole, 1, guards)


def _has_rows(inference: Inference, size: int) -> bool:
    return all(value.ndim > 0 and value.shape[0] == size for _, value in inference.outputs.values())


def _rest(inference: Inference) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape[1:]) for name, (_, value) in inference.outputs.items()}


def _prepare(chosen: Evaluation, program: Program, ranks: Ranks, resident: Resident, debug_nan: bool) -> Executable:
    forward = forward_program(chosen.inference, program, chosen.count)
    own = sorted({stage for rank in ranks.local for stage in forward.stages_of(rank)})
    stages = {i: prepare_stage(forward.stages[i], resident, ranks.device, random_until=-1) for i in own}
    if debug_nan:
        stages = {i: inspected(stage) for i, stage in stages.items()}
    return make_executable(forward, stages, ranks.local, ranks.device)


def evaluate(chosen: Evaluation, executable: Executable, batch: Batch, engine: Engine, channels: Schedule) -> Any:
    """Run an evaluation; every rank returns the model's output for the whole batch. `channels` is the schedule of the
    training step: channels that are opened now must serve it, too."""
    leaves = _run(executable, batch, engine, channels)
    with engine.ranks.watch.position.waiting("the exchange of outputs"):
        return _rebuild(chosen, _everywhere(chosen, executable.program, engine.ranks, leaves))


def _run(executable: Executable, batch: Batch, engine: Engine, channels: Schedule) -> dict[str, torch.Tensor]:
    """The leaves of the output that this process's stages make, for the whole batch."""
    ranks, count = engine.ranks, executable.program.schedule.microbatches
    inputs = [batch.microbatch(i, count).tensors for i in range(count)]
    given = StepInput(inputs, index=0, seed=0, reduction="sum", record=False)
    transport = ranks.transport(channels, count, executable.buffers)
    begin = StepRuns(executable, given, ranks, transport, recorder=None)
    runs = [begin.run_of(plan, Gradients({}, frozenset(), executable.program.choices)) for plan in executable.plans]
    engine.carry_out(runs)
    made = {name: parts for run in runs for stage in run.runs.values() for name, parts in stage.outputs.items()}
    return {
        name: torch.cat([parts[i] for i in range(count)]) if count > 1 else parts[0] for name, parts in made.items()
    }


def _everywhere(
    chosen: Evaluation, program: Program, ranks: Ranks, leaves: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if ranks.group is None:
        return leaves
    shared = {}
    for name, (stage, fake) in sorted(chosen.inference.outputs.items()):
        shape = (fake.shape[0] * chosen.count, *fake.shape[1:]) if chosen.count > 1 else tuple(fake.shape)
        own = leaves.get(name)
        value = own.contiguous() if own is not None else torch.empty(shape, dtype=fake.dtype, device=ranks.device)
        ranks.broadcast(value, program.rank_of(stage))
        shared[name] = value
    return shared


def _rebuild(chosen: Evaluation, leaves: Mapping[str, torch.Tensor]) -> Any:
    captured = chosen.inference.captured
    constant = captured.constant_leaves
    names = [slot.name for slot in captured.outputs if slot.kind == "output"]
    return pytree.tree_unflatten([leaves.get(n, constant.get(n)) for n in names], captured.structure)
