"""The compiler: from a model to the programs of all stages, by the passes listed in
`zbcompile.passes.pass_list.passes_in_order`."""

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.fx import Node

from zbcompile.batches.batch import Microbatch
from zbcompile.compiler.compile_stage import compile_stage, labels_of, make_manager
from zbcompile.compiler.cut_planning import plan_cuts
from zbcompile.compiler.paired_schedule import lower_for
from zbcompile.compiler.torch_logs import without_torchs_logs
from zbcompile.compiler.vocabulary_sharding import VocabularySharding, choose_sharding, shard
from zbcompile.model.model_info import facts_of
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.capture.differentiability import backward_failure, loss_problems, mixed_dtypes
from zbcompile.passes.capture.export import Captured
from zbcompile.passes.capture.questions import ForeignAnswers
from zbcompile.passes.capture.torch_private import release_caches
from zbcompile.passes.capture.training_step import Kept, LossFunction
from zbcompile.passes.capture.unsupported import raise_first
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import CaptureError, CompileError
from zbcompile.passes.exported.capture.structures import OutputStructure, Position
from zbcompile.passes.graph.fx import call_text, node_numbers, output_values
from zbcompile.passes.partition.liveness import Line, lay_out_line
from zbcompile.passes.partition.node_costs import device_of
from zbcompile.passes.partition.shared_parameters import refuse_mutation_of_copies, refuse_shared_mutation
from zbcompile.passes.partition.stage_graphs import Assignment, Stage, assign_by_cuts, assign_by_parameters
from zbcompile.passes.pass_list.passes_in_order import (
    CAPTURE,
    CUT,
    DEDUPLICATE,
    SEPARATE_USES,
    canonicalise,
)
from zbcompile.passes.pass_list.run_passes import Observer, PassManager
from zbcompile.passes.stage.deduplicate import Renaming, StageCompiler, compile_distinct
from zbcompile.passes.stage.stage_program import StageProgram, collectives_of, tensor_spec
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram
from zbcompile.program.directories import save_here
from zbcompile.program.output import Output
from zbcompile.program.program import Program, call_of
from zbcompile.schedules import Schedule
from zbcompile.torch_private import pytree


@dataclass(frozen=True)
class LaidOut:
    """A captured training step, as the line of operations that is cut into stages.

    If the output layer is sharded over all ranks, `sharding` has it and the loss, and the line ends before them.
    """

    captured: Captured
    canonical: Canonical
    line: Line
    sharding: VocabularySharding | None


@without_torchs_logs()
def lay_out_step(
    model: nn.Module,
    microbatch: Microbatch,
    loss: LossFunction | None,
    choices: Choices | None = None,
    schedule: Schedule | None = None,
    observe: Observer | None = None,
    dimensions: Mapping[str, str] | None = None,
    given: ForeignAnswers | None = None,
    keep: Kept = "",
) -> LaidOut:
    """Capture the training step of `model` for one microbatch's shapes. `vocab="auto"` decides for `schedule`;
    without one it shards what can be sharded.

    `observe` sees each pass over the model; `dimensions` are those of `Captured`, `given` and `keep` those of
    `capture`.
    """
    manager = make_manager(observe)
    args, kwargs, target = microbatch.example
    captured = on_mesh(manager.run(CAPTURE, model, args, kwargs, target, loss, given, keep), dimensions or {})
    with without_autocast(microbatch):
        canonical = canonicalise(captured, manager)
        raise_first([*mixed_dtypes(canonical), *loss_problems(canonical)])
        return _laid_out(captured, canonical, schedule, choices or Choices(), manager)


def on_mesh(captured: Captured, dimensions: Mapping[str, str]) -> Captured:
    """`captured`, for the process groups of a mesh: each with its dimension, by this process's name of it."""
    return replace(captured, dimensions=dimensions) if dimensions else captured


def _laid_out(
    captured: Captured, whole: Canonical, schedule: Schedule | None, choices: Choices, manager: PassManager
) -> LaidOut:
    sharding = choose_sharding(whole, schedule, choices, manager)
    canonical = whole if sharding is None else sharding.trunk
    return LaidOut(captured, canonical, lay_out_line(canonical), sharding)


def without_autocast(microbatch: Microbatch) -> torch.autocast:
    """Capture has put the casts into the graph; the passes, which trace it again, must not autocast again."""
    kinds = {tensor.device.type for tensor in microbatch.tensors.values()} - {"cpu"}  # a number may be there
    return torch.autocast(next(iter(kinds), "cpu"), enabled=False)


@without_torchs_logs()
def compile_laid_out(
    model: nn.Module,
    microbatch: Microbatch,
    laid_out: LaidOut,
    schedule: Schedule,
    choices: Choices,
    like: Program | None = None,
    observe: Observer | None = None,
) -> Program:
    """Cut the captured step and compile its stages.

    `like` is a program of the same model for other shapes: every parameter then stays on the stage where it is.
    `observe` sees each pass that is left to do.
    """
    manager = make_manager(observe)
    captured, canonical, line, sharding = laid_out.captured, laid_out.canonical, laid_out.line, laid_out.sharding
    choices.require_stages(schedule.stages)
    behind = sharding.gradient if sharding else None
    with without_autocast(microbatch):
        if like is None:
            cuts = plan_cuts(line, schedule, choices)
            assigned: Assignment = assign_by_cuts(line, cuts)
        elif targets_of(line) == like.canonical_targets:  # the same operations on other shapes: the same cuts
            cuts, assigned = like.cuts, assign_by_cuts(line, like.cuts)
        else:
            cuts, assigned = like.cuts, assign_by_parameters(canonical, line, like.homes, schedule.stages)
        stages = manager.run(CUT, canonical, line, assigned, schedule.stages, choices.exact)
        refuse_shared_mutation(stages)
        if schedule.placement.copies > 1:
            refuse_mutation_of_copies(stages)
        if choices.exact:
            stages = manager.run(SEPARATE_USES, stages, captured.trainable)
        programs = _compile_stages(canonical, stages, choices, behind, manager)
        vocabulary = None
        if sharding is not None:
            bounds = like.vocabulary.bounds if like is not None and like.vocabulary is not None else None
            vocabulary, schedule = shard(sharding, schedule, choices, programs, bounds, manager)
    release_caches()
    return Program(
        model=facts_of(model, captured.constants),
        cuts=cuts,
        stages=programs,
        lowered=lower_for(programs, schedule, choices, device_of(line)),
        homes=like.homes if like else place(model, captured, stages, vocabulary),
        choices=choices,
        loss_dtype=vocabulary.loss_dtype if vocabulary else _loss_dtype(stages[-1]),
        inputs={path: (tuple(t.shape), str(t.dtype)) for path, t in microbatch.tensors.items()},
        canonical_targets=targets_of(line) if like is None else like.canonical_targets,  # the line that `cuts` are of
        operations=_operations(laid_out),
        guards=captured.guards,
        changed_state=captured.changed_state,
        vocabulary=vocabulary,
        call=call_of(microbatch),
        groups=groups_of(canonical, programs),
        output=output_of("outputs", captured, canonical, stages) if captured.structure is not None else None,
        writer=save_here,
    )


def _compile_stages(
    canonical: Canonical,
    stages: tuple[Stage, ...],
    choices: Choices,
    behind: Mapping[str, torch.Tensor] | None,
    manager: PassManager,
) -> tuple[StageProgram, ...]:
    trainable = canonical.captured.trainable

    def rename(program: StageProgram, to: Renaming) -> StageProgram:
        return manager.run(DEDUPLICATE, program, to, stage=to.stage)  # type: ignore[no-any-return]

    labels = labels_of(canonical)
    held = Counter(name for stage in stages for name in stage.named("parameter"))
    several = frozenset(name for name, count in held.items() if count > 1)
    make: StageCompiler = functools.partial(
        compile_stage, trainable, choices, manager=manager, labels=labels, several=several, segments={}
    )
    try:
        apart = several if set(labels.values()) - {"pp", "dp"} else frozenset()  # they defer no sums over ranks
        return compile_distinct(
            stages, trainable, make, behind, rename, apart, lambda stage: choices.recompute_of(stage.index)
        )
    except CompileError:
        raise
    except Exception as error:  # torch's own words name neither the operation nor its line
        raise CaptureError(backward_failure(canonical, error)) from error


def groups_of(canonical: Canonical, programs: Sequence[StageProgram]) -> dict[str, str]:
    """This process's names of the groups in the graphs of the stages."""
    names = {label: name for name, label in labels_of(canonical).items()}
    used = {each.dimension for program in programs for each in collectives_of(program)}
    return {label: name for label, name in names.items() if label in used}


def is_laid_out_as(program: Program, laid_out: LaidOut) -> bool:
    """Whether `laid_out` is the graph that `program` was compiled from: then the answers that differ decide nothing."""
    constants, new = program.model.constants, laid_out.captured.constants
    same = constants.keys() == new.keys() and all(torch.equal(constants[name], new[name]) for name in new)
    return same and program.operations == _operations(laid_out)


def _operations(laid_out: LaidOut) -> str:
    graph = (laid_out.sharding.whole if laid_out.sharding else laid_out.canonical).module.graph
    numbers = node_numbers(graph)
    text = "\n".join(call_text(node, numbers) for node in graph.nodes)
    for call in laid_out.captured.functions:  # numbered anew by every capture
        text = text.replace(repr(call.name), call.text or call.name)
    text += "with outputs" * (laid_out.captured.structure is not None)
    return hashlib.sha256(text.encode()).hexdigest()


def targets_of(line: Line) -> tuple[str, ...]:
    """The operations of a line: lines with the same ones can be cut at the same places."""
    return tuple(str(node.target) for node in line.nodes)


def _loss_dtype(stage: Stage) -> str:
    results = zip(stage.outputs, output_values(stage.module.graph), strict=True)
    return next(tensor_spec(node.meta["val"]).dtype for slot, node in results if slot.kind == "loss")


def output_of(computes: str, captured: Captured, canonical: Canonical, stages: Sequence[Stage]) -> Output:
    """What of its forward a program returns; shards return it as the last stage would."""
    found = {slot.name: len(stages) - 1 for slot, node in canonical.outputs if slot.kind == "output"}
    found |= {slot.name: stage.index for stage in stages for slot in stage.outputs if slot.kind == "output"}
    results = [(slot.name, node) for slot, node in canonical.outputs if slot.name in found and isinstance(node, Node)]
    made = {name: (found[name], tensor_spec(node.meta["val"])) for name, node in results}
    names = [slot.name for slot in captured.outputs if slot.kind == "output"]
    positions = {name: Position(index) for index, name in enumerate(made)}
    leaves = [positions.get(name, captured.constant_leaves.get(name)) for name in names]
    return Output(computes, OutputStructure(pytree.tree_unflatten(leaves, captured.structure)), made)


def place(
    model: nn.Module, captured: Captured, stages: tuple[Stage, ...], vocabulary: VocabularyProgram | None
) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter and buffer, by first name; all of them what is sharded over all ranks.

    What the training graph does not use lives with its nearest relative in the module tree, else on the last stage.
    """
    homes: dict[str, tuple[int, ...]] = {}
    for stage in stages:
        for name in (*stage.named("parameter"), *stage.named("buffer")):
            homes[name] = (*homes.get(name, ()), stage.index)
    homes |= dict.fromkeys(vocabulary.resident if vocabulary else (), tuple(range(len(stages))))
    for name in dict.fromkeys(captured.names.values()):
        if name not in homes:
            homes[name] = _relative(name, homes, len(stages) - 1)
    return homes


def _relative(name: str, homes: Mapping[str, tuple[int, ...]], last: int) -> tuple[int, ...]:
    """The last stage of the nearest relatives: a head that only evaluation uses comes after what it works on."""
    prefix = name
    while "." in prefix:
        prefix = prefix.rpartition(".")[0]
        near = [max(stages) for other, stages in homes.items() if other.startswith(prefix + ".")]
        if near:
            return (max(near),)
    return (last,)
