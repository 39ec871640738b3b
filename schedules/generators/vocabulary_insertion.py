"""Insertion of the vocabulary passes S and T into an existing schedule (arXiv 2411.05288, section 5, and beyond it).

Every barrier between the last stage's forward and backward costs one interval, so with each barrier the forwards run
one microbatch further ahead of the backwards. S and T are then placed by the clock: S as soon as it can run, because
all shards wait for the slowest; T in idle time, at the latest after the next S.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import run_to_end
from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.generators.list_scheduler import Floor, dispatch, oldest
from zbcompile.schedules.generators.task import Orders, Task
from zbcompile.schedules.generators.v_half_v_min import BLOCKS, repeated_with_barriers
from zbcompile.schedules.ir.actions import BW, Action, B, F, Pair, S, Step, T, W, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Schedule


class VocabularyClock(Floor):
    """What `Floor` shows, and by rank how many S have run without their T (`states`). BW is shown as B."""

    def __init__(self, task: Task, barriers: int) -> None:
        super().__init__(task)
        stages, ranks, microbatches = range(task.placement.stages), range(task.ranks), range(task.microbatches)
        self.barriers, self.last = barriers, stages[-1]
        self.shard_of = [task.placement.stages_of(rank)[0] for rank in ranks]
        self.states = [0 for _ in ranks]
        self.started |= {(op, stage): 0 for op in (S, T) for stage in stages}
        self._times |= {op: self.costs.times(op) for op in (BW, S, T)}
        self._memory[BW] = self.costs.added(BW)
        self._dependents |= {(BW, s): [each for each in self._dependents[B, s] if each[0] == B] for s in stages}
        self._missing = {(op, m): len(ranks) for op in (S, T) for m in microbatches}
        self._latest = {(op, m): 0.0 for op in (S, T) for m in microbatches}

    def is_ready(self, action: Action) -> bool:
        return super().is_ready(_half(action))

    def start(self, rank: int, step: Step) -> tuple[float, list[tuple[float, int]]]:
        actions = flatten((step,))
        if isinstance(step, Pair):
            time = self.costs.pair_time(step.first.stage, step.second.stage, step.second.op, step.first.op)
        else:
            time = self.time(step)
        for action in actions:
            self.started[_half(action).op, action.stage] += 1
            if action.op in self._memory:
                self.memory[rank] += self.added(action)
            self.states[rank] += (action.op == S) - (action.op == T)
        end = self.now + time
        return end, [wake for action in actions for wake in self._finish(rank, action, end)]

    def _finish(self, rank: int, action: Action, end: float) -> Iterator[tuple[float, int]]:
        op, stage, microbatch = action
        if op in (S, T):
            yield from self._shard_done(op, microbatch, end)
        elif op == F and stage == self.last:  # its backward waits for the shards
            yield from self._shards(S, microbatch, end + self.costs.comm)
        else:
            yield from self._delivered(rank, action, end)

    def _shards(self, op: str, microbatch: int, time: float) -> Iterator[tuple[float, int]]:
        for rank, shard in enumerate(self.shard_of):
            self.ready_at[op, shard, microbatch] = time
            yield time, rank

    def _shard_done(self, op: str, microbatch: int, end: float) -> Iterator[tuple[float, int]]:
        key = (op, microbatch)
        self._missing[key] -= 1
        self._latest[key] = max(self._latest[key], end)
        if self._missing[key]:
            return
        time = self._latest[key] + self.costs.comm
        if op == S:
            yield from self._shards(T, microbatch, time)
        if op == (S, T)[self.barriers - 1]:
            self.ready_at[B, self.last, microbatch] = time
            yield time, self.placement.rank(self.last)


def _half(action: Action) -> Action:
    """BW makes and needs what B does."""
    return action._replace(op=B) if action.op == BW else action


STATES = 2  # how many S a rank may have run without their T: one waits for its collective while the next is computed
FLOATING = ("zb-v",)  # need no extra memory for the barrier: W fills the time that the wait leaves idle


def with_vocabulary(
    schedule: Schedule, barriers: int = 1, costs: Costs | None = None, extra: int | None = None
) -> Schedule:
    """`schedule` with S and T of one vocabulary shard on every rank.

    `barriers` is 1 or 2 (see `Schedule`), `extra` how many microbatches more than in `schedule` a rank may hold
    (default: one per barrier; none for zb-v). `costs` (default: S and T together take as long as F, everything else
    as `Costs.uniform`) say how long the passes take; the result is correct under any other costs. Raises
    `ScheduleError` for schedules with two model copies, and for a schedule that already has vocabulary passes.

    >>> from zbcompile.schedules import build, simulate
    >>> from zbcompile.schedules.generators.vocabulary_insertion import with_vocabulary
    >>> simulate(with_vocabulary(build("1f1b", ranks=4, microbatches=8), barriers=1)).peak_memory
    (5, 4, 3, 2)
    """
    _require_possible(schedule, barriers)
    costs = costs or textbook_costs(schedule.stages)
    extra = (0 if schedule.name in FLOATING else barriers) if extra is None else extra
    limits = _limits(schedule, costs, extra)
    found = [_inserted(schedule, orders, costs, barriers) for orders in _shifted(schedule, barriers, extra)]
    if all(isinstance(step, Action) and step.op != BW for order in schedule.orders for step in order):
        found.append(_greedy(schedule, costs, barriers, limits))  # all split, no pairs: can be ordered one by one
    candidates = [replace(schedule, orders=orders, barriers=barriers) for orders in found if orders is not None]
    fitting = [each for each in candidates if _fits(each, costs, limits)]
    if not fitting:
        raise ScheduleError(f"{schedule.name}: no order with {barriers} barriers fits; raise extra={extra}")
    return min(fitting, key=lambda each: max(run_to_end(each, costs)[1].end))


def textbook_costs(stages: int) -> Costs:
    """Equal times, S and T half a pass each: an output layer that costs as much as a stage of the model."""
    return replace(Costs.uniform(stages), vocab_s=(0.5,) * stages, vocab_t=(0.5,) * stages)


def _require_possible(schedule: Schedule, barriers: int) -> None:
    if barriers not in (1, 2):
        raise ScheduleError(f"barriers={barriers!r}; expected 1 (T may run at any time) or 2 (B waits for T)")
    if schedule.placement.kind == "dual":
        raise ScheduleError(f"{schedule.name}: two model copies have two last stages; use dualpipe-v instead")
    if schedule.shards:
        raise ScheduleError(f"{schedule.name} already has vocabulary passes")


def _limits(schedule: Schedule, costs: Costs, extra: int) -> list[float]:
    stages_of = schedule.placement.stages_of
    own = [sum(costs.activation[stage] for stage in stages_of(rank)) for rank in range(schedule.ranks)]
    return [peak + extra * more for peak, more in zip(peak_memory(schedule, costs), own, strict=True)]


def _fits(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> bool:
    passes = replace(costs, vocab_state=(0,) * costs.stages)
    return all(p <= limit * (1 + 1e-9) for p, limit in zip(peak_memory(schedule, passes), limits, strict=True))


def _shifted(schedule: Schedule, barriers: int, extra: int) -> list[Orders]:
    """The orders with forwards `barriers` microbatches further ahead, as far as the memory allows that."""
    room = min(barriers, extra)
    found: list[Orders] = [tuple(forwards_ahead(order, room * schedule.placement.chunks) for order in schedule.orders)]
    if schedule.name in BLOCKS:
        found.append(repeated_with_barriers(schedule.name, schedule.placement, schedule.microbatches, room))
    return found


def forwards_ahead(order: Sequence[Step], count: int) -> tuple[Step, ...]:
    """`order` with `count` forwards more in front of every backward; a pair takes a later forward."""
    forwards = iter([action for action in flatten(order) if action.op == F])
    moved: list[Step] = list(islice(forwards, count))
    for step in order:
        if isinstance(step, Pair):
            forward = next(forwards, None)
            moved.append(step.second if forward is None else Pair(forward, step.second))
        elif step.op != F:
            moved.append(step)
        else:
            moved += islice(forwards, 1)
    return tuple(moved)


def _inserted(schedule: Schedule, orders: Orders, costs: Costs, barriers: int) -> Orders | None:
    """Keep every rank's order of F, B and W, and put S and T between them; None if that cannot run to its end."""
    reached = [0] * schedule.ranks

    def choose(clock: VocabularyClock, rank: int) -> Step | None:
        urgent = _vocabulary_pass(clock, rank)
        if urgent is not None:
            return urgent
        if reached[rank] < len(orders[rank]):
            head = orders[rank][reached[rank]]
            if all(map(clock.is_ready, flatten((head,)))):
                reached[rank] += 1
                return head
        return _ready(clock, T, rank)

    return _dispatched(schedule, costs, barriers, choose)


def _dispatched(
    schedule: Schedule, costs: Costs, barriers: int, choose: Callable[[VocabularyClock, int], Step | None]
) -> Orders | None:
    """The orders that the ranks choose; None if these do not come to the end of the step."""
    clock = VocabularyClock(Task(schedule.placement, schedule.microbatches, costs), barriers)
    orders = dispatch(clock, choose)
    passes = [len(flatten(order)) - 2 * schedule.microbatches for order in orders]
    return orders if passes == [len(flatten(order)) for order in schedule.orders] else None


def _ready(clock: VocabularyClock, op: str, rank: int) -> Action | None:
    action = clock.next(op, clock.shard_of[rank])
    return action if clock.is_ready(action) else None


def _vocabulary_pass(clock: VocabularyClock, rank: int) -> Action | None:
    """The vocabulary pass that must not wait: S, and T if the last stage's backward or the next S waits for it."""
    due, state = _ready(clock, S, rank), _ready(clock, T, rank)
    if state is not None and (clock.barriers == 2 or (due is not None and clock.states[rank] >= STATES)):
        return state
    return due if clock.states[rank] < STATES else None


def _greedy(schedule: Schedule, costs: Costs, barriers: int, limits: Sequence[float]) -> Orders | None:
    """Every rank runs the first of these that is ready: the vocabulary pass that must not wait, F of the last stage, B,
    other forwards, T, W. Forwards stay inside the memory limit."""

    def choose(clock: VocabularyClock, rank: int) -> Step | None:
        ready = clock.ready(rank)
        forwards = (a for a in reversed(ready) if a.op == F and clock.has_room(rank, a, limits[rank]))
        forward = next(forwards, None)  # of the latest stage
        late = forward if forward is not None and forward.stage == clock.last else None
        backward, weight = (oldest(action for action in ready if action.op == op) for op in (B, W))
        return _vocabulary_pass(clock, rank) or late or backward or forward or _ready(clock, T, rank) or weight

    return _dispatched(schedule, costs, barriers, choose)
