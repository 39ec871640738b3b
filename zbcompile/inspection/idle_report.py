"""The reasons for a step's length: the longest idle intervals of a rank, and the critical path."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from zbcompile.amounts import format_share, format_time
from zbcompile.errors import PipelineError
from zbcompile.passes.stage.stage_program import collectives_of
from zbcompile.program.program import Program
from zbcompile.schedules import CriticalStep, Idle, Schedule, Timeline, blocking_chain, critical_path
from zbcompile.schedules.ir.actions import Action, Pair, flatten
from zbcompile.schedules.simulation.critical_path import by_rank, time_by_kind
from zbcompile.tables import Figure, Table

LONGEST = 5


def idle_intervals(timeline: Timeline, rank: int, unit: str) -> Table:
    """The longest idle intervals of `rank`, each with the chain of actions on other ranks that it waited for.

    `unit` is that of the timeline. Raises PipelineError if the rank does not exist.
    """
    require_rank(timeline.schedule, rank)
    gaps = sorted((gap for gap in timeline.idle if gap.rank == rank), key=lambda gap: gap.start - gap.end)
    total = sum(gap.end - gap.start for gap in gaps)
    share = format_share(total / timeline.finish if timeline.finish else 0)
    head = f"Rank {rank} is idle for {format_time(total, unit)} of {format_time(timeline.finish, unit)} ({share})"
    if not gaps:
        return Table("idle", f"{head}.")
    shown = gaps[:LONGEST]
    times = f"{len(gaps)} time{'s' * (len(gaps) > 1)}"
    title = f"{head}, {times}. The longest {len(shown)}, each with what the rank waited for:"
    rows = [
        [
            Figure("from", gap.start, unit),
            Figure("takes", gap.end - gap.start, unit),
            Figure("cause", gap.cause),
            Figure("before", str(gap.step or "")),
            Figure("needs", str(gap.action or "")),
            Figure("of rank", gap.source if gap.action else None),
        ]
        for gap in shown
    ]
    return Table("idle", title, rows, picture="\n\n".join(_interval(timeline, gap, unit) for gap in shown))


def exchanges(program: Program, timeline: Timeline, rank: int, unit: str) -> Table:
    """The exchanges that `rank` waits for inside its passes, as nothing hides them."""
    costs, steps = timeline.costs, [tuple(flatten((step,))) for step in timeline.schedule.orders[rank]]
    counts = Counter(tuple(action[:2] for action in actions) for actions in steps)
    rows = []
    for passes, count in counts.items():
        inside = [(op, each) for op, stage in passes for each in collectives_of(program.stages[stage])]
        found = Counter((each.kind, each.dimension) for op, each in inside if each.name == op)
        times = {"F": costs.forward_exchange, "B": costs.backward_exchange, "BW": costs.backward_exchange}
        whole = sum(times[op][stage] for op, stage in passes if op in times)
        if found and whole:
            halves = [Action(*each, 0) for each in passes]
            exposed = costs.waits(Pair(*halves) if len(halves) == 2 else halves[0])
            names = ", ".join(f"{n} {kind} along {dimension}" for (kind, dimension), n in found.items())
            rows.append(
                [
                    Figure("passes", "|".join(f"{op}{stage}" for op, stage in passes)),
                    Figure("times", count),
                    Figure("exchanges", count * whole, unit),
                    Figure("waited for", count * exposed, unit),
                    Figure("of one", names),
                ]
            )
    title = f"Inside of its passes rank {rank} waits for exchanges that nothing hides:"
    return Table("exchanges", title if rows else "", rows)


def require_rank(schedule: Schedule, rank: int) -> None:
    """Raise PipelineError if the rank does not exist."""
    if not 0 <= rank < schedule.ranks:
        raise PipelineError(f"rank {rank} does not exist: {schedule.name} has ranks 0 to {schedule.ranks - 1}.")


def _interval(timeline: Timeline, gap: Idle, unit: str) -> str:
    length, start = format_time(gap.end - gap.start, unit), format_time(gap.start, unit)
    if gap.step is None:
        return f"{length} of {gap.cause} from {start} on: nothing left to do until the last rank has finished"
    if gap.action is None:
        return f"{length} of {gap.cause} from {start} on, before {gap.step}: its inputs were ready"
    awaited = f"{gap.action} of rank {gap.source}"
    head = f"{length} of {gap.cause} from {start} on, before {gap.step}, which needs {awaited}"
    return "\n".join([head, *(f"  {_leg(legs, unit)}" for legs in by_rank(blocking_chain(timeline, gap)))])


def _leg(legs: Sequence[CriticalStep], unit: str) -> str:
    lasted = format_time(legs[-1].end - legs[0].start, unit)
    travel = f", then {format_time(legs[-1].travel, unit)} on its way" if legs[-1].travel else ""
    return f"rank {legs[0].rank}: {_actions(legs)}  ({len(legs)} in {lasted}{travel})"


def critical_table(timeline: Timeline, unit: str) -> Table:
    """The chain of actions that determines the step's length, divided wherever it changes the rank."""
    path = critical_path(timeline)
    kinds = ", ".join(
        f"{kind} {format_share(time / (timeline.finish or 1))}" for kind, time in time_by_kind(path).items()
    )
    order, length = timeline.schedule, format_time(timeline.finish, unit)
    rows = [
        [
            Figure("from", legs[0].start, unit),
            Figure("takes", legs[-1].end - legs[0].start, unit),
            Figure("rank", legs[0].rank),
            Figure("actions", _actions(legs)),
            *([Figure("then on its way", legs[-1].travel, unit)] if legs[-1].travel else []),
        ]
        for legs in by_rank(path)
    ]
    step = f"The step of {order.name} with {order.microbatches} microbatches"
    title = f"{step} takes {length} because of this chain of {len(path)} actions: {kinds}."
    return Table("critical path", title, rows, ["Making anything else faster does not shorten the step."])


def idle_by_cause(timeline: Timeline) -> dict[str, float]:
    """Returns the share of all ranks' time in which they are idle, by cause, largest first."""
    total: dict[str, float] = defaultdict(float)
    for idle in timeline.idle:
        total[idle.cause] += idle.end - idle.start
    whole = timeline.schedule.ranks * timeline.makespan
    shares = {cause: time / whole for cause, time in total.items()} if whole else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def format_idle(shares: Mapping[str, float]) -> str:
    """Returns one sentence with the causes whose share is not negligible."""
    parts = [f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 0.0005]
    total = sum(shares.values())
    return f"Ranks are idle {total:.1%} of the time: {', '.join(parts)}." if parts else "No rank is idle."


def _actions(legs: Sequence[CriticalStep]) -> str:
    steps = [str(leg.step) for leg in legs]
    return ", ".join(steps) if len(steps) <= 6 else f"{', '.join(steps[:3])} ... {', '.join(steps[-2:])}"
