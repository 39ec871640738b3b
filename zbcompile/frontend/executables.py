"""The executables of a pipeline: its model compiled for the shapes that it meets, bound to its tensors; a few are kept.

The first one decides where every parameter lives; later ones keep to that.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zbcompile.backends.backend import Compilation, make_backend
from zbcompile.backends.compiled_passes import CompiledPasses, compile_passes
from zbcompile.backends.cuda_graphs import check_cuda_graphs
from zbcompile.compiler.compile_model import Drawn, compile_drawn, draw_step, is_drawn_as, targets_of
from zbcompile.compiler.measure_nodes import measure_line
from zbcompile.distributed.agreement import agreed_seconds, from_first, require_equal_programs, together
from zbcompile.distributed.equal_tensors import require_equal_tensors
from zbcompile.distributed.ranks import Ranks
from zbcompile.distributed.replicas import broadcast
from zbcompile.env import DEBUG_NAN
from zbcompile.errors import PipelineError
from zbcompile.frontend.answers import ByAnswers, ByShape, captured_alike
from zbcompile.frontend.choose_schedule import counts_for, is_searched
from zbcompile.frontend.options import Options
from zbcompile.frontend.recent import Recent
from zbcompile.frontend.state_dict import own_state
from zbcompile.model.batch import Batch, Microbatch
from zbcompile.model.materialize import Share
from zbcompile.model.placements import SHARD, along, require_matches
from zbcompile.model.resident_tensors import kind_of, require_same_attributes, require_same_tensors, resident_tensors
from zbcompile.passes.capture.attention_kernels import attention_kernels
from zbcompile.passes.capture.questions import Given
from zbcompile.passes.capture.unsupported import hook_problems, raise_first
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.stage.stage_program import bind_groups
from zbcompile.passes.torch_private import forward_hooks, global_hooks
from zbcompile.passes.values.plain_tensors import PlainTensor
from zbcompile.planning.planner import Decision, decide, order_by_graphs, reordered
from zbcompile.program.program import OF_A_PLACE, Program
from zbcompile.program.save import save_program
from zbcompile.runtime.data_parallel import sums_of
from zbcompile.runtime.engine import Executable, make_executable
from zbcompile.runtime.mixed_answers import mix
from zbcompile.runtime.nan_check import inspected
from zbcompile.runtime.stage_plan import prepare_stage
from zbcompile.runtime.vocabulary_collectives import Roots
from zbcompile.runtime.vocabulary_parameters import VocabularyExecutable, VocabularyShards, make_executable_shards
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.torch_private import fingerprint


class Executables:
    """What a pipeline runs, by the shapes of its microbatches. `program` is the first one's (None before), `share` this
    process's share of the model, `shards` that of an output layer that is sharded over the ranks; `compilations` say
    what the backend did for each program. `parameters` are those that the next step trains, by name: the model's, of a
    sharded output layer this rank's rows; `trained` the names of those that get a gradient in any program."""

    def __init__(self, model: nn.Module, options: Options, ranks: Ranks, schedule: Schedule) -> None:
        self.program: Program | None = None
        self.share = Share(model, ranks.device, options.init, options.seed)
        self.shards: VocabularyShards | None = None
        self._model, self._options, self._ranks, self.schedule = model, options, ranks, schedule
        self.debug_nan = options.debug_nan or DEBUG_NAN.read()
        self._backend = make_backend("fx" if self.debug_nan else options.backend, ranks.device)
        check_cuda_graphs(options.cuda_graphs, ranks.device)
        self.compilations: list[Compilation] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.trained: set[str] = set()
        self._kept: ByShape[Any, Executable] = ByShape(options.max_shapes)
        self._mixed: Recent[Any, tuple[list[Executable], Executable]] = Recent(options.max_shapes)
        self._bound: dict[Slot, tuple[torch.Tensor, str]] = {}
        self._unchanged: tuple[Any, ...] = ()
        self._plain: list[PlainTensor] = []
        self._last: ByAnswers[Executable]
        self._last_state: tuple[Any, ...] | None = None
        self._compared = False
        self._decision: Decision | None = None
        self._planned: Drawn | None = None

    def __iter__(self) -> Iterator[Executable]:
        return iter(self._kept)

    def first(self) -> Executable:
        """The one that was made first."""
        return self._kept.first()

    def adopt(self, program: Program) -> Executable:
        """Run `program`, which was compiled elsewhere."""
        self.hold(program)
        executable = self._prepare(program)
        self._last = self._kept.new()
        self._last.add(program.guards, executable)
        self._kept.add((), self._last)
        return executable

    def hold(self, program: Program) -> None:
        """Let the parameters live where `program`, the first one, has them."""
        self.program, self.trained = program, set(program.trained)
        together(self._ranks, "filling the model", lambda: self._make_real(program))

    def get(self, batch: Batch) -> Executable:
        """The executable for the microbatches of a batch, by their shapes and by their answers to what forward asks;
        compiled if there is none. Raises PipelineError and CaptureError if the model is no longer the one that was
        compiled."""
        require_same_attributes(self._plain)
        trains = self.program is not None and self.program.output is None
        if not trains and self._decision is None and is_searched(self._options):
            self._decide(batch)
        microbatch = batch.microbatch(0, self.schedule.microbatches)
        if self._last_state is None or self._state(microbatch) != self._last_state:
            self._last = self._look_up(microbatch)
            self._last_state = self._state(microbatch)
        return self._answered(self._last, batch) if self._last.asks else self._last.first()

    def _decide(self, batch: Batch) -> None:
        """Choose the layout by cost for the first batch; the first rank decides for all."""
        if self.program is not None:
            raise PipelineError(
                'schedule="auto" searches a layout for training, but an evaluation placed the parameters while nothing '
                "trained. Call pipe.compile before that evaluation, when the parameters train, or name a schedule."
            )
        with self._ranks.watch.position.turn_to("searching the layout"):
            drawn = self._first_drawn(batch)
            decision = self._decided(drawn, counts_for(self._options, batch.size, self.schedule))
            if decision.schedule.microbatches != self.schedule.microbatches:
                self.schedule, before = decision.schedule, drawn.line
                drawn = self._first_drawn(batch)
                if targets_of(drawn.line) != targets_of(before):  # other rows can take other operations: cuts move
                    decision = self._decided(drawn, ())
        self.schedule, self._decision, self._planned = decision.schedule, decision, drawn

    def _first_drawn(self, batch: Batch) -> Drawn:
        return self._drawn(batch.microbatch(0, self.schedule.microbatches), leads=True)

    def _decided(self, drawn: Drawn, counts: Sequence[int]) -> Decision:
        options, schedule = self._options, self.schedule
        settings = counts, options.chunks, options.search_seconds, self._measured(drawn)
        return from_first(
            *(self._ranks, "searching the layout"), lambda: decide(drawn, schedule, options.choices, *settings)
        )

    def _answered(self, found: ByAnswers[Executable], batch: Batch) -> Executable:
        count = self.schedule.microbatches
        microbatches = [batch.microbatch(i, count) for i in range(count)]

        def add(new: int | None) -> None:
            self._add(found, microbatches[new or 0], leads=new is not None)
            self._note_eviction(self._kept.trim(found))

        own, needed = found.find(self._ranks, [each.tensors for each in microbatches], add)
        key = tuple(own), tuple(needed)
        chosen, everywhere = [found[each] for each in own], [found[each] for each in needed]
        if all(each is chosen[0] for each in everywhere):
            return chosen[0]
        if key not in self._mixed or any(a is not b for a, b in zip(self._mixed[key][0], everywhere, strict=True)):
            self._mixed.add(key, (everywhere, mix(chosen, everywhere, found.guards[0].lines[0])))
        return self._mixed[key][1]

    def _state(self, microbatch: Microbatch) -> tuple[Any, ...]:
        """Cache key: if unchanged since the last step, reuse the last executable."""
        hooks = bool(global_hooks())
        return microbatch.signature, torch_modes(self._ranks.device), hooks, fingerprint(self._model)

    def _look_up(self, microbatch: Microbatch) -> ByAnswers[Executable]:
        key = self._key(microbatch)
        if key not in self._kept:
            found = self._kept.new()
            self._add(found, microbatch, leads=True)
            key = self._key(microbatch)  # forward may have installed hooks, as transformers' do when they first run
            self._note_eviction(self._kept.add(key, found))
        self.require_same_model()
        return self._kept[key]

    def require_same_model(self) -> None:
        """Raise PipelineError or CaptureError if the model has other tensors than those that were bound, or hooks that
        a stage would lose."""
        now = tuple(fingerprint(self._model)), tuple(global_hooks())
        if now != self._unchanged:
            require_same_tensors(self._model, self._bound)
            raise_first(hook_problems(self._model))
            self._unchanged = now

    @contextmanager
    def void_if_it_fails(self) -> Iterator[None]:
        """If a step fails, drop its partial sums: an optimizer that steps nevertheless finds no gradients."""
        try:
            yield
        except BaseException:
            for parameter in (*self._model.parameters(), *self.parameters.values()):
                parameter.grad = None
            self._ranks.replicas.forget()
            for executable in self:
                executable.buffers.made.clear()  # a message may still arrive in them
            raise

    def _add(self, found: ByAnswers[Executable], microbatch: Microbatch, leads: bool) -> None:
        """Compile for a microbatch whose answers are new, on all ranks; only some of them may have met it (`leads`)."""
        with self._ranks.watch.position.turn_to(f"compiling for microbatches of {microbatch.summary()}"):
            drawn, self._planned = self._planned or self._drawn(microbatch, leads), None
            guards = drawn.captured.guards
            self._plain += drawn.captured.plain
            reason = guards.unlike(found.guards) if guards is not None and found.asks else ""
            same = next((each for each in found if is_drawn_as(each.program, drawn)), None)
            executable = same or self._compile(microbatch, drawn, reason)
            self._note_eviction(found.add(guards, executable, executable.program.exchanges))

    def _note_eviction(self, dropped: bool) -> None:
        if dropped:
            self._mixed = Recent(self._options.max_shapes)  # they hold what was evicted
        if dropped and self._ranks.is_first:
            print(f"zbcompile: evicted the least recently used program; max_shapes={self._options.max_shapes}.")

    def is_own(self, name: str) -> bool:
        """Whether a parameter or buffer lives in this process."""
        assert self.program is not None
        return bool(set(self.program.holders(name)) & set(self._ranks.local))

    def require_equal_shares(self) -> None:
        """Raise PipelineError, on every rank, if ranks start with different values of what they share: parameters and
        buffers of several stages or model copies, and along the dimensions of the mesh all that is not sharded there.
        Compares once."""
        program, ranks = self.program, self._ranks
        if self._compared or ranks.group is None or program is None:
            return
        rows = self.shards.own if self.shards else {}
        held = {slot.name: tensor for slot, (tensor, _) in self._bound.items() if slot.name not in rows}
        shared = {self._title(name): t for name, t in held.items() if self.is_own(name) and self._is_shared(name)}
        if ranks.mesh.beside("pp"):
            shared |= {f"{name} (the rows of pipeline rank {ranks.rank})": t for name, t in rows.items()}
        require_equal_tensors(ranks, shared)
        self._compared = True

    def _is_shared(self, name: str) -> bool:
        assert self.program is not None
        return bool(self._ranks.mesh.beside("pp")) or len(self.program.holders(name)) > 1

    def _title(self, name: str) -> str:
        """The name, with the ranks that hold this part of it."""
        assert self.program is not None
        mesh = self._ranks.mesh
        parts = [f"{each} rank {mesh.index(each)}" for each in along(self.program.placement(name), SHARD)]
        return f"{name} (the part of {', '.join(parts)})" if parts else name

    def _key(self, microbatch: Microbatch) -> tuple[Any, ...]:
        """The key of a captured graph: shapes, autocast, train or eval and forward hooks of each module, frozen
        parameters."""
        modules = tuple((module.training, forward_hooks(module)) for module in self._model.modules())
        trains = tuple(parameter.requires_grad for parameter in self._model.parameters())
        return microbatch.signature, modules, trains, torch_modes(self._ranks.device)

    def _compile(self, microbatch: Microbatch, drawn: Drawn, reason: str) -> Executable:
        if self.program is not None and self._ranks.is_first:
            print(
                f"zbcompile: compiling again for {reason or f'microbatches of {microbatch.summary()}'} (program "
                f"{len(list(self)) + 1}; max_shapes={self._options.max_shapes} are kept)."
            )
        program = self._make_program(microbatch, drawn)
        require_equal_programs(self._ranks, {**program.manifest, **vars(self._options.step)}, of_a_place=OF_A_PLACE)
        if self.program is None:
            self.hold(program)
            require_matches(program.step.placements or {}, program.homes)
            self.copy_first_replica(program)
        elif self.program.output is not None:
            self.program = program  # an evaluation placed the parameters; from now on they train
        self.trained |= program.trained
        return self._prepare(program)

    def copy_first_replica(self, program: Program) -> None:
        """Replicas begin with the same parameters and buffers, as under DistributedDataParallel."""
        with self._ranks.watch.position.waiting("the first replica's parameters"):
            share = own_state(self._model, self._ranks, program.holders)
            tensors = {**share, **(self.shards.own if self.shards else {})}.values()
            real = [value for value in tensors if isinstance(value, torch.Tensor) and not value.is_meta]
            broadcast(real, self._ranks.mesh.group("dp"))

    def _make_real(self, program: Program) -> None:
        """Give this process's share of the model memory and values: of a sharded output layer only its rows."""
        rank = self._ranks.rank
        sharded = () if program.vocabulary is None else program.vocabulary.parameters
        in_rows = set(sharded) - set(program.tied) if rank is not None else set()
        self.share.make_real(lambda name: self.is_own(name) and name not in in_rows)
        if program.vocabulary is not None:
            whole = dict(self._model.named_parameters())
            bounds, device = program.vocabulary.bounds, self._ranks.device
            self.shards = VocabularyShards(bounds, {name: whole[name] for name in sharded}, rank, device)
            self.shards.fill(self.share)

    def _drawn(self, microbatch: Microbatch, leads: bool) -> Drawn:
        """The captured step, with the same answers on all ranks."""

        def draw(given: Given | None) -> Drawn:
            step = self._model, microbatch, self._options.loss, self._choices(), self.schedule
            return draw_step(*step, dimensions=self._ranks.mesh.labels, given=given)

        return captured_alike(self._ranks, "capturing", draw, lambda drawn: drawn.captured.guards, leads)

    def _make_program(self, microbatch: Microbatch, drawn: Drawn) -> Program:
        model, options, schedule, ranks = self._model, self._options, self.schedule, self._ranks
        seconds = self._measured(drawn)

        decided = None if self.program else self._decision
        choices = self._decision.choices if self._decision else options.choices
        edges = decided.edges if decided else None

        def compile_() -> Program:
            return compile_drawn(model, microbatch, drawn, schedule, choices, seconds, self.program, edges=edges)

        program = replace(together(ranks, "compiling", compile_), step=options.step)
        if decided is not None:
            program = self._in_best_order(program, decided)
        program = replace(program, writer=partial(save_program, ranks=ranks))
        if ranks.is_first and self.program is None and program.cuts.overweight:
            print(f"zbcompile: {program.cuts.overweight}")
        return program

    def _in_best_order(self, program: Program, decided: Decision) -> Program:
        """The program with the order that is best for its graphs, as the first rank measures them."""
        budget, ranks = self._options.search_seconds, self._ranks
        found = from_first(
            ranks, "searching the order", lambda: order_by_graphs(program, decided, budget, measure=True)
        )
        program = reordered(program, *found)
        self.schedule = program.schedule
        if ranks.is_first:
            print(f"zbcompile: {program.plan}")
        return program

    def _choices(self) -> Choices:
        """Later programs reuse the first one's sharding decision, because row ownership is already fixed."""
        choices = self._decision.choices if self._decision else self._options.choices
        if self.program is None or (choices.vocab != "auto" and self.program.output is None):
            return choices
        return replace(choices, vocab="off" if self.program.vocabulary is None else 1)

    def _measured(self, drawn: Drawn) -> dict[str, float]:
        """The times by which the model is cut, the same on all ranks."""
        if self._options.choices.balance != "measured" or self.program is not None:
            return {}
        return agreed_seconds(self._ranks, together(self._ranks, "measuring", lambda: measure_line(drawn.line)))

    def _prepare(self, program: Program) -> Executable:
        self.parameters = {**dict(self._model.named_parameters()), **(self.shards.own if self.shards else {})}
        sums = {} if self._ranks.rank is None else sums_of(program, self._ranks.mesh, self._ranks.rank)
        return replace(self.prepare(program), sums=sums)

    def prepare(self, program: Program) -> Executable:
        """Compile the graphs of `program`, a step or a forward alone, and bind them to the model's tensors."""
        resident = resident_tensors(self._model, program.model.constants)
        self._bound = {s: (t, kind_of(t)) for s, t in resident.items() if s.kind != "constant"} | self._bound
        own = sorted({stage for rank in self._ranks.local for stage in program.stages_of(rank)})
        device, until = self._ranks.device, program.random_until
        bound = replace(program, stages=tuple(bind_groups(each, program.groups) for each in program.stages))
        passes = self._compile_passes(bound)
        stages = {i: prepare_stage(bound.stages[i], resident, device, until, passes.of("stage", i)) for i in own}
        if self.debug_nan:
            stages = {i: inspected(stage) for i, stage in stages.items()}
        vocabulary = self._prepare_vocabulary(program, resident, passes)
        self._ranks.watch_over(program.groups.values())
        return make_executable(program, stages, self._ranks.local, device, vocabulary)

    def _compile_passes(self, program: Program) -> CompiledPasses:
        ranks, backend = self._ranks, self._backend
        graphs = self._options.cuda_graphs and not self.debug_nan and program.output is None

        def compile_() -> CompiledPasses:
            return compile_passes(program, ranks.local, backend, graphs)

        passes = compile_() if backend.compiler is None else together(ranks, f"compiling with {backend.name}", compile_)
        self.compilations.append(passes.compilation)
        if passes.compilation.compiled and ranks.is_first:
            print(f"zbcompile: {passes.compilation}.")
        return passes

    def _prepare_vocabulary(
        self, program: Program, resident: Mapping[Slot, torch.Tensor], passes: CompiledPasses
    ) -> VocabularyExecutable | None:
        """The shards of the output layer; shapes that are compiled later use the same rows."""
        if program.vocabulary is None or self.shards is None:
            return None
        group, device = self._ranks.collective_group(), self._ranks.device
        roots = Roots(program.rank_of(0), program.rank_of(program.schedule.stages - 1))
        return make_executable_shards(program.vocabulary, self.shards, roots, resident, device, group, passes)


def torch_modes(device: torch.device) -> Hashable:
    """The torch modes that capture freezes into the graphs: autocast, and the kernels that attention may take."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type), attention_kernels()
