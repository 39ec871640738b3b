"""Orders to start from: every name that fits, and what ranks choose by rules of preference when they are free."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.generators.list_scheduler import Floor, dispatch, oldest
from zbcompile.schedules.generators.registry import FAMILIES, Family, admitted_task, generated
from zbcompile.schedules.generators.task import Task
from zbcompile.schedules.generators.vocabulary_insertion import with_vocabulary
from zbcompile.schedules.ir.actions import Action, B, F, S, Step, T, W
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.searching.problem import ROUNDING, Problem, Words


class Rule(NamedTuple):
    """What a free rank prefers.

    * `first`: the operation that goes first of F and B that are ready; "" alternates.
    * `gap`: W is run only if nothing else arrives within this share of its time.
    * `ahead`: forwards in flight, as a share of what a round trip needs to keep the slowest rank busy.
    """

    first: str
    gap: float
    ahead: float

    def __str__(self) -> str:
        ahead = "" if self.ahead == math.inf else f", {self.ahead:g} round trips ahead"
        return f"{self.first or 'F and B in turn'}{' first' if self.first else ''}, W into gaps of {self.gap:g}{ahead}"


HEURISTIC, HEURISTIC_SECONDS = ("zb-1p", "zb-2p"), 1.5e-4  # for each pass
AHEAD = (1.25, math.inf, 1, 1.5, 2)
RULES = tuple(Rule(first, gap, ahead) for ahead, gap, first in product(AHEAD, (0.5, 0, 1), (B, "", F)))


class Seed(NamedTuple):
    """An order and where it comes from; `schedule` is the named one as it was built."""

    origin: str
    words: Words
    schedule: Schedule | None = None


def named_seeds(problem: Problem, seconds: float = math.inf) -> Iterator[Seed]:
    """Every name of this placement that fits into the limits, in the order of the registry; without those whose own
    heuristics would take most of so many seconds."""
    for family in FAMILIES:
        if family.name in HEURISTIC and HEURISTIC_SECONDS * len(problem.time) > seconds / 2:
            continue
        schedule = _built(family, problem)
        words = None if schedule is None else problem.words(schedule)
        if words is not None:
            yield Seed(family.name, words, schedule)


def _built(family: Family, problem: Problem) -> Schedule | None:
    placement = problem.placement
    if family.generate is None or family.placement not in _KINDS[placement.kind]:
        return None
    limit = min(problem.limits) if problem.limits and family.name in HEURISTIC else None
    try:
        task = admitted_task(family, placement.ranks, problem.microbatches, placement.chunks, {}, problem.costs)
        schedule = generated(family, replace(task, memory_limit=limit), {})
        return _with_shards(schedule, problem) if schedule.placement == placement else None
    except ScheduleError:  # it does not admit these counts, or does not fit
        return None


_KINDS = {"linear": ("linear", "looped"), "looped": ("looped",), "v": ("v",), "dual": ("dual",), "map": ()}


def _with_shards(schedule: Schedule, problem: Problem) -> Schedule:
    return with_vocabulary(schedule, problem.barriers, problem.costs) if problem.sharded else schedule


def one_by_one(problem: Problem) -> Words:
    """Every microbatch alone: the order that holds least."""
    stages = range(problem.placement.stages)
    words: Words = [[] for _ in range(problem.placement.ranks)]
    for m in range(problem.microbatches):
        actions = [Action(F, stage, m) for stage in stages]
        actions += [Action(op, shard, m) for op in (S, T) for shard in problem.shards]
        actions += [Action(op, stage, m) for stage in reversed(stages) for op in (B, W)]
        for action in actions:
            n = problem.number[action]
            words[problem.rank[n]].append(n)
    return words


def dispatched(problem: Problem, rule: Rule) -> Seed | None:
    """The order that results if every rank follows `rule`; None if it leads nowhere."""
    task = Task(problem.placement, problem.microbatches, problem.costs)
    orders = dispatch(Floor(task), _Chooser(problem, rule))
    if sum(map(len, orders)) < 3 * problem.microbatches * problem.placement.stages:
        return None
    try:
        words = problem.words(_with_shards(replace(task.schedule(orders), name="auto"), problem))
    except ScheduleError:
        return None
    return None if words is None else Seed(str(rule), words)


class _Chooser:
    """Chooses by a rule, and never so that a rank cannot finish what it has begun: F of a stage only if one F of each
    later stage of the rank still fits; a rank without room for F runs W."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        self.rule = rule
        placement, costs = problem.placement, problem.costs
        self.stages = [placement.stages_of(rank)[::-1] for rank in range(placement.ranks)]
        later = {
            s: sum(costs.activation[t] for t in placement.stages_of(placement.rank(s)) if t > s)
            for s in range(placement.stages)
        }
        limits = problem.limits or (math.inf,) * placement.ranks
        self.room = [limits[placement.rank(s)] * ROUNDING - costs.activation[s] - later[s] for s in range(len(later))]
        self.ahead = _ahead(problem, rule.ahead)
        self.last = [F] * placement.ranks

    def __call__(self, floor: Floor, rank: int) -> Step | None:
        heads = self._heads(floor, rank)
        now = [action for at, action in heads if at <= floor.now]
        if now:
            chosen = self._preferred(now, rank)
            self.last[rank] = chosen.op
            return chosen
        return self._weight(floor, rank, min((at for at, _ in heads), default=math.inf))

    def _heads(self, floor: Floor, rank: int) -> list[tuple[float, Action]]:
        """The next F and B of each stage that may run, with the time at which they can."""
        heads = []
        started, ready = floor.started, floor.ready_at
        for stage in self.stages[rank]:
            backward = Action(B, stage, started[B, stage])
            if (at := ready.get(backward)) is not None:
                heads.append((at, backward))
            count = started[F, stage]
            if count - backward.microbatch < self.ahead[stage] and floor.memory[rank] <= self.room[stage]:
                forward = Action(F, stage, count)
                if (at := ready.get(forward)) is not None:
                    heads.append((at, forward))
        return heads

    def _preferred(self, actions: list[Action], rank: int) -> Action:
        first = self.rule.first or (B if self.last[rank] == F else F)
        for action in actions:  # later stages come first
            if action.op == first:
                return action
        return actions[0]

    def _weight(self, floor: Floor, rank: int, arrival: float) -> Action | None:
        """The oldest W, if it is worth it."""
        first = oldest(filter(floor.is_ready, (floor.next(W, stage) for stage in self.stages[rank])))
        return first if first is not None and arrival - floor.now >= self.rule.gap * floor.time(first) else None


def _ahead(problem: Problem, share: float) -> list[float]:
    """By stage, how many forwards may be in flight."""
    placement, costs = problem.placement, problem.costs
    if share == math.inf:
        return [math.inf] * placement.stages
    work = [costs.forward[s] + costs.backward[s] + costs.weight[s] for s in range(placement.stages)]
    busy = [sum(work[s] for s in placement.stages_of(rank)) for rank in range(placement.ranks)]
    ranks = [placement.rank(stage) for stage in range(placement.stages)]
    trip, ahead = 0.0, [0.0] * placement.stages
    for stage in reversed(range(placement.stages)):
        if stage + 1 < placement.stages:
            trip += costs.hop(stage, ranks[stage], ranks[stage + 1]) + costs.hop(stage, ranks[stage + 1], ranks[stage])
        trip += costs.forward[stage] + costs.backward[stage]
        ahead[stage] = max(1, math.ceil(share * trip / max(busy)))
    return ahead
