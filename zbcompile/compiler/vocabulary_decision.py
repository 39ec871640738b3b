"""Whether to shard the output layer: the step predicted with its rows on all ranks, with it left on the last stage, and
with the layers redistributed around it (arXiv 2411.05288, section 6.2). Nothing is compiled for it."""

from dataclasses import dataclass, replace

from zbcompile.compiler.cut_planning import plan_cuts
from zbcompile.compiler.vocabulary_sharding import Sharding, find_sharding
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import BALANCES, Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.partition.liveness import draw_line
from zbcompile.passes.pass_list.run_passes import SILENT, PassManager
from zbcompile.schedules import Costs, Schedule, ScheduleError, simulate, with_vocabulary

INFINITE = float("inf")
WORTH = 0.95  # of the step without: the prediction has no price for the collectives, which the gain must pay


@dataclass(frozen=True)
class Steps:
    """Predicted seconds of a step at nominal speeds, messages free; infinite if it is impossible.

    `redistributed` is the model with its output layer on the last stage, cut by the balancer; `sharded` with an equal
    part of the output layer's words on every rank.
    """

    redistributed: float
    sharded: float


def choose_sharding(
    canonical: Canonical, schedule: Schedule | None, choices: Choices, manager: PassManager = SILENT
) -> Sharding | None:
    """The sharding that `vocab=` asks for; "auto" shards if there is an output layer and it gains 5 % of the step."""
    sharding = find_sharding(canonical, choices, manager)
    if sharding is None or schedule is None or choices.vocab != "auto" or schedule.shards:
        return sharding
    steps = predict_steps(sharding, schedule, choices)
    return sharding if steps.sharded < WORTH * steps.redistributed else None


def predict_steps(sharding: Sharding, schedule: Schedule, choices: Choices) -> Steps:
    """The step of `schedule` with and without sharding, each with the cuts that it would have."""
    whole, trunk = (_loads(each, schedule, choices) for each in (sharding.whole, sharding.trunk))
    if whole is None or trunk is None:
        return Steps(INFINITE if whole is None else _step(schedule, _costs(whole)), INFINITE)
    share = max(0.0, sum(whole) - sum(trunk)) / schedule.ranks  # of three products; S makes two with one barrier
    scan, update = ((part * share / 3,) * schedule.stages for part in (2, 1))
    costs = replace(_costs(trunk), vocab_s=scan, vocab_t=update)
    try:
        sharded = _step(with_vocabulary(schedule, barriers=1, costs=costs), costs)
    except ScheduleError:
        sharded = INFINITE
    return Steps(_step(schedule, _costs(whole)), sharded)


def _loads(canonical: Canonical, schedule: Schedule, choices: Choices) -> tuple[float, ...] | None:
    """The load of each stage; None if there are no such cuts."""
    by_flops = replace(choices, balance="flops") if choices.balance in BALANCES else choices
    try:
        return plan_cuts(canonical, draw_line(canonical), schedule, by_flops, {}).loads
    except PartitionError:
        return None


def _costs(loads: tuple[float, ...]) -> Costs:
    thirds = tuple(load / 3 for load in loads)
    return Costs(thirds, thirds, thirds)


def _step(schedule: Schedule, costs: Costs) -> float:
    return float(simulate(schedule, costs).makespan)
