"""The programs of a pipeline: its model compiled for the steps and evaluations that it meets; a few
of each are kept.

The first program decides where every parameter lives; later ones keep to that.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from zbcompile.batches.batch import Batch, Microbatch, Microbatches, listed
from zbcompile.batches.capture_hints import explained
from zbcompile.compiler.compile_forward import (
    ForwardOptions,
    compile_forwards,
    compile_placement,
    forward_order,
    microbatches_like,
    require_words,
)
from zbcompile.compiler.compile_model import ExportedModel, compile_program, export_step
from zbcompile.distributed.agreement import agree, together
from zbcompile.distributed.mesh import BATCHES, DIMENSIONS
from zbcompile.engine.executable import BoundGraphs, Executable, keyword, returned_values
from zbcompile.engine.stage import rebind
from zbcompile.engine.step_agreement import require_same_batch
from zbcompile.errors import PipelineError
from zbcompile.model.placements import SHARD, along, placement_of
from zbcompile.options import PipelineOptions
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.module_state import ModuleState
from zbcompile.prediction.memory_limit import compile_within_memory
from zbcompile.program.directory import save_program
from zbcompile.program.program import Program
from zbcompile.program_cache.binding import ModelBinding
from zbcompile.program_cache.graph_cache import (
    CompiledGraphs,
    GraphCache,
    GraphKey,
    key_details,
    recompile_reason,
    torch_modes,
)
from zbcompile.program_cache.orders import step_order
from zbcompile.progress import LONG, Progress
from zbcompile.schedules import Schedule
from zbcompile.torch_private import fingerprint


class ProgramCache:
    """A cache of the compiled steps and evaluations of a pipeline, by the form of microbatches.

    `schedule` is that of the usual steps. A program that was loaded (`saved`) is the only one:
    nothing is compiled. Before the first step there may be evaluations. The first one places
    the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        options: PipelineOptions,
        binding: ModelBinding,
        schedule: Schedule,
        saved: Program | None = None,
    ) -> None:
        self._model, self._options, self.binding = model, options, binding
        self.ranks, self.schedule, self.saved = binding.ranks, schedule, saved
        self.decided: CompileOptions | None = None  # by schedule="auto"
        self.searched: tuple[ExportedModel, Program] | None = None  # the first step, by "auto"
        self.steps = GraphCache(options.max_shapes)
        self.evaluations = GraphCache(options.max_shapes)
        self.outputs: bool | str = False  # what the present step returns besides its loss
        self._changes: Counter[str] = Counter()  # of each value of the module state
        if saved is not None:
            binding.place(saved)
            cache = self.steps if saved.trains else self.evaluations
            key: Any = saved.call if saved.trains else saved.returns.computes
            cache.first = CompiledGraphs((binding.prepare(saved),), key=key)
            cache.add(cache.first)

    def first(self) -> BoundGraphs:
        """Returns the graphs of the first step. Raises PipelineError after `recompile`, before the
        next compilation."""
        if self.steps.first is None:
            raise PipelineError(
                "recompile() has dropped all programs. Call pipe.compile with a batch, or run a"
                " step."
            )
        return self.steps.first.graphs[0]

    def recompile(self) -> None:
        """Drops all programs; the parameters stay where they are. All ranks call it."""
        if self.saved is not None:
            raise PipelineError(
                "recompile() needs the model, and this pipeline was loaded from a directory."
            )
        self.steps.clear()
        self.evaluations.clear()

    # Steps

    def get(self, step: Microbatches) -> Executable:
        """Returns the executable of a step, compiled if need be. Raises PipelineError or
        CaptureError if the model is no longer the one that was compiled."""
        if self.binding.program is not None:
            self.binding.require_same_model()
        groups: dict[Any, list[Microbatch]] = {}
        signatures = [microbatch.signature for microbatch in step.distinct]
        for signature, microbatch in zip(signatures, step.distinct, strict=True):
            groups.setdefault(signature, []).append(microbatch)
        if self.saved is None and len(groups) > self._options.max_shapes:
            raise PipelineError(
                f"the microbatches of this step have {len(groups)} shapes, and"
                f" max_shapes={self._options.max_shapes} programs are kept. Raise it, or pad to"
                " fewer shapes."
            )
        if self.ranks.replicas.count > 1:
            self._agree(step, [group[0] for group in groups.values()])
        if step.alike:
            groups = {signatures[0]: list(step.each)}
            signatures *= len(step.each)
        graphs = {key: self._find_step(group).graphs[0] for key, group in groups.items()}
        return self.steps.plan([graphs[key] for key in signatures], step_order, self.ranks.local)

    def _agree(self, step: Microbatches, distinct: Sequence[Microbatch]) -> None:
        """Raises PipelineError, on every rank, if replicas are about to take different steps.

        Collectives of unequal size end gloo's process without a message, so that a difference has
        to be found before them. Replicas that exchange nothing within a microbatch may have other
        shapes.
        """
        key = self._step_key if self.saved is None else lambda microbatch: microbatch.signature
        compiles = not self.steps.entries or any(
            self.steps.find(key(microbatch)) is None for microbatch in distinct
        )
        exchanges = {dim for e in self.steps.entries for dim in e.graphs[0].program.exchanges}
        unknown = not exchanges <= set(DIMENSIONS)
        independent = tuple(dim for dim in BATCHES if not unknown and dim not in exchanges)
        values = {
            "the number of microbatches": len(step.each),
            "what it returns": keyword(self.outputs),
            "compiling": compiles,
            "the shapes": step.shapes(),
        }
        remedy = (
            "Replicas take as many microbatches in every step, return the same and compile"
            " together: pass batches of one size, and change what a capture depends on (train,"
            " eval, requires_grad, autocast, values that forward reads in Python) on every rank"
            " alike."
        )
        agree(self.ranks, values, "take different steps", remedy, ["the shapes"], independent)

    def require_step(self, outputs: bool | str) -> None:
        """Raises PipelineError if there is no step, or none that returns more than its loss."""
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
        if outputs and (self._options.vocab in (1, 2) or self.binding.shards is not None):
            raise PipelineError(
                f"{keyword(outputs)} needs whole outputs, and the output layer is sharded: leave it"
                ' out, or pass vocab="off".'
            )

    @contextmanager
    def drop_gradients_on_error(self) -> Iterator[None]:
        """Drops the partial sums of a step that fails, so that an optimizer finds no gradients."""
        try:
            yield
        except BaseException:
            for parameter in (*self._model.parameters(), *self.binding.parameters.values()):
                parameter.grad = None
            self.ranks.replicas.partial.clear()
            self.steps.plans.clear()
            raise

    def _find_step(self, microbatches: Sequence[Microbatch]) -> CompiledGraphs:
        """Returns the graphs of microbatches of one shape."""
        first = microbatches[0]
        if self.saved is not None:
            entry = self.steps.find(first.signature)
            if entry is None:
                raise PipelineError(
                    f"the program was compiled for microbatches of {listed(self.saved.call)};"
                    f" received {listed(first.signature)}. Pass such batches, or compile and save a"
                    " program for these."
                )
            return entry
        what = f"microbatches of {first.summary()}"
        key, compile_ = partial(self._step_key, first), partial(self._compile_step, microbatches)
        return self._find(self.steps, key, what, compile_)

    def _step_key(self, microbatch: Microbatch) -> GraphKey:
        modes, returns = torch_modes(self.ranks.device), returned_values(self.outputs)
        return GraphKey(microbatch.key, self.binding.checked_state, modes, returns)

    def _find(
        self,
        cache: GraphCache,
        key: Callable[[], Any],
        what: str,
        compile_: Callable[[str], CompiledGraphs],
    ) -> CompiledGraphs:
        """Returns the entry of a key. If there is none, all ranks compile `what`.

        `compile_` receives what has changed in the module state since the last entry of the key.
        The key is computed again after compiling: parameters get memory, and forward may install
        hooks.
        """
        entry = cache.find(key()) if cache.entries else None
        if entry is not None:
            return entry
        change = self._describe(cache.change(key())) if cache.entries else ""
        title = f"compiling {what}" + f" (on this rank, of {change})" * bool(change)
        with self.ranks.watch.position.turn_to(title), Progress(f"zbcompile: {title}", first=LONG):
            entry = compile_(change)
        self.binding.require_same_model()
        entry = replace(entry, key=key())
        if cache is self.steps:
            cache.first = cache.first or entry
        if cache.add(entry) and cache is self.steps and self.ranks.is_first:
            print(
                "zbcompile: evicted the least recently used program;"
                f" max_shapes={self._options.max_shapes}."
            )
        if not entry.is_valid():
            raise PipelineError(
                "no program that was compiled for this step fits it: the state of its modules was"
                f" different after the capture ({entry.change()}). Keep it the same from step to"
                " step, or pass it as an argument of step."
            )
        return entry

    def _describe(self, change: str) -> str:
        """Returns a change of module state for a notice; for a value that changes often with a
        remedy."""
        if not change:
            return ""
        path = change.partition(": ")[0]
        self._changes[path] += 1
        if self._changes[path] <= 2:
            return change
        return f"{change} (change {self._changes[path]} of it; pass it as a tensor)"

    def _compile_step(self, microbatches: Sequence[Microbatch], change: str) -> CompiledGraphs:
        first = microbatches[0]
        paths = first.tensors
        require_same_batch(
            self.ranks,
            {path: [microbatch.tensors[path] for microbatch in microbatches] for path in paths},
        )
        exported = self.searched[0] if self.searched else self.export(first)
        unread = frozenset(exported.step.changed_state)
        state = ModuleState(self._model, self._options.loss, unread)
        details = key_details(self._model, self._step_key(first))
        if self.binding.trains and self.ranks.is_first:
            cached = [entry.details for entry in self.steps.entries if entry.details is not None]
            changes = (entry.change() for entry in reversed(self.steps.entries))
            reason = change or recompile_reason(first, details, cached)
            reason = reason or next(filter(None, changes), "another state of the model")
            print(
                f"zbcompile: compiling again for {reason} (program"
                f" {len(self.binding.compilations) + 1}; max_shapes={self._options.max_shapes} are"
                " kept)."
            )
        return CompiledGraphs((self._bind_step(first, exported),), state, details)

    def _bind_step(self, microbatch: Microbatch, exported: ExportedModel) -> BoundGraphs:
        if self.searched is not None:
            program = self.searched[1]
            self.searched, notice = None, program.plan
        else:
            make = partial(self.make, microbatch, exported, self.schedule)
            program = compile_within_memory(make, self.decided or self._options.choices)
            notice = program.overweight if self.binding.program is None else ""
        if self.ranks.is_first and notice:
            print(f"zbcompile: {notice}")
        program = replace(program, writer=self._save)
        requested = {
            "what a step returns": keyword(self.outputs),
            "max_shapes": self._options.max_shapes,
        }
        self.binding.agree_on(program, requested | vars(self._options.step))
        if self.binding.program is None:
            self.binding.place(program)
        elif not self.binding.trains:
            self.binding.train_with(program)
        self.binding.trained |= program.trained
        return self.binding.prepare(program)

    def _save(self, program: Program, directory: Path) -> None:
        save_program(program, directory, self.ranks)

    def export(self, microbatch: Microbatch) -> ExportedModel:
        """Returns the training step for microbatches like this one; all ranks export it
        together."""

        def export_() -> ExportedModel:
            with explained(self._model, microbatch, self._options.loss, self.ranks.device):
                return export_step(
                    self._model,
                    microbatch,
                    self._options.loss,
                    device=self.ranks.device,
                    process_groups=self.ranks.mesh.labels,
                    static_inputs=microbatch.static,
                    keep=returned_values(self.outputs),
                    choices=self._choices(),
                    schedule=self.schedule,
                )

        return together(self.ranks, "capturing", export_)

    def make(
        self,
        microbatch: Microbatch,
        exported: ExportedModel,
        schedule: Schedule,
        choices: CompileOptions,
    ) -> Program:
        """Returns the exported step compiled for a schedule, with the parameters where they are."""
        task, placed = (self._model, microbatch, exported, schedule, choices), self.binding.program

        def compile_() -> Program:
            try:
                return compile_program(*task, placed)
            except PartitionError as error:
                if self.binding.trains or placed is None:
                    raise
                raise PartitionError(
                    f"{error} An evaluation has placed the parameters; compile the training step"
                    " before it: pipe.compile(batch, target=...)."
                ) from error

        program = together(self.ranks, "compiling", compile_)
        if placed is None and self.ranks.mesh.beside("pp", "dp"):
            # Ranks of tensor parallelism may hold parts of different sizes, for which other cuts
            # are balanced: those of the first rank decide.
            homes = self.ranks.gather(program.homes)
            if any(part != homes[0] for part in homes):
                like = replace(program, homes=homes[0], stages=(), line_operators=())
                program = together(self.ranks, "compiling", lambda: compile_program(*task, like))
        return replace(program, step=self._options.step)

    def _choices(self) -> CompileOptions:
        """Returns the options of a step. Later programs keep the first one's decision whether the
        output layer is sharded, because the owners of its rows are fixed."""
        choices = self.decided or self._options.choices
        if self.decided is None and self.outputs and self._options.vocab is None:
            return replace(choices, vocab="off")  # what is returned needs whole outputs
        placed = self.binding.program
        if placed is None or (choices.vocab != "auto" and self.binding.trains):
            return choices
        if placed.vocabulary is None:
            return replace(choices, vocab="off")
        return choices if choices.vocab in (1, 2) else replace(choices, vocab=1)

    # Evaluations

    def forwards(self, batch: Batch, computes: str, count: int | None) -> tuple[BoundGraphs, ...]:
        """Returns the graphs of the batch's microbatches, at most `count` of them (None: as many as
        a step has), compiled if need be."""
        if self.saved is not None:
            return self._saved_forwards(batch, computes)
        if self.binding.program is not None:
            self.binding.require_same_model()
        count = count or self.schedule.microbatches
        key = partial(self._forward_key, batch, computes, count)
        compile_ = partial(self._compile_forwards, batch, computes, count)
        what = f"{computes} for {batch.whole.summary()}"
        graphs = self._find(self.evaluations, key, what, compile_).graphs
        require_words(batch, graphs[0].program)
        return graphs

    def _saved_forwards(self, batch: Batch, computes: str) -> tuple[BoundGraphs, ...]:
        """Returns the graphs of the batch's microbatches from a saved program."""
        entry = self.evaluations.find(computes)
        if entry is None or self.saved is None:
            names = [str(cached.key) for cached in self.evaluations.entries]
            raise PipelineError(
                f"the directory holds {', '.join(names) or 'the training step alone'}, and cannot"
                f" compute {computes}. Compile a directory with --only {computes}, or make a"
                " pipeline of the model."
            )
        require_words(batch, self.saved)
        return entry.graphs * microbatches_like(self.saved, batch)

    def _forward_key(self, batch: Batch, computes: str, count: int) -> tuple[Any, ...]:
        model = fingerprint(self._model, modes=False)
        return computes, count, model, batch.whole.key, torch_modes(self.ranks.device)

    def _compile_forwards(
        self, batch: Batch, computes: str, count: int, change: str
    ) -> CompiledGraphs:
        if change and self.ranks.is_first:
            print(f"zbcompile: compiling {computes} again for {change}.")
        options = self._forward_options()
        if options.like is None and options.choices.vocab in (1, 2) and computes == "eval":
            options = replace(options, like=self._place_rows(batch, options))

        def compile_() -> tuple[Program, ...]:
            with explained(self._model, batch.whole, None, self.ranks.device):
                return compile_forwards(self._model, batch, count, computes, options)

        programs = together(self.ranks, "compiling a forward", compile_)
        unread = frozenset[str]().union(*(program.changed_state for program in programs))
        distinct = {id(program): program for program in programs}
        graphs = {number: self._bind_forward(program) for number, program in distinct.items()}
        state = ModuleState(self._model, without=unread)
        return CompiledGraphs(tuple(graphs[id(program)] for program in programs), state)

    def _place_rows(self, batch: Batch, options: ForwardOptions) -> Program:
        """Places the parameters for an evaluation, with the rows of the output layer on all
        ranks."""

        def compile_() -> Program:
            with explained(self._model, batch.whole, None, self.ranks.device):
                return compile_placement(self._model, batch.whole, options)

        program = together(self.ranks, "placing the output layer", compile_)
        self.binding.agree_on(program)
        self.binding.place(program)
        return program

    def _bind_forward(self, program: Program) -> BoundGraphs:
        program = replace(program, step=self._options.step)
        self.binding.agree_on(program)
        if self.binding.program is None:
            self.binding.place(program)
        return self.binding.prepare(program)

    def _forward_options(self) -> ForwardOptions:
        """Returns the schedule, placement and device that an evaluation is compiled for."""
        rules, choices = self._options.placements or {}, self._options.choices
        names = [name for name, _ in self._model.named_parameters()]
        sharded = frozenset(name for name in names if along(placement_of(name, rules), SHARD))
        placed, labels = self.binding.program, self.ranks.mesh.labels
        return ForwardOptions(self.schedule, placed, choices, labels, sharded, self.ranks.device)

    def evaluation(self, graphs: Sequence[BoundGraphs]) -> Executable:
        """Returns the executable of microbatches that run these graphs. The rows of a sharded
        output layer are gathered for stages that read it whole."""
        executable = self.evaluations.plan(graphs, forward_order, self.ranks.local)
        shards, group = self.binding.shards, None
        if shards is not None:
            group = self.ranks.collective_group()
        if shards is None or group is None:
            return executable
        read = {name for stage in executable.program.stages for name in stage.parameters}
        with self.ranks.waiting("the rows of the output layer"):
            rows = {
                Slot("parameter", name): shards.gathered(name, group)
                for name in shards.own
                if name in read
            }
        if not rows:
            return executable
        bound = {
            part.number: replace(
                part, stages={i: rebind(s, {**s.resident, **rows}) for i, s in part.stages.items()}
            )
            for part in executable.distinct
        }
        return replace(executable, graphs=tuple(bound[part.number] for part in executable.graphs))
