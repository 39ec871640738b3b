"""Programs bound to the tensors of a model: which of these live here, and what runs on them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zbcompile.backends.backend import Compilation, CompiledPasses, compile_passes, make_backend
from zbcompile.backends.cuda_graphs import check_cuda_graphs
from zbcompile.distributed.agreement import agree, gathered, together
from zbcompile.distributed.equal_tensors import require_equal_tensors
from zbcompile.distributed.mesh import broadcast
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.executable import BoundGraphs
from zbcompile.engine.replicas import sums_of
from zbcompile.engine.stage import prepare_stage
from zbcompile.engine.vocabulary import EndRanks
from zbcompile.engine.vocabulary_parameters import (
    VocabularyExecutable,
    VocabularyShards,
    make_executable_shards,
)
from zbcompile.env import DEBUG_NAN
from zbcompile.errors import PipelineError
from zbcompile.model.held_elsewhere import (
    is_held_elsewhere,
    refuse_merging,
    release,
    state_in_process,
    withhold,
)
from zbcompile.model.materialize import Share
from zbcompile.model.model_info import first_names
from zbcompile.model.placements import SHARD, along, require_matches
from zbcompile.model.resident_tensors import kind_of, require_same_tensors, resident_tensors
from zbcompile.options import PipelineOptions
from zbcompile.passes.capture.model_checks import check_hooks
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.stage.stage_program import bind_groups
from zbcompile.passes.torch_private import accumulators, function_modes, global_hooks, hook_tables
from zbcompile.profiling.pass_checks import inspected
from zbcompile.program.program import OF_A_PLACE, Program
from zbcompile.program_cache.state_dict import stream_state
from zbcompile.torch_private import fingerprint


class BoundPrograms:
    """The tensors of a model, and the programs that are bound to them.

    * `program` is the first of the programs (None before), `compilations` say what the backend did
      for each.
    * `share` is this process's share of the model, `shards` that of an output layer that is sharded
      over the ranks.
    * `parameters` are those that the next step trains, by name: the model's, and of a sharded
      output layer this rank's rows. `trained` are the names of those that get a gradient in any
      program.
    """

    def __init__(self, model: nn.Module, options: PipelineOptions, ranks: Ranks) -> None:
        self.program: Program | None = None
        self.share = Share(model, ranks.device, options.init, options.seed)
        self.shards: VocabularyShards | None = None
        self._model, self._options, self.ranks = model, options, ranks
        self.debug_nan = options.debug_nan or DEBUG_NAN.read()
        self._backend = make_backend("fx" if self.debug_nan else options.backend, ranks.device)
        check_cuda_graphs(options.cuda_graphs, ranks.device)
        self.compilations: list[Compilation] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.trained: set[str] = set()
        self._bound: dict[Slot, tuple[torch.Tensor, str]] = {}
        self._unchanged: tuple[Any, ...] = ()
        self._accumulators: list[Any] = []
        self.compared = False
        self._saved: dict[
            str, torch.Tensor
        ] = {}  # what a state dict holds; what of it lives here, and has old values
        self._own: dict[str, torch.Tensor] = {}
        self._others: dict[str, torch.Tensor] = {}
        self._withheld_for: Program | None = None
        # how often parameters have moved; whether somebody has taken them
        self.moves, self.given_out = (
            0,
            False,
        )

    @property
    def trains(self) -> bool:
        """Whether a step has been compiled; before, `program` is an evaluation that placed the
        parameters, or None."""
        return self.program is not None and self.program.trains

    def hold(self, program: Program) -> None:
        """Let the parameters live where `program`, the first one, has them."""
        self.program, self.trained = program, set(program.trained)
        together(self.ranks, "filling the model", lambda: self._make_real(program))
        self.parameters = {
            **dict(self._model.named_parameters()),
            **(self.shards.own if self.shards else {}),
        }
        saved = {member.name for member in program.model.members if member.saved}
        tensors = (*self._model.named_parameters(), *self._model.named_buffers())
        self._saved = {name: tensor for name, tensor in tensors if name in saved}
        elsewhere = self.shards.own if self.shards else {}
        self._own = {
            n: tensor for n, tensor in self._saved.items() if self.is_own(n) and n not in elsewhere
        }

    def place(self, program: Program) -> None:
        """`hold` the first program, and give all replicas the values of the first one. Raises
        PipelineError for a pattern of `placements=` that fits no parameter or buffer."""
        self.hold(program)
        require_matches(program.step.placements or {}, program.homes)
        self._copy_first_replica()

    def move(self, program: Program) -> None:
        """Let the parameters live where `program`, a step, has them, and no longer where an
        evaluation placed them.

        Raises PipelineError, on every rank, if somebody has taken them from there, such as an
        optimizer.
        """
        before, rows, ranks = self.program, self.shards, self.ranks
        assert before is not None
        together(ranks, "moving the parameters", self._require_not_taken)
        empty = set[str]().union(*gathered(ranks, self.share.unfilled))
        far = sum(before.holders(name) != program.holders(name) for name in program.homes)
        if ranks.is_first:
            print(
                "zbcompile: the step is cut elsewhere than the evaluation that placed the"
                f" parameters: {far} tensors move to other ranks, and evaluations are compiled"
                " again."
            )
        self.moves, self.shards, self._bound, self._others = self.moves + 1, None, {}, {}
        self.hold(program)
        if ranks.group is None:
            return
        self._take_over(stream_state(self._model, ranks, before.holders, rows))
        self.share.filled(self._saved.keys() - empty)

    def _take_over(self, state: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy this process's share out of a stream of whole tensors."""
        whole, rows = dict[str, torch.Tensor](), self.shards.own if self.shards else {}
        for name, value in state:
            if name in self._own:
                self._own[name].detach().copy_(value)
            if name in rows:
                whole[name] = value
        if self.shards is not None:
            self.shards.load(whole)

    def _require_not_taken(self) -> None:
        if self.given_out and self.ranks.group is not None:
            raise PipelineError(
                "the step needs another cut than the evaluation that placed the parameters, and"
                " pipe.parameters() was called in between: what it gave would not train. Call"
                " pipe.compile with a batch of a step first."
            )

    def require_same_model(self) -> None:
        """Raise PipelineError or CaptureError for other tensors than were bound, or hooks that a
        stage would lose."""
        now = self.form
        if now != self._unchanged:
            require_same_tensors(self._model, self._bound)
            check_hooks(self._model)
            self._accumulators = accumulators(
                self._model.parameters()
            )  # kept: hooks that come later are theirs
            self._unchanged = now

    def agree_on(self, program: Program, asked: Mapping[str, object] | None = None) -> None:
        """Raise PipelineError, on every rank, unless all have compiled the same, and were `asked`
        for the same."""
        terms = {**(asked or {}), "debug_nan": self.debug_nan, **program.manifest}
        remedy = (
            "Every rank must build the same model, use the same versions and switches, and pass the"
            " same batch "
        )
        remedy += "shapes and options."
        agree(self.ranks, terms, "compiled different programs", remedy, of_a_place=OF_A_PLACE)

    @property
    def form(self) -> tuple[Any, ...]:
        """What bound programs assume about the model, compared in every step."""
        return (
            fingerprint(self._model),
            global_hooks(),
            function_modes(),
            hook_tables(self._accumulators),
        )

    def is_own(self, name: str) -> bool:
        """Whether a parameter or buffer lives in this process."""
        assert self.program is not None
        return bool(set(self.program.holders(name)) & set(self.ranks.local))

    @property
    def own_names(self) -> list[str]:
        """The parameters of this process in eager's order, tied ones once under their first
        name."""
        return [name for name, _ in self._model.named_parameters() if self.is_own(name)]

    def own_state(self) -> dict[str, Any]:
        """The part of eager's state dict whose tensors live in this process, tied parameters under
        every name."""
        names = first_names(self._model)
        return {
            key: value
            for key, value in state_in_process(self._model).items()
            if self.is_own(names.get(key, key))
        }

    def withhold(self, program: Program | None = None) -> None:
        """Let the model refuse to show what other ranks have newer values of
        (`zbcompile.model.held_elsewhere`): what a step of `program` trains or writes; without one
        all of it, since it was loaded."""
        if self.ranks.group is None or self.ranks.count == 1:
            return
        if program is None or program is not self._withheld_for:
            self._withheld_for = program
            changed = (
                [n for each in program.stages if each.pieces for n in each.changed]
                if program
                else []
            )
            newer = self._saved if program is None else {*program.trained, *changed}
            self._others |= {
                name: self._saved[name]
                for name in newer
                if name in self._saved and name not in self._own
            }
            refuse_merging(self._model)
        assert self.program is not None
        for name, tensor in self._others.items():
            if not is_held_elsewhere(tensor):
                withhold(tensor, name, self.program.holders(name))

    def require_values(self) -> None:
        """Raise PipelineError unless this process's share has its values, and the same as other
        ranks that share it."""
        self.share.require_filled()
        for name, tensor in self._own.items():
            if is_held_elsewhere(tensor):
                raise PipelineError(
                    f"{name} is on rank {self.ranks.rank} in this pipeline, and another pipeline of"
                    " the same module has trained or loaded it on another rank, so the values here"
                    " are old. Give both the same cut (balance=), or each a module of its own."
                )
        self._require_equal_shares()

    def _require_equal_shares(self) -> None:
        """Raise PipelineError, on every rank, if ranks start with different values of what they
        share: parameters and buffers of several stages or model copies, and along the dimensions of
        the mesh all that is not sharded there. Compares once."""
        program, ranks = self.program, self.ranks
        if self.compared or ranks.group is None or program is None:
            return
        rows = self.shards.own if self.shards else {}
        bound = {
            slot.name: tensor for slot, (tensor, _) in self._bound.items() if slot.name not in rows
        }
        shared = {
            self._title(name): t
            for name, t in bound.items()
            if self.is_own(name) and self._is_shared(name)
        }
        if ranks.mesh.beside("pp"):
            shared |= {
                f"{name} (the rows of pipeline rank {ranks.rank})": t for name, t in rows.items()
            }
        require_equal_tensors(ranks, shared)
        self.compared = True

    def _is_shared(self, name: str) -> bool:
        assert self.program is not None
        return bool(self.ranks.mesh.beside("pp")) or len(self.program.holders(name)) > 1

    def _title(self, name: str) -> str:
        """The name, with the ranks that hold this part of it."""
        assert self.program is not None
        mesh = self.ranks.mesh
        parts = [
            f"{each} rank {mesh.index(each)}" for each in along(self.program.placement(name), SHARD)
        ]
        return f"{name} (the part of {', '.join(parts)})" if parts else name

    def _copy_first_replica(self) -> None:
        """Replicas begin with the same parameters and buffers, as under DistributedDataParallel."""
        with self.ranks.watch.position.waiting("the first replica's parameters"):
            tensors = {**self.own_state(), **(self.shards.own if self.shards else {})}
            real = [
                value
                for value in tensors.values()
                if isinstance(value, torch.Tensor) and not value.is_meta
            ]
            broadcast(real, self.ranks.mesh.group("dp"))

    def _make_real(self, program: Program) -> None:
        """Give this process's share of the model memory and values: of a sharded output layer only
        its rows."""
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if self.is_own(name) and is_held_elsewhere(
                tensor
            ):  # another pipeline trained it on another rank
                self.share.unfilled.add(name)
                release(tensor)
        rank = self.ranks.rank
        sharded = () if program.vocabulary is None else program.vocabulary.parameters
        in_rows = set(sharded) if rank is not None else set()
        self.share.make_real(lambda name: self.is_own(name) and name not in in_rows)
        if program.vocabulary is not None:
            whole = dict(self._model.named_parameters())
            bounds, device = program.vocabulary.bounds, self.ranks.device
            self.shards = VocabularyShards(
                bounds, {name: whole[name] for name in sharded}, rank, device
            )
            self.shards.fill(self.share)

    def prepare_step(self, program: Program) -> BoundGraphs:
        """As `prepare`, with the sums of its gradients over other ranks."""
        sums = {} if self.ranks.rank is None else sums_of(program, self.ranks.mesh, self.ranks.rank)
        return replace(self.prepare(program), sums=sums)

    def prepare(self, program: Program) -> BoundGraphs:
        """Compile the graphs of `program`, a step or a forward alone, and bind them to the model's
        tensors."""
        resident = resident_tensors(self._model, program.model.constants)
        self._bound = {
            s: (t, kind_of(t)) for s, t in resident.items() if s.role != "constant"
        } | self._bound
        own = sorted({stage for rank in self.ranks.local for stage in program.stages_of(rank)})
        device, until = self.ranks.device, program.random_until
        bound = replace(
            program, stages=tuple(bind_groups(each, program.groups) for each in program.stages)
        )
        passes = self._compile_passes(bound)
        stages = {
            i: prepare_stage(bound.stages[i], resident, device, until, passes.of("stage", i))
            for i in own
        }
        if self.debug_nan:
            stages = {i: inspected(stage) for i, stage in stages.items()}
        vocabulary = self._prepare_vocabulary(program, resident, passes)
        self.ranks.watch_over(program.groups.values())
        number = len(self.compilations) - 1
        return BoundGraphs(program, stages, vocabulary, number=number)

    def _compile_passes(self, program: Program) -> CompiledPasses:
        ranks, backend = self.ranks, self._backend
        graphs = self._options.cuda_graphs and not self.debug_nan and program.trains

        def compile_() -> CompiledPasses:
            return compile_passes(program, ranks.local, backend, graphs)

        passes = (
            compile_()
            if backend.compiler is None
            else together(ranks, f"compiling with {backend.name}", compile_)
        )
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
        last = program.schedule.stages - 1
        ends = EndRanks(program.rank_of(0), program.rank_of(last), last)
        group = self.ranks.collective_group()
        return make_executable_shards(
            program.vocabulary, self.shards, ends, resident, group, passes
        )
