"""The tensors of a model that live in this process, and programs bound to them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from zbcompile.backends.backend import (
    Compilation,
    CompiledPasses,
    Owner,
    compile_passes,
    make_backend,
)
from zbcompile.backends.cuda_graphs import check_cuda_graphs
from zbcompile.backends.types import Run
from zbcompile.distributed.agreement import agree, together
from zbcompile.distributed.equal_tensors import require_equal_tensors
from zbcompile.distributed.mesh import broadcast
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.executable import BoundGraphs
from zbcompile.engine.replicas import sums_of
from zbcompile.engine.stage import prepare_stage
from zbcompile.engine.vocabulary_parameters import (
    VocabularyExecutable,
    VocabularyShards,
    make_executable_shards,
)
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import Parts
from zbcompile.model.materialize import Share
from zbcompile.model.model_info import first_names
from zbcompile.model.module_tensors import (
    kind_of,
    local_state_dict,
    move_to_meta,
    refuse_state_dict,
    require_same_tensors,
    resident_tensors,
)
from zbcompile.model.placements import SHARD, along, require_matches
from zbcompile.options import PipelineOptions
from zbcompile.passes.capture.model_checks import lost_hooks, refuse
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.stage.stage_program import bind_groups
from zbcompile.passes.torch_private_hooks import (
    accumulators,
    function_modes,
    global_hooks,
    hook_tables,
)
from zbcompile.profiling.pass_checks import inspected
from zbcompile.program.program import OF_A_PLACE, Program
from zbcompile.program_cache.warm_up import warm_up
from zbcompile.schedules.ir.actions import flatten
from zbcompile.torch_private import before_clipping, fingerprint

PARTIAL_NORM = "zbcompile_norm_is_partial"  # an attribute of parameters


class ModelBinding:
    """The tensors of a model. Each process keeps those of its stages.

    * `program` is the one that placed the parameters (None before), and from the first training
      step on that step; `compilations` say what the backend did for each program.
    * `share` is this process's share of the model, `shards` that of an output layer that is sharded
      over the ranks.
    * `parts` are the DTensors of the model, whose local tensors train in their place.
    * `parameters` are the model's by name, and this rank's rows of a sharded output layer.
      `trained` are the names of those that get a gradient in any program.
    """

    def __init__(
        self, model: nn.Module, parts: Parts, options: PipelineOptions, ranks: Ranks
    ) -> None:
        self.program: Program | None = None
        self.share = Share(model, ranks.device, options.init, options.seed)
        self.shards: VocabularyShards | None = None
        self.model, self.parts, self._options, self.ranks = model, parts, options, ranks
        self.debug_nan = options.debug_nan
        self._backend = make_backend("fx" if self.debug_nan else options.backend, ranks.device)
        check_cuda_graphs(options.cuda_graphs, ranks.device)
        self.compilations: list[Compilation] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.trained: set[str] = set()
        self._bound: dict[Slot, tuple[torch.Tensor, str]] = {}
        self.checked_state: tuple[Any, ...] = ()
        self._accumulators: list[Any] = []
        self.compared = False
        self._partial: list[torch.Tensor] = []  # parameters that torch's clipping refuses

    @property
    def trains(self) -> bool:
        """True once a step has been compiled. Before, an evaluation may have placed the
        parameters."""
        return self.program is not None and self.program.trains

    def place(self, program: Program) -> None:
        """Keeps the parameters where the first program has them, with the values of the first
        replica. Tensors of other ranks move to the meta device.

        Raises PipelineError for a pattern of `placements=` that fits no parameter or buffer.
        """
        self.program, self.trained = program, set(program.trained)
        together(self.ranks, "filling the model", lambda: self._fill(program))
        if self.ranks.group is not None and self.ranks.count > 1:
            self._move_remote()
        rows = self.shards.own if self.shards else {}
        self.parameters = {**dict(self.model.named_parameters()), **rows}
        require_matches(program.step.placements or {}, program.homes)
        with self.ranks.waiting("the first replica's parameters"):
            tensors = [*self.local_state().values(), *rows.values()]
            real = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_meta]
            broadcast(real, self.ranks.mesh.group("dp"))
        self.parts.renew()
        self._partial = self._partial_parameters()
        before_clipping(_refuse_partial_norm)
        for parameter in self._partial:
            setattr(parameter, PARTIAL_NORM, True)

    def close(self) -> None:
        """Lets torch's clipping accept the parameters again."""
        for parameter in self._partial:
            vars(parameter).pop(PARTIAL_NORM, None)

    def _partial_parameters(self) -> list[torch.Tensor]:
        """Returns the parameters whose norm is a part of the model's, also as DTensors: all if
        there are several pipeline ranks, else those that are sharded."""
        ranks, program, wholes = self.ranks, self.program, self.parts.parameters
        if ranks.group is None or program is None:
            return []
        parameters: list[torch.Tensor] = []
        for name, parameter in self.parameters.items():
            if ranks.count > 1 or ranks.mesh.size(*along(program.placement(name), SHARD)) > 1:
                parameters.append(parameter)
            if ranks.count > 1 and name in wholes:
                parameters.append(wholes[name])
        return parameters

    def _fill(self, program: Program) -> None:
        """Gives this process's share of the model memory and values. Of a sharded output layer each
        rank has its rows alone."""
        rank = self.ranks.rank
        sharded = () if program.vocabulary is None else program.vocabulary.parameters
        in_rows = set(sharded) if rank is not None else set()
        self.share.make_real(lambda name: self.is_local(name) and name not in in_rows)
        if program.vocabulary is not None:
            parameters = dict(self.model.named_parameters())
            full = {name: parameters[name] for name in sharded}
            bounds = program.vocabulary.bounds
            self.shards = VocabularyShards(bounds, full, rank, self.ranks.device)
            self.shards.fill(self.share)

    def _move_remote(self) -> None:
        """Moves tensors of other ranks, and those divided into rows, to the meta device."""
        rows = self.shards.own if self.shards else {}
        move_to_meta(self.model, lambda name: name in rows or not self.is_local(name))
        parameters = dict(self.model.named_parameters())
        if self.shards is not None:
            self.shards.whole = {name: parameters[name] for name in self.shards.whole}
        assert self.program is not None
        stages = sorted(
            stage for rank in self.ranks.local for stage in self.program.stages_of(rank)
        )
        title = f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"
        refuse_state_dict(self.model, f"the parameters and buffers of {title} alone")

    def train_with(self, program: Program) -> None:
        """Trains the parameters, which an evaluation has placed, as this step does."""
        self.program = program
        for name, rows in self.shards.own.items() if self.shards else ():
            rows.requires_grad_(name in program.trained)

    def require_same_model(self) -> None:
        """Raises PipelineError or CaptureError for other tensors than were bound, or hooks that a
        stage would lose. Every step calls it; `checked_state` is then what programs assume about
        the model."""
        hooks = hook_tables(self._accumulators)
        state = fingerprint(self.model), global_hooks(), function_modes(), hooks
        if state != self.checked_state:
            require_same_tensors(self.model, self._bound)
            refuse(lost_hooks(self.model))
            # kept, because hooks that are registered later are theirs
            self._accumulators = accumulators(self.model.parameters())
            self.checked_state = state

    def agree_on(self, program: Program, requested: Mapping[str, object] | None = None) -> None:
        """Raises PipelineError, on every rank, unless all have compiled the same program for the
        same request."""
        terms = {
            **self.ranks.terms,
            **(requested or {}),
            "debug_nan": self.debug_nan,
            **program.manifest,
        }
        remedy = (
            "Every rank must build the same model, use the same versions and switches, and pass the"
            " same batch shapes and options."
        )
        what = "compiled different programs"
        agree(self.ranks, terms, what, remedy, of_a_place=OF_A_PLACE)

    def is_local(self, name: str) -> bool:
        """Returns True for a parameter or buffer of this process."""
        assert self.program is not None
        return bool(set(self.program.holders(name)) & set(self.ranks.local))

    @property
    def local_names(self) -> list[str]:
        """The parameters of this process in eager's order, tied ones once under their first
        name."""
        return [name for name, _ in self.model.named_parameters() if self.is_local(name)]

    def local_state(self) -> dict[str, Any]:
        """Returns the part of eager's state dict whose tensors are in this process, tied parameters
        under every name."""
        names, state = first_names(self.model), local_state_dict(self.model)
        return {key: value for key, value in state.items() if self.is_local(names.get(key, key))}

    def require_values(self) -> None:
        """Raises PipelineError unless this process's share has the values that other ranks have.

        Compared once are parameters and buffers of several stages or model copies, and along the
        dimensions of the mesh all that is not sharded there.
        """
        program, ranks = self.program, self.ranks
        if self.compared or program is None:
            return
        self.share.require_filled()
        rows = self.shards.own if self.shards else {}
        shared = {
            self._title(slot.name): tensor
            for slot, (tensor, _) in self._bound.items()
            if slot.name not in rows
            and self.is_local(slot.name)
            and (ranks.mesh.beside("pp") or len(program.holders(slot.name)) > 1)
        }
        if ranks.mesh.beside("pp"):
            place = f"the rows of pipeline rank {ranks.rank}"
            shared |= {f"{name} ({place})": tensor for name, tensor in rows.items()}
        if ranks.group is not None:
            require_equal_tensors(ranks, shared)
        self.compared = True

    def _title(self, name: str) -> str:
        """Returns the name, with the ranks that hold this part of the tensor."""
        assert self.program is not None
        dimensions = along(self.program.placement(name), SHARD)
        parts = [f"{label} rank {self.ranks.mesh.index(label)}" for label in dimensions]
        return f"{name} (the part of {', '.join(parts)})" if parts else name

    def prepare(self, program: Program) -> BoundGraphs:
        """Compiles the graphs of a step or a forward with the backend, and binds them to the
        model's tensors."""
        resident = resident_tensors(self.model, program.model.constants)
        tensors = {s: (t, kind_of(t)) for s, t in resident.items() if s.role != "constant"}
        self._bound = tensors | self._bound
        local = sorted({stage for rank in self.ranks.local for stage in program.stages_of(rank)})
        device, until = self.ranks.device, program.random_until
        stages = tuple(bind_groups(stage, program.groups) for stage in program.stages)
        runs = self._compile_passes(replace(program, stages=stages))
        compiled = {
            i: prepare_stage(stages[i], resident, device, until, runs.get(("stage", i)))
            for i in local
        }
        if self.debug_nan:
            compiled = {i: inspected(stage) for i, stage in compiled.items()}
        vocabulary = self._prepare_vocabulary(program, resident, runs)
        self.ranks.watch_over(program.groups.values())
        if self._options.warm_up and not (self.debug_nan or self._options.cuda_graphs):
            orders = [program.lowered.orders[rank] for rank in self.ranks.local]
            shards = vocabulary.shards.values() if vocabulary is not None else ()
            passes = {(action.op, action.stage) for order in orders for action in flatten(order)}
            warm_up(chain(compiled.values(), *(shard.values() for shard in shards)), passes)
        mesh, rank = self.ranks.mesh, self.ranks.rank
        sums = {} if rank is None or not program.trains else sums_of(program, mesh, rank)
        return BoundGraphs(program, compiled, vocabulary, sums, number=len(self.compilations) - 1)

    def _compile_passes(self, program: Program) -> Mapping[Owner, Mapping[str, Run]]:
        ranks, backend = self.ranks, self._backend
        graphs = self._options.cuda_graphs and not self.debug_nan and program.trains

        def compile_() -> CompiledPasses:
            return compile_passes(program, ranks.local, backend, graphs)

        if backend.compiler is None:
            runs, compilation = compile_()
        else:
            runs, compilation = together(ranks, f"compiling with {backend.name}", compile_)
        self.compilations.append(compilation)
        if compilation.compiled and ranks.is_first:
            print(f"zbcompile: {compilation}.")
        return runs

    def _prepare_vocabulary(
        self,
        program: Program,
        resident: Mapping[Slot, torch.Tensor],
        runs: Mapping[Owner, Mapping[str, Run]],
    ) -> VocabularyExecutable | None:
        """The shards of the output layer; shapes that are compiled later use the same rows."""
        if program.vocabulary is None or self.shards is None:
            return None
        group = self.ranks.collective_group()
        return make_executable_shards(program, self.shards, resident, group, runs)


def _refuse_partial_norm(parameters: Sequence[torch.Tensor]) -> None:
    """Raises PipelineError for torch's `clip_grad_norm_` where other processes have gradients of
    the model too: it would clip by the norm of this process alone."""
    if any(hasattr(parameter, PARTIAL_NORM) for parameter in parameters):
        raise PipelineError(
            "torch's clip_grad_norm_ would clip by the norm of the gradients in this process, which"
            " differs from rank to rank. Call pipe.clip_grad_norm_(max_norm) on every rank, or pass"
            " clip= to pipe.optimizer."
        )
