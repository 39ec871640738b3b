"""The input of a step, what its microbatches run in this process, and its results: outputs, and
losses, which may still be in flight when `pipe.step` returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any, Final

import torch
from torch import Tensor

from zbcompile.engine.gradients import Gradients
from zbcompile.engine.optimizer_parameters import OptimizerParameters
from zbcompile.engine.rank import RankProgram, plan_rank
from zbcompile.engine.replicas import Sum, SumPlan, plan_sums
from zbcompile.engine.stage import CompiledStage
from zbcompile.engine.vocabulary_parameters import VocabularyExecutable
from zbcompile.errors import PipelineError
from zbcompile.passes.torch_names import dtype_named
from zbcompile.profiling.observation import Observation
from zbcompile.program.output import Output
from zbcompile.program.program import Program
from zbcompile.program.updates import with_updates
from zbcompile.schedules import Schedule
from zbcompile.torch_private import READ_SCALAR, pytree, wrapper_like

# The leaves of the model's output by their index, then by microbatch.
Outputs = dict[str, dict[int, Tensor]]


@dataclass(frozen=True)
class StepInput:
    """What one step runs on: its microbatches, and what is asked of it.

    Attributes:
        microbatches: The tensors of each microbatch by input path.
        index: The number of the step.
        reduction: How losses combine, "mean" or "sum".
        recorder: Records the step.
        slices: What each optimizer updates.
        updates: What updates a stage within the step.
        ahead: Whether a rank goes on before all have ended the step.
        outputs: Which ranks get the model's outputs: "all", "last" (that of the last stage) or "".
    """

    microbatches: list[dict[str, Tensor]]
    index: int
    seed: int
    reduction: str
    recorder: Observation | None = None
    slices: Sequence[OptimizerParameters] = ()
    updates: Sequence[Callable[[int], None]] = ()
    ahead: bool = False
    outputs: str = ""


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
        sums: When the gradients of each rank of this process are reduced.
        gradients: The sums of each rank, which all steps share.
        orders: The results of `ordered`.
    """

    program: Program
    graphs: tuple[BoundGraphs, ...]
    sums: Mapping[int, SumPlan]
    gradients: dict[int, Gradients] = field(init=False, default_factory=dict)
    orders: dict[frozenset[str], tuple[Schedule, tuple[RankProgram, ...]]] = field(
        init=False, default_factory=dict
    )

    @cached_property
    def distinct(self) -> tuple[BoundGraphs, ...]:
        """Each of the graphs once."""
        return tuple({bound.number: bound for bound in self.graphs}.values())

    @cached_property
    def first(self) -> BoundGraphs:
        """The graphs of the first microbatch. All others have the same parameters and sums."""
        return self.graphs[0]

    @cached_property
    def may_overflow(self) -> bool:
        """True if an exchange between experts may have too little room for its tokens."""
        return any(
            slot.role == "fits"
            for bound in self.distinct
            for stage in bound.program.stages
            for piece in stage.pieces.values()
            for slot in piece.outputs
        )

    @cached_property
    def draws(self) -> bool:
        """True if a stage draws random numbers, or may: those of an evaluation are not counted."""
        return not self.program.trains or any(
            bound.program.random_until >= 0 for bound in self.distinct
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
    programs = list({bound.number: bound.program for bound in graphs}.values())
    if len(programs) > 1:
        if problem := _problem(programs):
            raise PipelineError(
                f"the microbatches of this step differ in their shapes, and {problem}, so they"
                " cannot share a step. Put samples that are alike in that into one batch."
            )
        trained = [  # by any of the programs, of each stage
            tuple(dict.fromkeys(name for one in stages for name in one.trained))
            for stages in zip(*(program.stages for program in programs), strict=True)
        ]
        stages = tuple(
            replace(stage, trained=names)
            for stage, names in zip(program.stages, trained, strict=True)
        )
        program = replace(program, stages=stages)
    if program.lowered is not lowered:
        program = replace(program, lowered=lowered)
    sums = {rank: plan_sums(program, rank, graphs[0].sums) for rank in ranks}
    return Executable(program, tuple(graphs), sums)


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


WHERE = (False, True, "last")
# what the loss function returns besides the loss, without what the model returns
METRICS: Final = "metrics"


def kind_of(return_outputs: Any, return_metrics: Any) -> bool | str:
    """Returns what a step returns besides its loss: one of WHERE, or METRICS. Raises PipelineError
    for other values, and for both together."""
    if not isinstance(return_outputs, bool | str) or return_outputs not in WHERE:
        raise PipelineError(f"return_outputs={return_outputs!r}; expected one of {WHERE}.")
    if not isinstance(return_metrics, bool):
        raise PipelineError(f"return_metrics={return_metrics!r}; expected True or False.")
    if return_outputs and return_metrics:
        raise PipelineError(
            f"return_metrics=True and return_outputs={return_outputs!r}: the outputs already come"
            " with the metrics, as (outputs, metrics). Pass one of the two."
        )
    return METRICS if return_metrics else return_outputs


def returned_values(kind: bool | str) -> str:
    """Returns what a captured step returns of its forward for a result of `kind_of`."""
    return METRICS if kind == METRICS else "outputs" if kind else ""


def keyword(kind: bool | str) -> str:
    """The keyword argument that asks a step for this, as text."""
    return "return_metrics=True" if kind == METRICS else f"return_outputs={kind!r}"


def joined_outputs(
    leaves: Outputs, executable: Executable, rows: int | None, reduction: str
) -> Any:
    """Returns the extra results of a step. Leaves with a row for each of the `rows` samples of a
    microbatch are concatenated, floating scalars combined as losses are, others are lists over the
    microbatches.
    """
    outputs, count = executable.outputs, executable.program.schedule.microbatches
    first = outputs[0]
    if any(output.structure != first.structure for output in outputs):
        return [
            output.rebuild({name: leaves[name][i] for name in output.made})
            for i, output in enumerate(outputs)
        ]
    return first.rebuild(
        {n: _joined([leaves[n][i] for i in range(count)], rows, reduction) for n in first.made}
    )


def _joined(parts: list[Tensor], rows: int | None, reduction: str) -> Any:
    if rows is not None and all(part.shape[:1] == (rows,) for part in parts):
        return torch.cat(parts)
    if all(part.ndim == 0 and part.is_floating_point() for part in parts):
        return total_loss(parts, reduction)
    return parts


def joined_rows(leaves: Outputs, outputs: dict[int, Output]) -> Any:
    """The output of an evaluation: the rows of its microbatches, joined into one batch. `outputs`
    says, by microbatch, how to rebuild it."""
    chosen = {name: [parts[i] for i in outputs] for name, parts in leaves.items()}
    joined = {
        name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in chosen.items()
    }
    return next(iter(outputs.values())).rebuild(joined)


@dataclass
class Losses:
    """The losses of a step. `values` has the loss of every microbatch of all replicas, once `wait`
    has returned; without `wait` they are complete. `require` raises if they are not the losses of
    one batch; on a device it blocks until the step ends.
    """

    values: Sequence[Tensor]
    wait: Callable[[], None] | None = None
    require: Callable[[], None] | None = None

    def read(self, as_numbers: bool = False) -> list[Tensor]:
        """Returns every loss. With `as_numbers` the caller synchronizes with the device, so
        `require` may block too."""
        if self.wait is not None:
            self.wait()
            self.wait = None
        if self.require is not None and (as_numbers or self.values[0].is_cpu):
            self.require()
            self.require = None
        return list(self.values)

    def total(self, reduction: str) -> Tensor:
        """Returns the loss of the step without blocking. If the losses are still in flight or not
        checked yet, the first use of the result waits and checks."""
        if self.wait is None and self.require is None:
            return total_loss(self.values, reduction)
        return PendingLoss(self, reduction)


def total_loss(losses: Sequence[Tensor], reduction: str) -> Tensor:
    """The step's loss: the sum over microbatches, in their order, of loss_i / m (`mean`) or of
    loss_i (`sum`)."""
    return reduce(
        torch.add, [loss / len(losses) if reduction == "mean" else loss for loss in losses]
    )


class PendingLoss(Tensor):
    """A tensor that blocks on its value when an operation reads it; only `detach` does not
    block."""

    _losses: Losses
    _reduction: str
    _value: Tensor | None

    def __new__(cls, losses: Losses, reduction: str) -> "PendingLoss":
        values = wrapper_like(cls, losses.values[0])
        values._losses, values._reduction, values._value = losses, reduction, None
        return values

    def __init__(self, losses: Losses, reduction: str) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach:
            return args[0]  # it has no graph
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        is_read = func is READ_SCALAR or str((kwargs or {}).get("device")) == "cpu"
        args, kwargs = pytree.tree_map_only(
            PendingLoss, partial(_value_of, is_read), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _value_of(as_numbers: bool, loss: PendingLoss) -> Tensor:
    values = loss._losses.read(as_numbers)
    if loss._value is None:
        loss._value = total_loss(values, loss._reduction)
    return loss._value
