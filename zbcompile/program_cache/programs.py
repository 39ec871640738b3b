"""The programs of a pipeline: its model compiled for the steps and evaluations that it meets; a few
of each are kept.

The first one decides where every parameter lives; later ones keep to that.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zbcompile.batches.batch import (
    Batch,
    Microbatch,
    Microbatches,
    hint_at_device,
    hint_at_target,
    hinting,
    refuse_meta_inputs,
)
from zbcompile.compiler.compile_forward import (
    ForwardOptions,
    compile_forwards,
    forward_order,
    microbatches_like,
    require_words,
)
from zbcompile.compiler.compile_model import (
    ExportedModel,
    compile_program,
    export_step,
    is_program_of,
)
from zbcompile.distributed.agreement import gathered, together
from zbcompile.engine.executable import BoundGraphs, Executable
from zbcompile.engine.stage import rebind
from zbcompile.engine.step_agreement import StepAgreement, require_same_batch
from zbcompile.errors import PipelineError
from zbcompile.model.held_elsewhere import readable
from zbcompile.model.placements import SHARD, along, placement_of
from zbcompile.model.resident_tensors import resident_tensors
from zbcompile.options import PipelineOptions, is_searched
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.module_state import ModuleState
from zbcompile.passes.torch_private import hooks_of
from zbcompile.prediction.memory_limit import compile_within_memory
from zbcompile.program.directory import save_program
from zbcompile.program.program import Program, call_of, listed
from zbcompile.program_cache.bound_programs import BoundPrograms
from zbcompile.program_cache.cache import (
    Entry,
    ProgramCache,
    batches_apart,
    key_of,
    torch_modes,
    what_is_new,
)
from zbcompile.program_cache.orders import step_order
from zbcompile.program_cache.state_dict import gather_rows
from zbcompile.program_cache.step_outputs import kept_for, keyword
from zbcompile.progress import LONG, Progress
from zbcompile.schedules import Schedule

Graphs = tuple[BoundGraphs, ...]


class CompiledGraphs(NamedTuple):
    """The graphs of a step, or those of each microbatch of an evaluation, and the module state that
    they are for."""

    standing: list[ModuleState]
    graphs: Graphs


class Programs:
    """The compiled steps and evaluations of a pipeline, found by what their microbatches are.
    `schedule` is that of the usual steps. A program that was loaded (`saved`) holds all that there
    is: nothing is compiled. Before the first step there may be evaluations, of which the first
    places the parameters."""

    def __init__(
        self,
        model: nn.Module,
        options: PipelineOptions,
        bound: BoundPrograms,
        schedule: Schedule,
        saved: Program | None = None,
    ) -> None:
        self._model, self._options, self.bound, self.ranks = model, options, bound, bound.ranks
        self.schedule, self.saved = schedule, saved
        self.decided: Choices | None = None  # by a search
        self.searched: tuple[ExportedModel, Program] | None = None  # the first step, from a search
        self.cache = ProgramCache(bound.ranks, options.max_shapes)
        self.outputs: bool | str = False  # what the present step returns besides its loss, of KINDS
        self.agreement = StepAgreement(bound.ranks)
        # how often each value of the module state has changed
        self._changes: Counter[str] = Counter()
        self._last: list[
            Entry
        ] = []  # those that were right for the last step, in the state that it had
        self._last_state: tuple[Any, ...] | None = None
        if saved is not None:
            bound.hold(saved)
            graphs = bound.prepare_step(saved) if saved.trains else bound.prepare(saved)
            key: Any = saved.call if saved.trains else saved.returns.computes
            self.cache.add(key, (), (graphs,), saved.exchanges, evaluates=not saved.trains)

    def __iter__(self) -> Iterator[BoundGraphs]:
        return (entry.graphs[0] for entry in self.cache.steps)

    def first(self) -> BoundGraphs:
        """The graphs that were made first. Raises PipelineError after `recompile`, before the next
        compilation."""
        found = next(iter(self), None)
        if found is None:
            raise PipelineError(
                "recompile() has dropped all programs. Call pipe.compile with a batch, or run a"
                " step."
            )
        return found

    def get(self, step: Microbatches) -> Executable:
        """Returns the executable of a step, compiled if need be. Raises PipelineError or
        CaptureError if the model is no longer the one that was compiled."""
        first = self._last_state is None  # a lazy parameter has no state yet
        same = step.alike and not first and self._state(step.each[0]) == self._last_state
        known = same and all(each.holds() for each in self._last)
        self._begin_agreement(step, known)
        if known:
            graphs = self._last[0].graphs * len(step.each)
            return self.cache.plan(graphs, graphs[:1], step_order)
        if self.saved is None:
            _require_few(step.each, self._options.max_shapes)
        if self.bound.program is not None and not known:  # what is lazy has no shape before
            self.bound.require_same_model()
        kinds: dict[Any, list[int]] = {}
        for place, each in enumerate(step.each):
            kinds.setdefault(each.signature, []).append(place)
        own, distinct = dict[int, BoundGraphs](), dict[int, BoundGraphs]()
        for places in kinds.values():
            (found,) = self._find_step([step.each[place] for place in places]).graphs
            own |= dict.fromkeys(places, found)
            distinct[found.number] = found
        if not known:
            self.bound.require_same_model()
        if step.alike:
            self._last, self._last_state = (
                self.cache.right(self._key(step.each[0])),
                self._state(step.each[0]),
            )
        else:
            self._last, self._last_state = [], None
        ordered = [own[place] for place in range(len(own))]
        return self.cache.plan(ordered, [each for _, each in sorted(distinct.items())], step_order)

    def _find_step(self, microbatches: Sequence[Microbatch]) -> Entry:
        """Returns the graphs of microbatches of one shape."""
        first = microbatches[0]
        key = partial(self._key, first)
        if self.saved is not None and not self.cache.right(key()):
            raise PipelineError(
                f"the program was compiled for microbatches of {listed(self.saved.call)}; received"
                f" {listed(call_of(first))}. Pass such batches, or compile and save a program for"
                " these."
            )
        what, make = f"microbatches of {first.summary()}", partial(self._make_step, microbatches)
        return self._find(key, what, make)

    def _find(
        self,
        key: Callable[[], Any],
        what: str,
        make: Callable[[str], CompiledGraphs],
        evaluates: bool = False,
    ) -> Entry:
        """Returns the graphs for a key, which is computed again after compiling: forward may
        install hooks when it first runs. If there are none, all ranks compile `what`, in words;
        `make` is given what has changed since the last entry, in words."""
        for _ in range(self._options.max_shapes + 1):
            found = self.cache.find(key())
            if found is not None:
                return found
            change = self._noted(self.cache.change(key()))
            title = f"compiling {what}" + f" (on this rank, of {change})" * bool(change)
            with (
                self.ranks.watch.position.turn_to(title),
                Progress(f"zbcompile: {title}", first=LONG),
            ):
                made = make(change)
            self._add(key(), made, evaluates)
        raise PipelineError(
            "no program that was compiled for this step fits it: the state of its modules was"
            " different in every capture. Keep it the same from step to step, or pass it as an"
            " argument of step."
        )

    def _noted(self, change: str) -> str:
        """Returns the change of module state for a notice; for a value that changes often with a
        remedy."""
        if not change:
            return ""
        path = change.partition(": ")[0]
        self._changes[path] += 1
        often = self._changes[path] > 2
        return (
            f"{change} (change {self._changes[path]} of it; pass it as a tensor)"
            if often
            else change
        )

    def recompile(self) -> None:
        """Drops all programs; the parameters stay where they are. All ranks call it."""
        if self.saved is not None:
            raise PipelineError(
                "recompile() needs the model, and this pipeline was loaded from a directory."
            )
        self.cache.clear()
        self._last, self._last_state = [], None

    def _add(self, key: Any, made: CompiledGraphs, evaluates: bool) -> None:
        exchanges = frozenset[str]().union(*(each.program.exchanges for each in made.graphs))
        self.cache.add(key, made.standing, made.graphs, exchanges, evaluates)
        if self.cache.trim() and not evaluates:
            self._last, self._last_state = [], None
            if self.ranks.is_first:
                print(
                    "zbcompile: evicted the least recently used program;"
                    f" max_shapes={self._options.max_shapes}."
                )

    def require_step(self, outputs: bool | str) -> None:
        """Raise PipelineError if there is no step, or none that returns more than its loss."""
        if outputs and self.saved is not None:
            raise PipelineError(
                f"a saved program returns its loss alone. Leave out {keyword(outputs)}, or pipeline"
                " the model itself."
            )
        if self.saved is not None and not self.saved.trains:
            raise PipelineError(
                f"the directory holds {self.saved.returns.computes} alone, and no step to train"
                " with. Compile one without --only."
            )
        if outputs and (self._options.vocab in (1, 2) or self.bound.shards is not None):
            raise PipelineError(
                f"{keyword(outputs)} needs whole outputs, and the output layer is sharded: leave it"
                ' out, or pass vocab="off".'
            )

    def _begin_agreement(self, step: Microbatches, known: bool) -> None:
        """Begin to compare what the ranks are about to do: before a message outside of the step's
        actions, the result is waited for."""
        if self.ranks.replicas.count == 1:
            return
        keys = [] if known else list(map(self._key, step.distinct))
        new = not all(map(self.cache.right, keys))
        change = next(filter(None, map(self.cache.change, keys)), "") if new else ""
        exchanges = frozenset[str]().union(*(each.exchanges for each in self.cache.steps))
        passed = len(step.each), step.shapes(), keyword(self.outputs), change
        self.agreement.begin(passed, new, batches_apart(exchanges))
        if new or not self.bound.compared or exchanges:
            self.agreement.require()

    def _state(self, microbatch: Microbatch) -> tuple[Any, ...]:
        """The state of model and torch in which a microbatch runs: if it is that of the last step,
        the same entries are right."""
        return (
            microbatch.signature,
            kept_for(self.outputs),
            torch_modes(self.ranks.device),
            self.bound.form,
        )

    @contextmanager
    def void_if_it_fails(self) -> Iterator[None]:
        """If a step fails, drop its partial sums: an optimizer that steps nevertheless finds no
        gradients."""
        try:
            yield
        except BaseException:
            for parameter in (*self._model.parameters(), *self.bound.parameters.values()):
                parameter.grad = None
            self.ranks.replicas.forget()
            self.cache.forget_plans()
            raise

    def _make_step(self, microbatches: Sequence[Microbatch], change: str) -> CompiledGraphs:
        microbatch = microbatches[0]
        require_same_batch(
            self.ranks,
            {path: [each.tensors[path] for each in microbatches] for path in microbatch.tensors},
        )
        exported = self.searched[0] if self.searched else self.export(microbatch)
        standing = ModuleState(
            self._model, self._options.loss, frozenset(exported.step.changed_state)
        )
        key = self._key(microbatch)
        known = (each.graphs for each in self.cache.steps if each.key == key)
        same = [graphs for graphs in known if is_program_of(graphs[0].program, exported)]
        graphs = same[0] if same else (self._compile(microbatch, exported, change),)
        return CompiledGraphs([standing], graphs)

    def _key(self, microbatch: Microbatch) -> Any:
        if self.saved is not None:
            return call_of(microbatch)
        return key_of(self._model, microbatch, self.ranks.device, kept_for(self.outputs))

    def _compile(self, microbatch: Microbatch, exported: ExportedModel, reason: str) -> BoundGraphs:
        if self.bound.trains and self.ranks.is_first:
            key, known = self._key(microbatch), [each.key for each in self.cache.steps]
            reason = reason or what_is_new(self._model, microbatch, key, known)
            number = (
                f"program {len(self.bound.compilations) + 1}; max_shapes={self._options.max_shapes}"
                " are kept"
            )
            print(f"zbcompile: compiling again for {reason} ({number}).")
        program = self._make_program(microbatch, exported)
        asked = {
            "what a step returns": keyword(self.outputs),
            "max_shapes": self._options.max_shapes,
        }
        self.bound.agree_on(program, asked | vars(self._options.step))
        if self.bound.program is None:
            self.bound.place(program)
        elif not self.bound.trains and program.homes != self.bound.program.homes:
            self.bound.move(program)
        elif not self.bound.trains:
            # an evaluation placed the parameters; from now on they train
            self.bound.program = program
            for name, rows in self.bound.shards.own.items() if self.bound.shards else ():
                rows.requires_grad_(name in program.trained)
        self.bound.trained |= program.trained
        return self.bound.prepare_step(program)

    def export(self, microbatch: Microbatch) -> ExportedModel:
        """Returns the training step for microbatches like this one; all ranks export it
        together."""

        def export_() -> ExportedModel:
            device = partial(hint_at_device, microbatch, self.ranks.device)
            target = partial(hint_at_target, self._model, microbatch, self._options.loss)
            refuse_meta_inputs(microbatch, self.ranks.device)
            with readable(self._model), hinting(device, target):
                return export_step(
                    self._model,
                    microbatch,
                    self._options.loss,
                    device=self.ranks.device,
                    process_groups=self.ranks.mesh.labels,
                    static_inputs=microbatch.static,
                    keep=kept_for(self.outputs),
                    choices=self._choices(),
                    schedule=self.schedule,
                )

        return together(self.ranks, "capturing", export_)

    def _make_program(self, microbatch: Microbatch, exported: ExportedModel) -> Program:
        searched, self.searched = self.searched, None
        if searched is not None:
            _, program = searched
            notice = program.plan
        else:
            make = partial(self.make, microbatch, exported, self.schedule)
            program = compile_within_memory(make, self.decided or self._options.choices)
            notice = program.cuts.overweight if self.bound.program is None else ""
        if self.ranks.is_first and notice:
            print(f"zbcompile: {notice}")
        return replace(program, writer=self._save)

    def _save(self, program: Program, directory: Path) -> None:
        save_program(program, directory, self.ranks)

    def make(
        self,
        microbatch: Microbatch,
        exported: ExportedModel,
        schedule: Schedule,
        choices: Choices,
    ) -> Program:
        """Returns the exported step compiled for a schedule, with the parameters where they are."""
        task = self._model, microbatch, exported, schedule, choices

        def compile_() -> Program:
            try:
                return compile_program(*task, self._placed)
            except PartitionError:
                if self.bound.trains or self._placed is None:
                    raise
                return compile_program(*task)  # what an evaluation has placed is in another order

        program = together(self.ranks, "compiling", compile_)
        program = self._placed_alike(program, lambda like: compile_program(*task, like))
        return replace(program, step=self._options.step)

    def _placed_alike(
        self, program: Program, compile_like: Callable[[Program], Program]
    ) -> Program:
        """Returns a program with every parameter on the same stages on all ranks.

        Ranks of tensor parallelism may hold parts of different sizes, for which other cuts are
        balanced: those of the first rank decide.
        """
        if self._placed is not None or not self.ranks.mesh.beside("pp", "dp"):
            return program
        homes = gathered(self.ranks, program.homes)
        if all(each == homes[0] for each in homes):
            return program
        like = replace(program, homes=homes[0], stages=(), canonical_targets=())
        return together(self.ranks, "compiling", lambda: compile_like(like))

    @property
    def _placed(self) -> Program | None:
        """The program whose placement a new one keeps; None if it may place parameters anew. An
        evaluation's placement is not kept if a layout is searched for training, or if the output
        layer is to be sharded, which the evaluation of a model that trains leaves to the step."""
        found = self.bound.program
        if found is None or self.bound.trains:
            return found
        sharded = self._options.choices.vocab in (1, 2) and found.choices.vocab == "off"
        return None if is_searched(self._options) or sharded else found

    def _choices(self) -> Choices:
        """Later programs reuse the first one's sharding decision, because row ownership is already
        fixed."""
        choices = self.decided or self._options.choices
        if self.decided is None and self.outputs and self._options.vocab is None:
            return replace(choices, vocab="off")  # what is returned is made of whole outputs
        placed = self._placed
        if placed is None or (choices.vocab != "auto" and self.bound.trains):
            return choices
        if placed.vocabulary is None:
            return replace(choices, vocab="off")
        return choices if choices.vocab in (1, 2) else replace(choices, vocab=1)

    # Evaluations

    def forwards(self, batch: Batch, computes: str, count: int | None) -> Graphs:
        """Returns the graphs of the batch's microbatches, at most `count` of them (None: as many as
        a step has), compiled if need be."""
        if self.saved is not None:
            return self._saved_forwards(batch, computes)
        if self.bound.program is not None:
            self.bound.require_same_model()
        task = batch, computes, count or self.schedule.microbatches
        key, make = partial(self._forward_key, *task), partial(self._make_forwards, *task)
        what = f"{computes} for {batch.whole.summary()}"
        graphs = self._find(key, what, make, evaluates=True).graphs
        self.bound.require_same_model()
        require_words(batch, graphs[0].program)
        return graphs

    def _saved_forwards(self, batch: Batch, computes: str) -> Graphs:
        """Returns the graphs of the batch's microbatches from a saved program."""
        held = {each.key: each.graphs[0].program for each in self.cache.evaluations}
        if computes not in held:
            raise PipelineError(
                f"the directory holds {', '.join(held) or 'the training step alone'}, and cannot"
                f" compute {computes}. Compile a directory with --only {computes}, or make a"
                " pipeline of the model."
            )
        program = held[computes]
        require_words(batch, program)
        (graphs,) = next(each.graphs for each in self.cache.evaluations if each.key == computes)
        return (graphs,) * microbatches_like(program, batch)

    def _make_forwards(
        self, batch: Batch, computes: str, count: int, change: str
    ) -> CompiledGraphs:
        if change and self.ranks.is_first:
            print(f"zbcompile: compiling {computes} again for {change}.")

        def compile_() -> tuple[Program, ...]:
            refuse_meta_inputs(batch.whole, self.ranks.device)
            with (
                readable(self._model),
                hinting(partial(hint_at_device, batch.whole, self.ranks.device)),
            ):
                return compile_forwards(self._model, batch, count, computes, self._forward_options)

        made = together(self.ranks, "compiling a forward", compile_)
        graphs = {
            id(each): self._bind_forward(each)
            for each in {id(each): each for each in made}.values()
        }
        standing = [
            ModuleState(
                self._model, without=frozenset().union(*(each.changed_state for each in made))
            )
        ]
        return CompiledGraphs(standing, tuple(graphs[id(each)] for each in made))

    def _bind_forward(self, program: Program) -> BoundGraphs:
        program = replace(program, step=self._options.step)
        self.bound.agree_on(program)
        if self.bound.program is None:
            self.bound.place(program)
        return self.bound.prepare(program)

    def _forward_key(self, batch: Batch, computes: str, count: int) -> tuple[Any, ...]:
        modules = tuple(hooks_of(each) for each in self._model.modules())
        trains = tuple(parameter.requires_grad for parameter in self._model.parameters())
        return (
            computes,
            count,
            modules,
            trains,
            batch.whole.signature,
            torch_modes(self.ranks.device),
            self.bound.moves,
        )

    @property
    def _forward_options(self) -> ForwardOptions:
        rules, choices = self._options.placements or {}, self._options.choices
        names = (name for name, _ in self._model.named_parameters())
        sharded = frozenset(name for name in names if along(placement_of(name, rules), SHARD))
        if self.bound.program is None and any(
            parameter.requires_grad for parameter in self._model.parameters()
        ):
            choices = replace(
                choices, vocab="off"
            )  # the step decides, and moves the parameters if need be
        like, labels = self.bound.program, self.ranks.mesh.labels
        return ForwardOptions(self.schedule, like, choices, labels, sharded, self.ranks.device)

    def evaluation(self, own: Sequence[BoundGraphs]) -> Executable:
        """The executable of microbatches that run the graphs `own`, on the tensors that the model
        has now."""
        executable = self.cache.plan(
            own, list({each.number: each for each in own}.values()), forward_order
        )
        read = {name for stage in executable.program.stages for name in stage.parameters}
        rows = gather_rows(self.ranks, self.bound.shards, read)
        held = resident_tensors(self._model, {}) | {
            Slot("parameter", name): whole for name, whole in rows.items()
        }
        bound = {each.number: _on_tensors(each, held) for each in executable.everywhere}
        graphs = tuple(bound[each.number] for each in executable.graphs)
        return replace(executable, graphs=graphs, everywhere=tuple(bound.values()))


def _on_tensors(graphs: BoundGraphs, held: Mapping[Slot, torch.Tensor]) -> BoundGraphs:
    """The same graphs on other tensors of the model."""
    kept = {
        s: t
        for stage in graphs.stages.values()
        for s, t in stage.resident.items()
        if s.role == "constant"
    }
    return replace(
        graphs, stages={i: rebind(stage, {**kept, **held}) for i, stage in graphs.stages.items()}
    )


def _require_few(microbatches: Sequence[Microbatch], limit: int) -> None:
    """Raise PipelineError if the microbatches of a step have more shapes than programs are kept."""
    kinds = len({each.signature for each in microbatches})
    if kinds > limit:
        raise PipelineError(
            f"the microbatches of this step have {kinds} shapes, and max_shapes={limit} programs"
            " are kept. Raise it, or pad to fewer shapes."
        )
