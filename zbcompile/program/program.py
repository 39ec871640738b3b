"""The program: everything that the compiler decided, for all ranks, printable and hashable."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zbcompile.errors import PipelineError
from zbcompile.model.model_info import ModelFacts
from zbcompile.model.placements import PARTIAL, placement_of
from zbcompile.options import StepOptions
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.graph.fx import on_any_device
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.stage_program import StageProgram, collectives_of
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram
from zbcompile.program.output import FORWARDS, Output
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.version import __version__

# of a manifest: tensor-parallel ranks may hold parts of different sizes
OF_A_PLACE = ("graphs", "types", "cuts")


@dataclass(frozen=True)
class Program:
    """A compiled training step, or a forward alone, whose stages have only F.

    * The graphs: `stages[i]` is the program of stage i, `vocabulary` the output layer if that is
      sharded over all ranks, `cuts` the numbers of operations before each cut, `overweight` what
      keeps the loads from being even (see `overweight_of`). `groups` are this process's names of
      the process groups, by what the graphs call them.
    * The order: `lowered.orders[rank]` are the actions of a rank with their communication.
    * The model: `model` describes it, `homes` are the stages that use each parameter and buffer
      (tied ones under their first name).
    * What it is right for: `call` is the signature of a microbatch, `changed_state` the module
      state that forward changes.
    * What it returns: `output` says what of its forward, by a step besides the loss; None: nothing.
    * `ends`: with `exact=True`, the graph by stage that adds the gradients of several stages for
      one microbatch, at the end of a step.
    * What was decided: `plan` says how `schedule="auto"` chose (None for a schedule that was
      given).
    * `writer` is the function that saves it; None for a program that was loaded, which has the
      fields of its manifest file in `saved`, and the graphs of this process's ranks.
    """

    model: ModelFacts
    cuts: tuple[int, ...]
    overweight: str
    stages: tuple[StageProgram, ...]
    lowered: Schedule
    homes: Mapping[str, tuple[int, ...]]
    choices: CompileOptions
    loss_dtype: str
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    vocabulary: VocabularyProgram | None
    line_operators: tuple[str, ...] = field(repr=False)
    call: tuple[str, ...] = ()
    step: StepOptions = field(default_factory=StepOptions)
    groups: Mapping[str, str] = field(default_factory=dict, compare=False)
    output: Output | None = None
    changed_state: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    plan: str = field(default="", compare=False)
    ends: Mapping[int, PassGraph] = field(default_factory=dict, repr=False)
    writer: Callable[["Program", Path], None] | None = field(
        default=None, repr=False, compare=False
    )
    saved: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def schedule(self) -> Schedule:
        return self.lowered.compute_only()

    @property
    def exchanges(self) -> set[str]:
        """The dimensions of the mesh along which the graphs exchange tensors."""
        return {
            collective.dimension for stage in self.stages for collective in collectives_of(stage)
        }

    @cached_property
    def trains(self) -> bool:
        """True if the program is a step, not a forward alone."""
        return self.output is None or self.output.computes not in FORWARDS

    @property
    def returns(self) -> Output:
        """The outputs of the forward. Only for a program that returns something."""
        assert self.output is not None
        return self.output

    @property
    def exact(self) -> bool:
        return self.choices.exact

    @property
    def trained(self) -> frozenset[str]:
        """Every parameter that gets a gradient, tied ones under their first name."""
        sharded = () if self.vocabulary is None else self.vocabulary.parameters
        return frozenset((*sharded, *(name for stage in self.stages for name in stage.trained)))

    @cached_property
    def shared(self) -> frozenset[str]:
        """Trained parameters of several stages, or of two model copies: their gradients are summed
        over these."""
        trained = {name for stage in self.stages for name in stage.trained}
        sharded = () if self.vocabulary is None else self.vocabulary.parameters
        several = {name for name in trained if self.copies > 1 or len(self.homes[name]) > 1}
        return frozenset(several - set(sharded))

    @cached_property
    def late(self) -> frozenset[str]:
        """Trained parameters whose gradients only the step's end completes: shared ones, rows of an
        output layer."""
        return self.shared | frozenset(
            () if self.vocabulary is None else self.vocabulary.parameters
        )

    def placement(self, name: str) -> dict[str, str]:
        """Returns the placement of a parameter or buffer along each dimension of the mesh."""
        late = {
            dimension: PARTIAL
            for stage in self.stages
            for dimension in stage.deferred.get(name, ())
        }
        return placement_of(name, self.step.placements or {}) | late

    @cached_property
    def copies(self) -> int:
        """How many copies of the model the ranks hold together: 2 under DualPipe."""
        return len(set(map(self.schedule.copy_of, range(self.schedule.microbatches))))

    @cached_property
    def random_until(self) -> int:
        """The last stage that draws random numbers, or -1. Generator state is sent up to it."""
        return max((stage.stage for stage in self.stages if stage.random), default=-1)

    @property
    def device_type(self) -> str:
        """The kind of device that the program was compiled for."""
        holders = self.stages[0].pieces["F"].module.graph.find_nodes(op="placeholder")
        return str(next(node.meta["val"].device.type for node in holders))

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that runs `stage` for `microbatch`: with two model copies it depends on the
        microbatch."""
        return self.schedule.rank_of(stage, microbatch)

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold `stage`: one, or one per model copy."""
        return tuple(
            dict.fromkeys(
                (self.rank_of(stage), self.rank_of(stage, self.schedule.microbatches - 1))
            )
        )

    def holders(self, name: str) -> tuple[int, ...]:
        """Returns the ranks that hold a parameter or buffer. Rank 0 holds anything else."""
        return tuple(
            dict.fromkeys(
                rank for stage in self.homes.get(name, (0,)) for rank in self.ranks_of(stage)
            )
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self.schedule.placement.stages_of(rank)

    def save(self, directory: str | Path) -> None:
        """Writes the program to a directory that `zbcompile.load` reads (docs/programs.md). Every
        rank must call it.

        Each process writes the parts of its ranks, the first one then the manifest. The
        directory is new, or holds a program, which is replaced. The same model, options and
        versions give the same bytes. It holds no parameters: save `pipe.state_dict(full=True)` as
        well.

        Raises PipelineError, on every rank, if it cannot be written; CompileError for an operation
        that a program cannot hold.
        """
        if self.writer is None:
            raise PipelineError(
                "this program was loaded from a directory, which already holds it; copy that."
            )
        self.writer(self, Path(directory))

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The properties that must be equal on all ranks, as plain data. The entries of
        `OF_A_PLACE` must be equal only along the pipeline and among replicas."""
        if self.saved:
            return {**self.saved["compared"], "threads": torch.get_num_threads()}
        # The backward graph of each stage also has what the forward keeps.
        pieces = [stage.pieces for stage in self.stages]
        modules = [(group.get("BW") or group["F"]).module for group in pieces]
        return {
            "zbcompile": __version__,
            "torch": torch.__version__,
            "schedule": self.schedule.name,
            "ranks": self.schedule.ranks,
            "stages": self.schedule.stages,
            "microbatches": self.schedule.microbatches,
            "exact": self.exact,
            "recompute": str(self.choices.recompute),
            "accumulate_dtype": str(self.choices.accumulate_dtype),
            "threads": torch.get_num_threads(),
            "inputs": {path: list(map(str, spec)) for path, spec in self.inputs.items()},
            "cuts": list(self.cuts),
            "parameters": [list(stage.parameters) for stage in self.stages],
            "order": _digest(str(self.lowered.orders)),
            "vocabulary": self._sharding,
            "collectives": [
                [
                    f"{collective.name}: {collective.kind} along {collective.dimension}"
                    for collective in collectives_of(stage)
                ]
                for stage in self.stages
            ],
            "graphs": [_digest(module.code) for module in modules],
            "types": [_digest(_types(module)) for module in modules],
        }

    @property
    def _sharding(self) -> list[Any]:
        vocabulary = self.vocabulary
        if vocabulary is None:
            return []
        modules = [piece[name].module for piece in vocabulary.pieces for name in sorted(piece)]
        graphs = [_digest(module.code + _types(module)) for module in modules]
        bounds = list(map(list, vocabulary.bounds))
        return [vocabulary.parameters[0], vocabulary.barriers, bounds, graphs]


def _types(module: torch.fx.GraphModule) -> str:
    """Data types and shapes of all that goes into a graph; its code does not show them."""
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    return str([(str(v.dtype), tuple(v.shape)) for v in values if isinstance(v, torch.Tensor)])


def _digest(text: str) -> str:
    return hashlib.sha256(on_any_device(text).encode()).hexdigest()[:16]
