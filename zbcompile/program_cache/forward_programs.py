"""The forwards of a pipeline: its model compiled without a backward for the batches that it meets, and run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zbcompile.compiler.inference import Computation, Frame, compile_forward, forward_order
from zbcompile.distributed.agreement import agree
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.batch import Batch, hint_at_device, hinting
from zbcompile.model.held_elsewhere import readable
from zbcompile.model.placements import SHARD, along, placement_of
from zbcompile.model.resident_tensors import resident_tensors
from zbcompile.options import Options
from zbcompile.passes.capture.guards import Guards
from zbcompile.passes.capture.questions import Given
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.stage.print_python import type_text
from zbcompile.passes.torch_private import forward_hooks
from zbcompile.passes.values.premises import Standing
from zbcompile.passes.vocabulary.log_probs import IGNORED
from zbcompile.program.program import Program, call_of, listed
from zbcompile.program_cache.apart_draws import draw_apart
from zbcompile.program_cache.cache import Entry, refuse_answers
from zbcompile.program_cache.program_keys import torch_modes
from zbcompile.program_cache.state_dict import gather_rows
from zbcompile.program_cache.step_outputs import joined_rows
from zbcompile.program_cache.step_programs import StepPrograms
from zbcompile.runtime.action_loop import StepRecorder
from zbcompile.runtime.engine import BoundGraphs, Executable, StepInput
from zbcompile.runtime.engines import Engine
from zbcompile.runtime.stage_plan import rebind

MODES = ("eval", "train")
OUTPUTS = ("all", "last")


@dataclass(frozen=True)
class Asked:
    """One evaluation: what is `wanted`, on all ranks or the last stage's (`outputs`), in how many microbatches (None:
    as many as a step has), at which step, recorded by whom."""

    wanted: Computation
    outputs: str
    microbatches: int | None
    step: int
    recorder: StepRecorder | None


@dataclass(frozen=True)
class Planned:
    """The programs of a batch's microbatches, right for batches that answer `guards` alike."""

    programs: tuple[Program, ...]
    guards: Guards | None


Graphs = tuple[BoundGraphs, ...]  # of a batch's microbatches


class ForwardPrograms:
    """The forwards of a pipeline, whose parameters are where `steps` has them: before the first step there is none, and
    the first evaluation places the parameters."""

    def __init__(self, model: nn.Module, options: Options, engine: Engine, steps: StepPrograms) -> None:
        self._model, self._options, self._engine, self._steps = model, options, engine, steps
        self._ranks = engine.ranks
        self.cache = steps.cache
        self._saved: dict[str, Program] = {}
        saved = steps.saved
        for program in (saved, *saved.also.values()) if saved is not None else ():
            if program.output is not None:
                self._saved[program.output.computes] = program
                graphs = (steps.prepare(program),)
                self.cache.add(program.output.computes, program.guards, (), graphs, evaluates=True)

    def of_batch(self, batch: Batch, asked: Asked) -> Any:
        """What is wanted of a whole batch."""
        own = self._found(batch, asked)
        parts = [batch.microbatch(i, len(own)) for i in range(len(own))]
        return self._run(own, [part.tensors for part in parts], [range(len(own))], asked)[0]

    def of_microbatches(self, batches: Sequence[Batch], asked: Asked) -> list[Any]:
        """What is wanted of each of these, which one run computes whatever their shapes."""
        asked = replace(asked, microbatches=1)
        own = tuple(part for batch in batches for part in self._found(batch, asked))
        groups = [range(i, i + 1) for i in range(len(own))]
        return self._run(own, [batch.whole.tensors for batch in batches], groups, asked)

    def _found(self, batch: Batch, asked: Asked) -> Graphs:
        """The graphs of the batch's microbatches, for its answers to what forward asks; compiled if need be."""
        if self._steps.saved is not None:
            return self._of_saved(batch, asked.wanted)
        wanted, count = asked.wanted, asked.microbatches or self._steps.schedule.microbatches
        if self._steps.program is not None:
            self._steps.require_same_model()
        key = partial(self._key, batch, wanted, count)
        add = partial(self._add, batch, wanted, count)
        (found,), _ = self.cache.find(key, [batch.whole.tensors], add)
        self._steps.require_same_model()
        require_words(batch, found.graphs[0].program)
        return found.graphs

    def _of_saved(self, batch: Batch, wanted: Computation) -> Graphs:
        """As `_found`, of what a saved program holds; it answers for each microbatch."""
        if wanted.training:
            raise PipelineError('a program holds forwards in eval mode; for mode="train" make a pipeline of the model.')
        if wanted.computes not in self._saved:
            raise PipelineError(
                f"the directory holds {', '.join(self._saved) or 'the training step alone'}, and cannot compute "
                f"{wanted.computes}. Compile it with --also {wanted.computes}, or make a pipeline of the model."
            )
        program = self._saved[wanted.computes]
        require_words(batch, program)
        parts = batch.into(microbatches_like(program, batch)).tensors

        def refuse(new: int | None, known: Sequence[Entry]) -> None:
            assert program.guards is not None
            refuse_answers(program.guards, new or 0, parts[new or 0])

        found, _ = self.cache.find(lambda: wanted.computes, parts, refuse)
        return tuple(each.graphs[0] for each in found)

    def _add(self, batch: Batch, wanted: Computation, count: int, new: int | None, known: Sequence[Entry]) -> None:
        """Compile for a batch whose answers are new, on all ranks."""
        change = self.cache.change(self._key(batch, wanted, count))
        if change and self._ranks.is_first:
            print(f"zbcompile: compiling {wanted.computes} again for {change}.")
        since = f" (on this rank, of {change})" if change else ""
        what = f"compiling {wanted.computes} for {batch.whole.summary()}{since}"
        with self._ranks.watch.position.turn_to(what):
            plan, leads = partial(self._planned, batch, count, wanted), new is not None
            made = self.cache.capture("compiling a forward", plan, lambda each: each.guards, leads)
            standing = [Standing(program.premises, {"model": self._model}) for program in made.programs]
            exchanges = set[str]().union(*(program.exchanges for program in made.programs))
            graphs = self._prepared(made.programs)
            self.cache.add(self._key(batch, wanted, count), made.guards, standing, graphs, exchanges, evaluates=True)
            self.cache.trim()

    def _planned(self, batch: Batch, count: int, wanted: Computation, given: Given | None) -> "Planned":
        with readable(self._model), hinting(partial(hint_at_device, batch.whole, self._ranks.device)):
            return plan_forwards(self._model, batch, count, wanted, self._frame, given)

    def _key(self, batch: Batch, wanted: Computation, count: int) -> tuple[Any, ...]:
        modules = tuple((wanted.training and each.training, forward_hooks(each)) for each in self._model.modules())
        return wanted, count, modules, batch.whole.signature, torch_modes(self._ranks.device), self._steps.moves

    @property
    def _frame(self) -> Frame:
        held, rules = self._steps, self._options.placements or {}
        names = (name for name, _ in self._model.named_parameters())
        sharded = frozenset(name for name in names if along(placement_of(name, rules), SHARD))
        choices = self._options.choices
        if held.program is None and any(parameter.requires_grad for parameter in self._model.parameters()):
            choices = replace(choices, vocab="off")  # the step decides, and moves the parameters if need be
        return Frame(held.schedule, held.program, choices, self._ranks.mesh.labels, sharded)

    def _prepared(self, programs: tuple[Program, ...]) -> Graphs:
        made: dict[int, BoundGraphs] = {}
        for number, each in {id(each): each for each in programs}.items():
            program = draw_apart(self._ranks, replace(each, step=self._options.step))
            self._steps.agree_on(program)
            if self._steps.program is None:
                self._steps.place(program)
            made[number] = self._steps.prepare(program)
        return tuple(made[id(program)] for program in programs)

    def _run(
        self, own: Graphs, inputs: list[dict[str, torch.Tensor]], groups: Sequence[Sequence[int]], asked: Asked
    ) -> list[Any]:
        """The results of each group of microbatches, whose rows are one batch."""
        self._steps.require_values()
        everywhere = list({each.number: each for each in own}.values())
        executable = self._bound(self.cache.plan(own, everywhere, forward_order), asked.wanted.training)
        given = StepInput(inputs, asked.step, self._options.seed, "sum", asked.recorder, outputs=asked.outputs)
        with torch.autocast(self._ranks.device.type, enabled=False):  # its casts are in the graphs
            made = self._engine.run(executable, given, {}, self._steps.schedule).made
        if asked.outputs == "last" and not executable.ends_on(self._ranks.local):
            return [None] * len(groups)
        returned = [{i: own[i].program.returns for i in group} for group in groups]
        return [next(iter(each.values())).rebuild(joined_rows(made, each)) for each in returned]

    def _bound(self, executable: Executable, training: bool) -> Executable:
        """The same on the tensors that the model has now. In train mode what forward writes into buffers is dropped."""
        read = {name for stage in executable.program.stages for name in stage.parameters}
        rows = gather_rows(self._ranks, self._steps.shards, read)
        held = resident_tensors(self._model, {}) | {Slot("parameter", name): whole for name, whole in rows.items()}
        for stage in executable.first.stages.values() if training else ():
            held |= {slot: held[slot].clone() for slot in (Slot("buffer", name) for name in stage.program.changed)}
        bound = {each.number: _on_tensors(each, held) for each in executable.everywhere}
        graphs = tuple(bound[each.number] for each in executable.graphs)
        return replace(executable, graphs=graphs, everywhere=tuple(bound.values()))


def _on_tensors(graphs: BoundGraphs, held: Mapping[Slot, torch.Tensor]) -> BoundGraphs:
    """The same graphs on other tensors of the model."""
    kept = {s: t for stage in graphs.stages.values() for s, t in stage.resident.items() if s.kind == "constant"}
    return replace(graphs, stages={i: rebind(stage, {**kept, **held}) for i, stage in graphs.stages.items()})


def plan_forwards(
    model: nn.Module, batch: Batch, count: int, wanted: Computation, frame: Frame, given: Given | None = None
) -> Planned:
    """Compile the forward for this batch, with its own answers to what forward asks, or those `given`.

    It runs in microbatches, the last of which may be smaller, when every output has one row per sample; an output of
    another kind (a loss, say) is computed on the whole batch, so that it is what the model itself returns. So is a
    forward that changes buffers in eval mode, which a batch changes once. What forward asks is answered for the batch
    as a whole, as in eager mode.
    """
    whole = compile_forward(model, batch.whole, wanted, frame, given)
    guards = whole.guards
    alone = Planned((whole,), guards)
    changes = not wanted.training and any(stage.changed for stage in whole.stages)
    count = batch.most_parts(count, even=whole.vocabulary is not None)
    if count == 1 or not whole.returns.has_rows(batch.size) or changes:
        return alone
    frame = replace(frame, like=frame.like or whole)
    alike = guards.given if guards else None
    try:
        chunks = [compile_forward(model, part, wanted, frame, alike) for part in batch.distinct(count)]
    except CaptureError:
        if guards is None:
            raise
        return alone  # a chunk asks other questions
    rows = (batch.rows(0, count), batch.rows(count - 1, count))
    fits = all(_fits(chunk, whole, size) for chunk, size in zip(chunks, rows, strict=False))
    return Planned((*chunks[:1] * (count - 1), chunks[-1]), guards) if fits else alone


def _fits(chunk: Program, whole: Program, rows: int) -> bool:
    """Whether chunks return what the whole does but for its rows, and no chunk asks what nobody would ask others."""
    asks = whole.guards is None and chunk.guards is not None
    return not asks and chunk.returns.has_rows(rows) and chunk.returns.rest == whole.returns.rest


def require_same_calls(ranks: Ranks, asked: Asked, batches: Sequence[Batch]) -> None:
    """Raise PipelineError, on every rank, if ranks ask for different things: they would wait for each other."""
    given = [batch.whole.tensors.items() for batch in batches]
    inputs = [", ".join(f"{path} {type_text(tensor)}" for path, tensor in each) for each in given]
    notes = {
        "the call": asked.wanted.computes,
        "mode": MODES[asked.wanted.training],
        "outputs": asked.outputs,
        "microbatches": asked.microbatches,
        "recording": asked.recorder is not None,
        "the inputs": inputs,
    }
    remedy = "Every rank must make the same calls."
    agree(ranks, notes, "evaluate different things", remedy, of_a_place=("the inputs",))


def require_words(batch: Batch, program: Program) -> None:
    """Require that every label of log-probabilities is a word, or ignored."""
    if program.returns.computes == "eval":
        return
    labels = batch.whole.example[2].long()  # a small type has no number for ignored labels
    words = program.returns.constants[program.returns.names[-1]]
    wrong = labels[((labels < 0) | (labels >= words)) & (labels != IGNORED)]
    if wrong.numel():
        raise PipelineError(
            f"labels= holds {wrong[0].item()}, and the output layer has {words} words; expected 0 to {words - 1}, or "
            f"{IGNORED} where there is no label."
        )


def microbatches_like(program: Program, batch: Batch) -> int:
    """Into how many microbatches like those of `program` the batch divides."""
    counts = [n for n in range(1, batch.size + 1) if batch.divides_into(n)] or [1]
    count = next((n for n in counts if call_of(batch.microbatch(0, n)) == program.call), None)
    if count is None:
        raise PipelineError(
            f"the forward was compiled for microbatches of {listed(program.call)}; received "
            f"{listed(call_of(batch.whole))}, which does not divide into these. Pad it, or compile and save another."
        )
    output = program.returns
    fixed = output.computes == "eval" and any(value is not None for value in output.constants.values())
    if count > 1 and (fixed or not output.has_rows(batch.size // count)):
        what = "holds numbers that may depend on the rows" if fixed else "has not one row per sample"
        raise PipelineError(
            f"the model's output {what}, and is computed of one microbatch as it was compiled. Pass batches of "
            f"{batch.size // count}, or leave out the argument that makes forward return more than rows."
        )
    return count
