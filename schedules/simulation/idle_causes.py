"""Why a rank stands still: the cause of every gap in a simulated step."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from zbcompile.amounts import plain
from zbcompile.schedules.execution.event_loop import Outcome
from zbcompile.schedules.ir.actions import EXCHANGES, SENDS, Action, B, F, Step, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import (
    SEND_OF,
    Need,
    awaited,
    needs,
    other_end,
    receives_before,
    source,
    target,
)
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.schedules.ir.schedule import Lowered, Schedule, parts

ROUNDING = 1e-9  # relative: sums of the same times differ in their last bits
Cause = Literal["warm-up", "wait", "imbalance", "communication", "cool-down", "overhead"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Idle(NamedTuple):
    """`rank` does nothing from `start` to `end`, before it runs `step` (`None`: it has nothing left to do).

    `cause` is one of

    * `communication`: what `step` needs has been made and travels (or, in a lowered program, the rank waits in a SEND
      until its receive is posted);
    * `warm-up`: the rank has not begun its first backward: the pipeline fills;
    * `cool-down`: the rank has run its last forward: the pipeline drains, until the last rank has finished;
    * `imbalance`: the rank at the root of the wait has more work in the step than this one;
    * `wait`: any other wait: the order of the schedule does not fit the costs;
    * `overhead`: its inputs were ready; only in a measured step: what the host does between passes.

    `action` on `source` is what `step` waits for; the root is found by going back from there to a rank that was busy.
    """

    rank: int
    start: float
    end: float
    cause: Cause
    step: Step | None
    action: Action | None
    source: int | None

    def __str__(self) -> str:
        ready = "its inputs were ready" if self.cause == "overhead" else "waits for the step before"
        waits = f"waits for {self.action} of rank {self.source}" if self.action else ready
        waits = waits if self.step else "waits until the last rank has finished"
        return f"rank {self.rank} idle {plain(self.start)} to {plain(self.end)}: {self.cause}, {waits}"


class _Gap(NamedTuple):
    start: float
    end: float
    before: int  # index of the step behind it


class Input(NamedTuple):
    """Something that a step waited for: who made it, in which step, when it had arrived."""

    action: Action
    rank: int
    step: int
    made: float
    arrived: float


class Waits:
    """Follows waits back through a finished run."""

    def __init__(self, program: Schedule | Lowered, costs: Costs, outcome: Outcome) -> None:
        self.schedule, self.orders = parts(program)
        self.lowered = isinstance(program, Lowered)
        self.costs, self.run = costs, outcome
        self.finish = max(end[-1] for end in outcome.end if end)
        self.least = ROUNDING * self.finish
        self.busy = [sum(end) - sum(begin) for begin, end in zip(outcome.begin, outcome.end, strict=True)]
        self.position = {  # B stands for BW too
            (KINDS[action.op].event, action.stage, action.microbatch): (rank, index)
            for rank, order in enumerate(self.orders)
            for index, step in enumerate(order)
            for action in flatten((step,))
        }
        self.shards = self.schedule.shards
        self.awaits = awaited(self.schedule, self.lowered) if self.shards else {}

    def of_rank(self, rank: int) -> Iterator[Idle]:
        """Every interval in which `rank` stands still, from the first start to the last end of all ranks. They add up
        to that time less the rank's passes."""
        order, begin, end = self.orders[rank], self.run.begin[rank], self.run.end[rank]
        ops = [{action.op for action in flatten((step,))} for step in order]
        first_backward = next((i for i, kinds in enumerate(ops) if B in {KINDS[op].event for op in kinds}), len(order))
        last_forward = max((i for i, kinds in enumerate(ops) if F in kinds), default=-1)
        for index, (previous, start) in enumerate(zip([0, *end[:-1]], begin, strict=True)):
            if start - previous > self.least:
                late: Cause | None = "cool-down" if index > last_forward else None
                phase = "warm-up" if index <= first_backward else late
                yield from self._explain(rank, _Gap(previous, start, index), phase)
        if end and self.finish - end[-1] > self.least:
            yield Idle(rank, end[-1], self.finish, "cool-down", None, None, None)

    def _explain(self, rank: int, gap: _Gap, phase: Cause | None) -> Iterator[Idle]:
        """Splits a gap: the wait until the input of the next step was made, then the time that it travelled."""
        step = self.orders[rank][gap.before]
        needed = self.held_up(rank, gap.before)
        if needed is None:  # what GATHER waits for was made in the step before
            awaits = isinstance(step, Action) and KINDS[step.op].scope == "stage" and KINDS[step.op].before
            yield Idle(rank, gap.start, gap.end, "communication" if awaits else "overhead", step, None, None)
            return
        made = gap.start if step[0] in SENDS else min(max(needed.made, gap.start), gap.end)
        if made - gap.start > self.least:
            more = self.busy[self._root(needed)] > self.busy[rank] * (1 + ROUNDING)
            cause = phase or ("imbalance" if more else "wait")
            yield Idle(rank, gap.start, made, cause, step, needed.action, needed.rank)
        if gap.end - made > self.least:
            yield Idle(rank, made, gap.end, "communication", step, needed.action, needed.rank)

    def _root(self, needed: Input) -> int:
        """The busy rank at the root of a wait: follows waits back as long as their rank was waiting, too."""
        rank, index = needed.rank, needed.step
        while (before := self.held_up(rank, index)) is not None:
            rank, index = before.rank, before.step
        return rank

    def held_up(self, rank: int, index: int) -> Input | None:
        """The last input of a step to arrive; None if all had arrived when the rank ended the step before."""
        last = max(self.inputs(rank, index), key=lambda needed: needed.arrived, default=None)
        free = self.run.end[rank][index - 1] if index else 0
        return last if last is not None and last.arrived > free else None

    def inputs(self, rank: int, index: int) -> Iterator[Input]:
        """Everything that a step waited for. One half of a pair may make the input of the other."""
        before = self.orders[rank][index - 1] if index else None
        if before is not None and before[0] in EXCHANGES:  # each rank waits until all have arrived
            yield from (self._made(Action(before[0], r, 0), 0) for r in range(self.schedule.ranks))
        for action in flatten((self.orders[rank][index],)):
            yield from (each for each in self._inputs(rank, action) if (each.rank, each.step) != (rank, index))

    def is_collective(self, rank: int, index: int) -> bool:
        """Whether a step waits for every vocabulary shard, or takes what a collective brings."""
        actions = flatten((self.orders[rank][index],))
        return any((a.op, a.stage) in self.awaits or KINDS[a.op].made_at for a in actions)

    def _inputs(self, rank: int, action: Action) -> Iterator[Input]:
        """Everything that must have been made, here or on another rank, before `action` may begin."""
        op, stage, microbatch = action
        kind = KINDS[op]
        if (op, stage) in self.awaits:
            by = self.awaits[op, stage]
            yield from (self._made(Action(by, shard, microbatch), self.costs.delay(by)) for shard in self.shards)
        if kind.role == "send" and (there := target(op, stage, self.schedule.stages)) is not None:
            yield self._made(Action(other_end(op), there, microbatch), 0)
        if kind.scope == "stage" and kind.takes in self.schedule.ops:
            yield self._made(Action(kind.takes, stage, 0), self.costs.delay(kind.takes, stage))
        if kind.role not in ("compute", "collective") or kind.scope == "stage":
            return
        for at in self._straight_from(op, stage):
            yield self._input(rank, stage, Action(kind.event, at.stage, microbatch), at.op)
        for made in (Action(*need, microbatch) for need in needs(op, stage, self.schedule.stages)):
            if kind.role == "compute" and not kind.made_at:
                yield self._input(rank, stage, made)
            elif kind.role == "compute":
                yield self._made(made, self.costs.delay(made.op))
            elif self.position[made][0] == rank:
                yield self._made(made, 0)

    def _straight_from(self, op: str, stage: int) -> Iterator[Need]:
        """The sends of a lowered program, of stages that are not the next, that bring what an operation needs."""
        for receive in receives_before(self.schedule, op, stage) if self.lowered else ():
            at = source(receive, stage, self.schedule.stages)
            if KINDS[receive].hops > 1 and at is not None:
                yield Need(other_end(receive), at)

    def _input(self, rank: int, stage: int, action: Action, send: str = "") -> Input:
        """The result of another pass, or in a lowered program its message from another rank."""
        source, _ = self.position[action]
        if source == rank:
            return self._made(action, 0)
        delay = self.costs.hop(min(stage, action.stage), source, rank)
        return self._made(action._replace(op=send or SEND_OF[action.op]) if self.lowered else action, delay)

    def _made(self, action: Action, delay: float) -> Input:
        source, index = self.position[action]
        made = self.run.end[source][index]
        return Input(self._as_run(action, source, index), source, index, made, made + delay)

    def _as_run(self, action: Action, rank: int, index: int) -> Action:
        """B or BW, whichever it was."""
        step = self.orders[rank][index]
        same = (a for a in flatten((step,)) if (KINDS[a.op].event, *a[1:]) == action)
        return next(same, action)
