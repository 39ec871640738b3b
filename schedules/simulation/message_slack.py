"""How late every message of a simulated step may be: what an order that is best on paper leaves for a run."""

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from zbcompile.schedules.ir.actions import COMMUNICATION, Action
from zbcompile.schedules.ir.schedule import parts
from zbcompile.schedules.simulation.idle_causes import Input
from zbcompile.schedules.simulation.timeline import Timeline


class Slack(NamedTuple):
    """What `action` made on rank `source` for rank `destination`.

    It arrives `early` before the pass that uses it begins, and could arrive `slack` later without a longer step.
    """

    action: Action
    source: int
    destination: int
    early: float
    slack: float


def message_slack(timeline: Timeline) -> tuple[Slack, ...]:
    """Every message of a step, by its destination in the order of use; without those of vocabulary collectives.

    >>> from zbcompile.schedules import build, simulate
    >>> [(str(each.action), each.slack) for each in message_slack(simulate(build("1f1b", ranks=2, microbatches=2)))]
    [('BW1.0', 1), ('BW1.1', 0), ('F0.0', 0), ('F0.1', 2)]
    """
    latest, begin = _latest_begins(timeline), timeline.run.begin
    return tuple(
        Slack(n.action, n.rank, rank, begin[rank][index] - n.arrived, latest[rank][index] - n.arrived)
        for rank, index, n in messages(timeline)
    )


def messages(timeline: Timeline) -> Iterator[tuple[int, int, Input]]:
    """Every message of a step: the rank and the index of the step that takes it, and what it takes from where."""
    orders = parts(timeline.program)[1]
    for rank, order in enumerate(orders):
        for index, step in enumerate(order):
            if step[0] not in COMMUNICATION and not timeline.waits.is_collective(rank, index):
                yield from ((rank, index, n) for n in timeline.waits.inputs(rank, index) if n.rank != rank)


def _latest_begins(timeline: Timeline) -> list[list[float]]:
    """The latest begin of each step of each rank with which the whole takes no longer."""
    run, waits = timeline.run, timeline.waits
    ends: list[list[float]] = [[timeline.finish] * len(end) for end in run.end]
    every = ((rank, index) for rank, end in enumerate(run.end) for index in range(len(end)))
    steps = sorted(((run.begin[r][i], run.end[r][i], r, i) for r, i in every), reverse=True)
    begins: list[list[float]] = [list(end) for end in ends]
    for begin, end, rank, index in steps:
        begins[rank][index] = least = ends[rank][index] - (end - begin)
        if index:
            ends[rank][index - 1] = min(ends[rank][index - 1], least)
        for needed in waits.inputs(rank, index):
            made_by = least - (needed.arrived - needed.made)  # early enough for its way
            ends[needed.rank][needed.step] = min(ends[needed.rank][needed.step], made_by)
    return begins


def slack_rows(timeline: Timeline) -> list[tuple[str, int, float, float, int]]:
    """Per link: how many messages, the least and the median slack, and how many have none (up to rounding)."""
    links: dict[tuple[int, int], list[float]] = {}
    for each in message_slack(timeline):
        links.setdefault((each.source, each.destination), []).append(each.slack)
    none = 1e-9 * timeline.finish
    return [
        (f"{source} to {destination}", len(found), min(found), median(found), sum(slack <= none for slack in found))
        for (source, destination), found in sorted(links.items())
    ]
