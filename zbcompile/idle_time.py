"""Why a rank stood still in a measured step: the gaps between its passes, by cause."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zbcompile.program import Program
from zbcompile.rank_plan import Message, made_by, needed_by
from zbcompile.schedules.actions import COMPUTE, Action

CAUSES = ("warm-up", "wait", "communication", "cool-down", "overhead")


class Timed(NamedTuple):
    """An action with its start and end, in seconds on a clock that all ranks share."""

    action: Action
    start: float
    end: float


def idle_seconds(program: Program, timed: Mapping[int, Sequence[Timed]]) -> dict[int, dict[str, float]]:
    """The seconds in which each rank ran no pass, from the first start to the last end of all ranks, by cause.

    * `warm-up`, `cool-down`, `wait`: what the next pass needs was not made yet: before the rank's first backward, after
      its last forward, or between (an imbalance, or an order that does not fit the costs);
    * `communication`: it was made and on its way;
    * `overhead`: nothing was missing: posting, sending, and what the host does between passes.
    """
    passes = {rank: [t for t in found if t.action.op in COMPUTE] for rank, found in timed.items()}
    made = {made_by(program, t.action): t.end for found in passes.values() for t in found}
    begin = min(found[0].start for found in passes.values())
    end = max(found[-1].end for found in passes.values())
    causes = {}
    for rank, found in passes.items():
        causes[rank] = dict.fromkeys(CAUSES, 0.0)
        for cause, seconds in _gaps(program, found, made, begin, end):
            causes[rank][cause] += seconds
    return causes


def _gaps(
    program: Program, passes: Sequence[Timed], made: Mapping[Message | None, float], begin: float, end: float
) -> Iterator[tuple[str, float]]:
    ops = [timed.action.op for timed in passes]
    first_backward = next((i for i, op in enumerate(ops) if op in ("B", "BW")), len(ops))
    last_forward = max(i for i, op in enumerate(ops) if op == "F")
    before = begin
    for index, (action, start, finish) in enumerate(passes):
        message = needed_by(program, action)
        if message is None:
            yield "overhead", start - before
        else:
            phase = "warm-up" if index <= first_backward else "cool-down" if index > last_forward else "wait"
            there = min(max(made[message], before), start)
            yield phase, there - before
            yield "communication", start - there
        before = finish
    yield "cool-down", end - before
