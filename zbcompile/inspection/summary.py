"""The summary of a compiled program as plain data, for the tables and for `--json`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zbcompile.compiler.compile_example import Inspected
from zbcompile.compiler.paired_schedule import seen
from zbcompile.inspection.closed_form import EqualStages, with_equal_stages
from zbcompile.passes.compile_options import Recompute
from zbcompile.passes.graph.flops import without_formula
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.source_location import Origin, origin_of, shown_path
from zbcompile.passes.split.joint_graph import Recomputed
from zbcompile.passes.split.split import Improvement
from zbcompile.passes.stage.peak_memory import transient_bytes
from zbcompile.passes.stage.stage_program import Collective, StageProgram
from zbcompile.prediction.advice import Alternative, WhatIf, alternatives, front, idle_by_cause, what_if, what_limits
from zbcompile.prediction.predict import Basis, Messages, count_messages, hardware_of
from zbcompile.prediction.rank_memory import ALONE, Memory, Sharding, complete_peak, rank_memories
from zbcompile.prediction.recompile_trials import Impossible
from zbcompile.program.chosen_plan import ChosenPlan
from zbcompile.program.program import Program
from zbcompile.schedules.ir.actions import flatten
from zbcompile.schedules.simulation.timeline import Timeline

SCHEMA = "zbcompile.inspect/1"


@dataclass(frozen=True)
class Cut:
    """The last operation of a stage whose result leaves it: `operation`, in `module`, written at `file`:`line`.

    `balance=` takes the name `operation`, which is unique in the model's graph.
    """

    module: str
    operation: str
    file: str
    line: int
    code: str


@dataclass(frozen=True)
class VocabularySummary:
    """The output layer, sharded over all ranks: what was found, how many words each rank has, FLOPs of S and T on the
    first rank per microbatch, whether logits wait for T, and the predicted step with the output layer left whole on the
    last stage: with the other layers as they are (`unsharded_step`), or redistributed around it. `embedding` is the
    lookup that is sharded too, "" if none is."""

    found: str
    barriers: int
    words: tuple[int, ...]
    flops: Mapping[str, int]
    keeps_logits: bool
    unsharded_step: float | None
    redistributed_step: float | None
    embedding: str


@dataclass(frozen=True)
class StageSummary:
    """One stage. `cut` is where it ends (None: the loss). FLOPs and bytes are per microbatch.

    `load` is its weight in the unit of `Summary.balance`: predicted seconds, or what the model was cut by; `original`
    the stage whose graphs it shares, but for names.

    `forward_to_backward`, `forward_to_weight`, `backward_to_weight` are the bytes by the pass that made (or received)
    them and the pass that needs them; `kept` waits between F and B, `residue` between B and W. `running` is the most
    that a pass needs while it runs, of what waited for it and of what it makes (`zbcompile.passes.stage.peak_memory`).
    `recomputed` says what B makes again; None if nothing. `improvements` are what the split did beyond the dependency
    closure (docs/split.md). `collectives` are what its passes exchange with ranks beside the pipeline.
    """

    stage: int
    ranks: tuple[int, ...]
    cut: Cut | None
    load: float
    original: int
    parameters: int
    parameter_bytes: int
    flops: Mapping[str, int]
    forward_to_backward: int
    forward_to_weight: int
    backward_to_weight: int
    kept: int
    residue: int
    running: Mapping[str, int]
    receive_bytes: int
    send_bytes: int
    random: bool
    recomputed: Recomputed | None
    improvements: tuple[Improvement, ...]
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class RankSummary:
    """One rank: its stages, its FLOPs in a step, and what is predicted (`busy` in the prediction's unit; bytes):
    `peak_bytes` is the most that waits, `running_peak_bytes` with what the pass needs that runs, `memory` all of it.
    `copies_bytes` is what `pipe.optimizer(validate="after")` keeps besides (see `copies_bytes`)."""

    rank: int
    stages: tuple[int, ...]
    parameters: int
    flops: int
    busy: float
    idle_share: float
    peak_bytes: int
    running_peak_bytes: int
    copies_bytes: int
    memory: Memory


@dataclass(frozen=True)
class Balance:
    """How the model was cut: by what `basis` ("flops", "measured", "parameters" or "names"), in which `unit` loads are
    ("s" or "parameters"), the heaviest rank's load over the mean rank's (`ratio`), how many distinct graphs the stages
    have, and what keeps the loads from being even ("" if they are)."""

    basis: str
    unit: str
    ratio: float
    distinct_graphs: int
    overweight: str


@dataclass(frozen=True)
class Prediction:
    """A simulated step: `step`, in `unit`, up to an optimizer barrier; `bubble`: the busiest rank's idle share;
    `cost_bubble`: the same without the barrier, from a rank's first pass to its last.

    `memory_limit`: what `--memory` or the hardware has, in bytes; None if nothing is known of it.
    `equal_stages` is the closed form of the schedule, None if it has none that holds (see `with_equal_stages`).
    """

    basis: str
    unit: str
    step: float
    bubble: float
    cost_bubble: float
    peak_bytes: int
    messages: Messages
    memory_limit: float | None
    equal_stages: EqualStages | None


@dataclass(frozen=True)
class Summary:
    """Everything that the default report shows.

    `imbalance` is the heaviest rank's FLOPs over the mean rank's, `idle` the share of time lost to each cause, `limits`
    says what that means, `what_if` what the step would save without each cause, `alternatives` what was tried,
    `impossible` what could not be; `estimated` are operations whose FLOPs are unknown.
    """

    model: str
    parameters: int
    parameter_bytes: int
    inputs: Mapping[str, str]
    schedule: str
    ranks: int
    microbatches: int
    exact: bool
    recompute: Recompute
    loss_reduction: str
    balance: Balance
    imbalance: float
    prediction: Prediction
    idle: Mapping[str, float]
    limits: str
    what_if: tuple[WhatIf, ...]
    alternatives: tuple[Alternative, ...]
    impossible: tuple[Impossible, ...]
    stages: tuple[StageSummary, ...]
    per_rank: tuple[RankSummary, ...]
    orders: tuple[tuple[str, ...], ...]
    programs: tuple[tuple[str, ...], ...]
    shared_parameters: tuple[str, ...]
    vocabulary: VocabularySummary | None
    plan: ChosenPlan | None
    estimated: tuple[str, ...]
    dropped_outputs: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """What `--json` writes; docs/inspect.md describes every field."""
        return {"schema": SCHEMA, **asdict(self)}


def _vocabulary(program: Program, tried: "Tried") -> VocabularySummary | None:
    found = program.vocabulary
    if found is None:
        return None
    words = tuple(high - low for low, high in found.bounds)
    shown = tried.unsharded_step, tried.redistributed_step, found.lookup.weight if found.lookup else ""
    return VocabularySummary(found.text, found.barriers, words, found.flops[0], found.tiling.keep, *shown)


@dataclass(frozen=True)
class Tried:
    """The results of other compilations: the step without a sharded output layer (see `VocabularySummary`; None where
    nobody asked), other graphs, and changes that are impossible."""

    unsharded_step: float | None = None
    redistributed_step: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    impossible: tuple[Impossible, ...] = ()


def summarise(
    inspected: Inspected,
    basis: Basis,
    timeline: Timeline,
    loss_reduction: str,
    tried: Tried = Tried(),
    sharding: Sharding = ALONE,
) -> Summary:
    """Describe a compiled example; `timeline` is its step as `predict` sees it under `basis`."""
    program, model = inspected.program, inspected.example.model
    sizes = {name: (p.numel(), p.numel() * p.element_size()) for name, p in model.named_parameters()}
    loads = _loads(program, basis)
    stages = tuple(_stage(stage, program, sizes, loads[stage.stage]) for stage in program.stages)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    memory = rank_memories(program, timeline.costs, tensors, sharding)
    ranks = tuple(_rank(rank, program, sizes, timeline, each) for rank, each in enumerate(memory))
    flops = [rank.flops for rank in ranks]
    peak = complete_peak(program, tensors, sharding)
    same_stages = () if program.vocabulary else alternatives(timeline, peak)  # generators know no vocabulary passes
    return Summary(
        model=type(model).__name__,
        parameters=sum(count for count, _ in sizes.values()),
        parameter_bytes=sum(size for _, size in sizes.values()),
        inputs={
            path: f"{dtype.removeprefix('torch.')}{list(shape)}" for path, (shape, dtype) in program.inputs.items()
        },
        schedule=program.schedule.name,
        ranks=program.schedule.ranks,
        microbatches=program.schedule.microbatches,
        exact=program.exact,
        recompute=program.choices.recompute,
        loss_reduction=loss_reduction,
        balance=_balance(program, loads),
        imbalance=max(flops) * len(flops) / sum(flops) if sum(flops) else 1.0,
        prediction=prediction_of(program, basis, timeline),
        idle=idle_by_cause(timeline),
        limits=what_limits(timeline),
        what_if=what_if(timeline),
        alternatives=_undominated((*same_stages, *tried.alternatives)),
        impossible=tried.impossible,
        stages=stages,
        per_rank=ranks,
        orders=tuple(tuple(map(str, order)) for order in program.schedule.orders),
        programs=tuple(tuple(map(str, order)) for order in program.lowered.programs),
        shared_parameters=tuple(sorted(program.shared)),
        vocabulary=_vocabulary(program, tried),
        plan=program.plan,
        estimated=_estimated(program),
        dropped_outputs=inspected.dropped,
        warnings=inspected.warnings,
    )


def _undominated(found: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """Of the schedules those that nothing beats in both time and memory, wherever they cut; every other change."""
    kept = front(a for a in found if a.option.startswith("--schedule"))
    return tuple(a for a in found if a in kept or not a.option.startswith("--schedule"))


def prediction_of(program: Program, basis: Basis, timeline: Timeline) -> Prediction:
    length, peak = (timeline.makespan, timeline.bubble, timeline.cost_bubble), int(max(timeline.peak_memory))
    limit = program.choices.memory or hardware_of(program).memory
    equal = with_equal_stages(timeline)
    return Prediction(basis.text, basis.unit, *length, peak, count_messages(program), limit, equal)


def _estimated(program: Program) -> tuple[str, ...]:
    """Operations of other libraries whose FLOPs are unknown."""
    pieces = {id(piece): piece for stage in program.stages for piece in stage.pieces.values()}
    return tuple(sorted({name for piece in pieces.values() for name in without_formula(piece.module)}))


def _loads(program: Program, basis: Basis) -> tuple[float, ...]:
    """Of every stage, in the unit by which the model was cut; seconds are those of the predicted step."""
    if program.cuts.unit != "s" or basis.unit != "s":
        return program.cuts.loads
    columns = (basis.costs.forward, basis.costs.backward, basis.costs.weight)
    return tuple(map(sum, zip(*columns, strict=True)))


def _balance(program: Program, loads: Sequence[float]) -> Balance:
    cuts, placement = program.cuts, program.schedule.placement
    distinct = len({stage.original for stage in program.stages})
    copies = (0, 1) if placement.kind == "dual" else (0,)
    ranks = [0.0] * placement.ranks
    for stage, load in enumerate(loads):
        for copy in copies:
            ranks[placement.rank(stage, copy)] += load
    ratio = max(ranks) * len(ranks) / sum(ranks) if sum(ranks) else 1.0
    return Balance(cuts.basis, cuts.unit, ratio, distinct, cuts.overweight)


def _stage(stage: StageProgram, program: Program, sizes: Mapping[str, tuple[int, int]], load: float) -> StageSummary:
    return StageSummary(
        stage=stage.stage,
        ranks=tuple(sorted(program.ranks_of(stage.stage))),
        cut=cut_of(stage),
        load=load,
        original=stage.original,
        parameters=sum(sizes[name][0] for name in stage.parameters),
        parameter_bytes=sum(sizes[name][1] for name in stage.parameters),
        flops=dict(stage.flops),
        **vars(stage.crossing),
        running={op: transient_bytes(stage, op) for op in stage.pieces},
        receive_bytes=stage.receive_bytes,
        send_bytes=stage.send_bytes,
        random=stage.random,
        recomputed=stage.recomputed,
        improvements=stage.improvements,
        collectives=seen(program, stage),
    )


def cut_of(stage: StageProgram) -> Cut | None:
    """The place where the model was cut after `stage`: the last value that the stage makes and sends on."""
    piece = stage.pieces["F"]
    order = {node: i for i, node in enumerate(piece.module.graph.nodes)}
    pairs = zip(piece.outputs, output_values(piece.module.graph), strict=True)
    made = {node: slot.name for slot, node in pairs if slot.kind == "activation" and node.op == "call_function"}
    if not made:
        return None
    last = max(made, key=order.__getitem__)
    origin = origin_of(last) or Origin("", "", 0, "")
    return Cut(origin.module, made[last], shown_path(origin.file) if origin.file else "", origin.line, origin.code)


def _rank(
    rank: int, program: Program, sizes: Mapping[str, tuple[int, int]], timeline: Timeline, memory: Memory
) -> RankSummary:
    stages = program.schedule.placement.stages_of(rank)
    names = {name for stage in stages for name in program.stages[stage].parameters}
    actions = flatten(program.schedule.orders[rank])
    return RankSummary(
        rank=rank,
        stages=stages,
        parameters=sum(sizes[name][0] for name in names),
        flops=sum(program.stages[action.stage].flops.get(action.op, 0) for action in actions),
        busy=timeline.busy[rank],
        idle_share=1 - timeline.busy[rank] / timeline.makespan if timeline.makespan else 0.0,
        peak_bytes=int(timeline.peak_memory[rank]),
        running_peak_bytes=memory.activations,
        copies_bytes=copies_bytes(program, rank, sizes),
        memory=memory,
    )


def copies_bytes(program: Program, rank: int, sizes: Mapping[str, tuple[int, int]]) -> int:
    """What `validate="after"` keeps on a rank until its updates are validated: a copy of what it updates (float32 for
    parameters in half precision) and of the optimizer's state, `optimizer_state` bytes per byte of that. With
    `zero=1 | 2` a replica keeps its share of it. `sizes` has the elements and bytes of each parameter."""
    updated = {name: max(size, 4 * count) for name, (count, size) in sizes.items()}
    names = {name for stage in program.stages_of(rank) for name in program.stages[stage].trained}
    total, vocabulary = 0, program.vocabulary
    if vocabulary is not None:
        (low, high), names = vocabulary.bounds[rank], names.difference(vocabulary.parameters)
        total = sum(updated[name] * (high - low) // vocabulary.bounds[-1][1] for name in vocabulary.parameters)
    return int((total + sum(updated[name] for name in names)) * (1 + program.choices.optimizer_state))
