"""The input of a step, and what its microbatches run in this process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from zbcompile.engine.gradients import Gradients
from zbcompile.engine.optimizer_parameters import OptimizerParameters
from zbcompile.engine.rank import RankProgram, plan_rank
from zbcompile.engine.replicas import Sum, SumPlan, plan_sums
from zbcompile.engine.stage import CompiledStage
from zbcompile.engine.step_agreement import StepAgreement
from zbcompile.engine.vocabulary_parameters import VocabularyExecutable
from zbcompile.errors import PipelineError
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_names import dtype_named
from zbcompile.profiling.observation import Observation
from zbcompile.program.output import Output
from zbcompile.program.program import Program
from zbcompile.program.updates import with_updates
from zbcompile.schedules import Schedule

# The leaves of the model's output by their index, then by microbatch.
Outputs = dict[str, dict[int, torch.Tensor]]


@dataclass(frozen=True)
class StepInput:
    """What one step runs on: its microbatches, and what is asked of it.

    Attributes:
        microbatches: The tensors of each microbatch by input path.
        index: The number of the step.
        reduction: How losses combine, "mean" or "sum".
        recorder: Records the step.
        slices: What each optimizer updates.
        actions: What the optimizers do for a stage, by operation (VALIDATE, GATHER, OPT).
        ahead: Whether a rank goes on before all have ended the step.
        outputs: Which ranks get the model's outputs: "all", "last" (that of the last stage) or "".
        agreement: Compares the steps of replicas.
    """

    microbatches: list[dict[str, torch.Tensor]]
    index: int
    seed: int
    reduction: str
    recorder: Observation | None = None
    slices: Sequence[OptimizerParameters] = ()
    actions: Mapping[str, Sequence[Callable[[int], None]]] = field(default_factory=dict)
    ahead: bool = False
    outputs: str = ""
    agreement: StepAgreement | None = None


@dataclass(frozen=True)
class BoundGraphs:
    """The graphs of a program, bound to this process's tensors, for microbatches of one shape.

    Attributes:
        stages: Those of this process's ranks.
        sums: Over whom their gradients are summed.
        number: The number of the program, equal on all ranks.
    """

    program: Program
    stages: Mapping[int, CompiledStage]
    vocabulary: VocabularyExecutable | None = None
    sums: Mapping[str, Sum] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True)
class Executable:
    """The program and the graphs that a step runs.

    Attributes:
        program: That of the first graphs, with the lowered schedule of the step and the parameters
            that any of the graphs trains.
        graphs: Those that each microbatch runs.
        distinct: Each of these graphs once.
        sums: When the gradients of each rank of this process are reduced.
        gradients: The sums of each rank, which all steps share.
        orders: The results of `ordered`.
    """

    program: Program
    graphs: tuple[BoundGraphs, ...]
    distinct: tuple[BoundGraphs, ...]
    sums: Mapping[int, SumPlan]
    gradients: dict[int, Gradients] = field(init=False, default_factory=dict)
    orders: dict[frozenset[str], tuple[Schedule, tuple[RankProgram, ...]]] = field(
        init=False, default_factory=dict
    )

    @cached_property
    def first(self) -> BoundGraphs:
        """The graphs of the first microbatch. All others have the same parameters and sums."""
        return self.graphs[0]

    @cached_property
    def may_overflow(self) -> bool:
        """True if an exchange between experts may have too little room for its tokens."""
        stages = (stage for bound in self.distinct for stage in bound.program.stages)
        return any(
            slot.role == "fits"
            for stage in stages
            for piece in stage.pieces.values()
            for slot in piece.outputs
        )

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        return dtype_named(self.program.loss_dtype)

    def ordered(
        self, updates: frozenset[str] = frozenset()
    ) -> tuple[Schedule, tuple[RankProgram, ...]]:
        """Returns the schedule with these actions of the optimizers, without messages, and the
        program of each rank of this process. Cached."""
        if updates not in self.orders:
            lowered = with_updates(self.program.lowered, updates)
            stages = [graphs.stages for graphs in self.graphs]
            programs = tuple(plan_rank(lowered, rank, stages) for rank in self.sums)
            self.orders[updates] = lowered.compute_only(), programs
        return self.orders[updates]

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The outputs of each microbatch; empty if microbatches return their loss alone."""
        return tuple(
            graph.program.output for graph in self.graphs if graph.program.output is not None
        )

    def ends_on(self, ranks: Sequence[int]) -> bool:
        """Returns True if the last stage is on one of these ranks."""
        return self.program.rank_of(self.program.schedule.stages - 1) in ranks


def plan_step(graphs: Sequence[BoundGraphs], lowered: Schedule, ranks: Sequence[int]) -> Executable:
    """Returns the executable of a step in the order `lowered`, in which microbatch i runs
    `graphs[i]`.

    All programs have every parameter in the same place. Raises PipelineError for programs that
    cannot share a step.
    """
    program = graphs[0].program
    distinct = tuple({bound.number: bound for bound in graphs}.values())
    if len(distinct) > 1:
        programs = [graph.program for graph in distinct]
        problem = _problem(programs)
        if problem:
            raise PipelineError(
                f"the microbatches of this step differ in their {_difference(programs)}, and"
                f" {problem}, so they cannot share a step. Put samples that are alike in that into"
                " one batch."
            )
        program = replace(program, stages=_trained_by_any(program, programs))
    if program.lowered is not lowered:
        program = replace(program, lowered=lowered)
    sums = {rank: plan_sums(program, rank, graphs[0].sums) for rank in ranks}
    return Executable(program, tuple(graphs), distinct, sums)


def _difference(programs: Sequence[Program]) -> str:
    shapes = {tuple(sorted(program.inputs.items())) for program in programs}
    return "shapes" if len(shapes) > 1 else "graphs"


def _problem(programs: Sequence[Program]) -> str:
    first = programs[0]
    for program in programs[1:]:
        if [stage.deferred for stage in program.stages] != [
            stage.deferred for stage in first.stages
        ]:
            return "leave different sums over ranks to the end of the step"
        if (program.output is None) != (first.output is None):
            return "return different outputs"
        if program.loss_dtype != first.loss_dtype:
            return f"their losses are {first.loss_dtype} and {program.loss_dtype}"
        if program.manifest["vocabulary"] != first.manifest["vocabulary"]:
            return "compute the sharded output layer in different ways"
    return ""


def _trained_by_any(first: Program, programs: Sequence[Program]) -> tuple[StageProgram, ...]:
    """Returns the stages of `first`, with the parameters that any of `programs` trains on them."""
    stages = zip(*(program.stages for program in programs), strict=True)
    trained = [
        tuple(dict.fromkeys(name for one in stage for name in one.trained)) for stage in stages
    ]
    return tuple(
        replace(stage, trained=names) for stage, names in zip(first.stages, trained, strict=True)
    )
