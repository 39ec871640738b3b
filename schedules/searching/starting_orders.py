"""Orders to start from: every name that fits, and one microbatch after the other."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import lt
from typing import Any

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.generators.list_scheduler import spans
from zbcompile.schedules.generators.registry import FAMILIES, Family, admitted_task, generated
from zbcompile.schedules.generators.task import Task
from zbcompile.schedules.generators.vocabulary_insertion import with_vocabulary
from zbcompile.schedules.ir.actions import Action, B, F, S, T, W
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.searching.justification import turned_around
from zbcompile.schedules.searching.problem import LARGE, MANY, Problem, Words
from zbcompile.schedules.searching.search_budget import Budget

HEURISTIC, HEURISTIC_SECONDS = ("zb-1p", "zb-2p"), 1.5e-4  # for each pass
TURNED, PATIENCE = ("zb-v", "v-half", "v-min"), 0.8  # see `named_schedule`


def named_orders(
    problem: Problem, budget: Budget | None = None, families: Sequence[Family] = FAMILIES
) -> Iterator[tuple[str, Words, Schedule]]:
    """Every name of this placement that fits into the limits, in this order, with its words and as it was built. It
    leaves out names whose own heuristics would take most of the seconds, and ends where another name that takes as long
    as the slowest so far would end late."""
    budget = budget or Budget(math.inf, None)
    long = HEURISTIC_SECONDS * len(problem.time) > budget.seconds / 2 and len(problem.time) > MANY
    longest = 0.0
    for family in families:
        begun = budget.spent
        if family.name in HEURISTIC and long:
            continue
        if begun + longest >= budget.seconds:
            return
        schedule = _built(family, problem)
        if schedule is not None and (words := problem.words(schedule)) is not None:
            yield family.name, words, schedule
        longest = max(longest, budget.spent - begun)


def named_schedule(family: Family, task: Task, options: Mapping[str, Any]) -> Schedule:
    """As `generated`. Orders in a V that were made for given costs are turned around once, if that is shorter and the
    fullest rank holds no more."""
    schedule = generated(family, task, options)
    if task.costs is None or family.name not in TURNED:
        return schedule
    costs = replace(task.costs, vocab_s=(), vocab_t=())  # which are put in afterwards
    problem = Problem(task.placement, task.microbatches, costs, (max(task.peaks(schedule.orders)),) * task.ranks)
    if len(problem.time) > LARGE or not problem.finite:
        return schedule
    words = problem.words(schedule)
    turned = words and turned_around(problem, words, patience=PATIENCE)
    other = problem.schedule(turned, schedule.name) if turned else schedule
    return other if all(map(lt, spans(task, other.orders), spans(task, schedule.orders))) else schedule


def _built(family: Family, problem: Problem) -> Schedule | None:
    placement = problem.placement
    if family.placement != placement.kind and (family.placement, placement.kind) != ("looped", "linear"):
        return None
    limit = min(problem.limits) if problem.limits else None
    try:
        task = admitted_task(family, placement.ranks, problem.microbatches, placement.chunks, {}, problem.costs)
        schedule = named_schedule(family, replace(task, memory_limit=limit), {})
        if schedule.placement != placement:
            return None
        return with_vocabulary(schedule, problem.barriers, problem.costs) if problem.sharded else schedule
    except ScheduleError:  # it does not admit these counts, or does not fit
        return None


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
