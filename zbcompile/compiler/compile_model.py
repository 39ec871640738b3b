"""The compiler: from a model and one microbatch to the programs of all stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from zbcompile.batches.batch import Microbatch
from zbcompile.compiler.dump_passes import with_dumps
from zbcompile.compiler.overweight import explain_overweight
from zbcompile.compiler.paired_schedule import lower_for
from zbcompile.compiler.torch_logs import without_torchs_logs
from zbcompile.compiler.vocabulary_sharding import choose_sharding, shard
from zbcompile.model.model_info import facts_of
from zbcompile.passes.capture.export import ExportOptions, export_training_step
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.compile_step import CompiledStep, Observer, compile_graph, no_observer
from zbcompile.passes.cost.hardware import default_hardware
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.partition.assign_stages import cuts_of_owners
from zbcompile.passes.partition.balance import LoadRow
from zbcompile.passes.partition.balance_stages import balanced_cuts
from zbcompile.passes.partition.cut_points import ForwardLine
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.passes.recompute.recompute import policies_of
from zbcompile.passes.stage.stage_program import StageProgram, collectives_of, tensor_spec
from zbcompile.passes.stage.stage_programs import end_graphs, stage_programs
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram
from zbcompile.passes.vocabulary.trunk import ShardedStep
from zbcompile.program.directory import save_here
from zbcompile.program.output import Output
from zbcompile.program.program import Program
from zbcompile.schedules import Placement, Schedule


@dataclass(frozen=True)
class ExportedModel:
    """An exported training step.

    `keep` is what the step returns besides its loss: "", "outputs" or "metrics". `sharded` is the
    step without its output layer, if that is sharded over all ranks.
    """

    step: StepGraph
    keep: str = ""
    sharded: ShardedStep | None = None


@without_torchs_logs()
def export_step(
    model: nn.Module,
    microbatch: Microbatch,
    loss: Any,
    *,
    device: torch.device | None = None,
    process_groups: Mapping[str, str] | None = None,
    static_inputs: Sequence[str] = (),
    keep: str = "",
    choices: CompileOptions | None = None,
    schedule: Schedule | None = None,
    observe: Observer = no_observer,
) -> ExportedModel:
    """Returns the training step of `model` for microbatches like this one.

    Args:
        choices: Its `vocab` says whether the output layer is sharded; "auto" decides for
            `schedule`.
        device: The device of parameters that are on the meta device.
        process_groups: The mesh dimension of each process group, by the group's name.
        observe: Called after the export.

    Raises:
        CaptureError: The model cannot be exported.
    """
    args, kwargs, target = microbatch.example
    options = ExportOptions(
        static_inputs=static_inputs,
        returns=keep,
        device=device,
        process_groups=process_groups or {},
    )
    step = export_training_step(model, args, kwargs, target, loss, options)
    with_dumps(observe)("export", step)
    sharded = choose_sharding(step, schedule, choices or CompileOptions())
    return ExportedModel(step, keep, sharded)


@without_torchs_logs()
def compile_program(
    model: nn.Module,
    microbatch: Microbatch,
    exported: ExportedModel,
    schedule: Schedule,
    choices: CompileOptions,
    like: Program | None = None,
    observe: Observer = no_observer,
) -> Program:
    """Returns the program of an exported step for a schedule.

    `like` is a program of the same model: every parameter stays on the stages where it has it.
    `observe` is called after each pass.
    """
    observe = with_dumps(observe)
    policies_of(choices.recompute, schedule.stages)
    ranks_of = placement_ranks(schedule.placement)
    if like is not None and like.schedule.placement != schedule.placement:
        raise PartitionError(
            f"the parameters are placed for {like.schedule.placement}, and {schedule.name} has"
            f" {schedule.placement}."
        )
    sharded = exported.sharded
    step = exported.step.copy() if sharded is None else sharded.trunk.copy()
    observe("copy", step)
    compiled = compile_graph(
        step,
        ranks_of=ranks_of,
        exact=choices.exact,
        recompute=choices.recompute,
        hardware=choices.hardware or default_hardware(step.device_type),
        choose_cuts=lambda step, line: choose_cuts(step, line, choices, ranks_of, like),
        observe=observe,
    )
    programs = stage_programs(compiled, choices, observe)
    if schedule.placement.kind == "dual":
        _refuse_buffer_updates(programs)
    if like is not None:
        require_homes(programs, like)
        if like.trains:
            _require_same_readers(programs, like)
    vocabulary = None
    if sharded is not None:
        placed = like.vocabulary if like is not None else None
        bounds = placed.bounds if placed is not None else None
        vocabulary, schedule = shard(sharded, schedule, choices, programs, bounds)
        if placed is not None and set(placed.parameters) != set(vocabulary.parameters):
            raise PartitionError(
                f"the rows of {', '.join(placed.parameters)} are on all ranks, and the training"
                f" step shards {', '.join(vocabulary.parameters)}."
            )
    return Program(
        model=facts_of(model, compiled.step.constant_values),
        cuts=compiled.cuts,
        overweight=overweight_of(compiled),
        stages=programs,
        lowered=lower_for(programs, schedule, choices, compiled.step.device_type),
        homes=like.homes if like else parameter_homes(model, programs, vocabulary),
        choices=choices,
        loss_dtype=_loss_dtype(exported.step),
        inputs={path: (tuple(t.shape), str(t.dtype)) for path, t in microbatch.tensors.items()},
        vocabulary=vocabulary,
        line_operators=operators_of(compiled.line),
        call=microbatch.signature,
        groups=groups_of(compiled.step, programs),
        output=output_of("outputs", exported.step, programs) if exported.keep else None,
        changed_state=frozenset(compiled.step.changed_state),
        ends=end_graphs(compiled),
        writer=save_here,
    )


def choose_cuts(
    step: StepGraph,
    line: ForwardLine,
    choices: CompileOptions,
    ranks_of: Sequence[int],
    like: Program | None = None,
) -> Sequence[int]:
    """Returns the cuts: where another program of the model has them, by names, or balanced."""
    if like is not None and operators_of(line) == like.line_operators:
        return like.cuts
    if like is not None:
        divided = like.vocabulary.parameters if like.vocabulary is not None else ()
        tensors = (*step.parameters, *step.buffers)
        names = [name for name in tensors if name in like.homes and name not in divided]
        owners = {name: like.homes[name] for name in names}
        return cuts_of_owners(step, line, owners, len(ranks_of))
    if isinstance(choices.balance, str):
        hardware = choices.hardware or default_hardware(step.device_type)
        return balanced_cuts(step, line, ranks_of, hardware)
    return edges_named(line, choices.balance, len(ranks_of))


def operators_of(line: ForwardLine) -> tuple[str, ...]:
    """Returns the operators of a line: lines with equal ones can be cut at the same places."""
    return tuple(str(node.target) for node in line.nodes)


def _require_same_readers(programs: Sequence[StageProgram], like: Program) -> None:
    """Raises PartitionError if a parameter of several stages is read on others than in `like`.

    Microbatches of one step may run both programs, and a gradient is summed over the same stages.
    """
    stages: dict[str, tuple[int, ...]] = {}
    for program in programs:
        for name in program.trained:
            stages[name] = (*stages.get(name, ()), program.stage)
    for name, here in stages.items():
        there = tuple(stage.stage for stage in like.stages if name in stage.trained)
        if there and here != there:
            raise PartitionError(
                f"{name} would be read on stage {', '.join(map(str, here))}, and is on stage"
                f" {', '.join(map(str, there))} in another program: the model reads its parameters"
                " in another order than when it was placed. Keep the order, or use two pipelines."
            )


def require_homes(programs: Sequence[StageProgram], like: Program) -> None:
    """Raises PartitionError if a stage reads a parameter that another program has elsewhere."""
    for program in programs:
        for name in (*program.parameters, *program.buffers):
            if program.stage not in like.homes.get(name, ()):
                raise PartitionError(
                    f"stage {program.stage} would read {name}, which is on stage "
                    f"{', '.join(map(str, like.homes.get(name, ())))}: the model reads its "
                    "parameters in another order than when it was placed. Keep the order, or make "
                    "a new pipeline, which places them again."
                )


def _refuse_buffer_updates(programs: Sequence[StageProgram]) -> None:
    """Raises PartitionError for a buffer that forward changes: two copies would differ."""
    for program in programs:
        for name in program.changed:
            raise PartitionError(
                f"buffer {name} is changed by the forward of stage {program.stage}. This schedule"
                " keeps two copies of the model, each of which would change its own buffer from"
                " half of the microbatches. Use dualpipe-v, which has the same overlap with one"
                " copy."
            )


def overweight_of(compiled: CompiledStep) -> str:
    """Returns a sentence about what keeps the loads from being even; "" if they are."""
    sharded = compiled.step.vocabulary_values.hidden is not None
    row = LoadRow([0.0, *accumulate(compiled.loads)], compiled.ranks_of)
    return explain_overweight(compiled.line, compiled.loads, row, compiled.cuts, sharded)


def groups_of(step: StepGraph, programs: Sequence[StageProgram]) -> dict[str, str]:
    """Returns the names in this process of the process groups in the graphs of the stages."""
    used = {collective.dimension for program in programs for collective in collectives_of(program)}
    return {label: name for label, name in step.process_groups.items() if label in used}


def _loss_dtype(step: StepGraph) -> str:
    if step.loss is None:
        return "float32"
    return str(step.loss.meta["val"].dtype).removeprefix("torch.")


def output_of(computes: str, step: StepGraph, programs: Sequence[StageProgram]) -> Output:
    """Returns which stage makes each tensor of the model's output, and how to rebuild the output.

    What the shards of an output layer make counts as made by the last stage.
    """
    makers = {
        slot.name: program.stage
        for program in programs
        for slot in program.pieces["F"].outputs
        if slot.role == "output"
    }
    outputs = {
        str(index): (makers.get(str(index), len(programs) - 1), tensor_spec(node.meta["val"]))
        for index, node in enumerate(step.outputs)
        if node is not None
    }
    assert step.output_structure is not None
    return Output(computes, step.output_structure, outputs)


def parameter_homes(
    model: nn.Module, programs: Sequence[StageProgram], vocabulary: VocabularyProgram | None = None
) -> dict[str, tuple[int, ...]]:
    """Returns the stages that hold each parameter and buffer, by its first name.

    All stages hold what is sharded over all ranks.

    What no graph reads is held with its nearest relative in the module tree, else by the last
    stage.
    """
    homes: dict[str, tuple[int, ...]] = {}
    for program in programs:
        for name in (*program.parameters, *program.buffers):
            homes[name] = (*homes.get(name, ()), program.stage)
    resident = vocabulary.resident if vocabulary is not None else ()
    homes |= dict.fromkeys(resident, tuple(range(len(programs))))
    for named in (model.named_parameters, model.named_buffers):
        for name, _ in named():
            if name not in homes:
                homes[name] = _relative(name, homes, len(programs) - 1)
    return homes


def _relative(name: str, homes: Mapping[str, tuple[int, ...]], last: int) -> tuple[int, ...]:
    """Returns the last stage of the tensors that share the longest prefix with a name."""
    prefix = name
    while "." in prefix:
        prefix = prefix.rpartition(".")[0]
        near = [max(stages) for tensor, stages in homes.items() if tensor.startswith(f"{prefix}.")]
        if near:
            return (max(near),)
    return (last,)


def placement_ranks(placement: Placement) -> list[int]:
    """Returns the rank of each stage, for one microbatch."""
    return [placement.rank(stage) for stage in range(placement.stages)]
