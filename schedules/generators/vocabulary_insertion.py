"""Insertion of the vocabulary passes S and T into an existing schedule (arXiv 2411.05288, section
5, and beyond it).

Every barrier between the last stage's forward and backward costs one interval, so with each barrier
the forwards run one microbatch further ahead of the backwards. S and T are then placed by the
clock: S as soon as it can run, because all shards wait for the slowest; T in idle time, at the
latest after the next S.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import run_to_end
from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.generators.list_scheduler import DispatchState, dispatch, oldest
from zbcompile.schedules.generators.task import Orders, Task
from zbcompile.schedules.generators.v_half_v_min import BLOCKS, repeated_with_barriers
from zbcompile.schedules.ir.actions import BW, Action, B, F, Pair, S, Step, T, W, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Schedule

# S of a rank without their T: one waits for its collective while the next is computed
MAX_PENDING_T = 2
NO_EXTRA_MEMORY = ("zb-v",)  # W fills the time that the wait for the barrier leaves idle


def with_vocabulary(
    schedule: Schedule, barriers: int = 1, costs: Costs | None = None, extra: int | None = None
) -> Schedule:
    """`schedule` with S and T of one vocabulary shard on every rank.

    `barriers` is 1 or 2 (see `Schedule`), `extra` how many microbatches more than in `schedule` a
    rank may hold (default: one per barrier; none for zb-v). `costs` (default: S and T together take
    as long as F, everything else as `Costs.uniform`) say how long the passes take; the result is
    correct under any other costs. Raises `ScheduleError` for schedules with two model copies, and
    for a schedule that already has vocabulary passes.

    >>> from zbcompile.schedules import build, simulate
    >>> from zbcompile.schedules.generators.vocabulary_insertion import with_vocabulary
    >>> simulate(with_vocabulary(build("1f1b", ranks=4, microbatches=8), barriers=1)).peak_memory
    (5, 4, 3, 2)
    """
    if barriers not in (1, 2):
        raise ScheduleError(
            f"barriers={barriers!r}; expected 1 (T may run at any time) or 2 (B waits for T)"
        )
    if schedule.placement.copies > 1:
        raise ScheduleError(
            f"{schedule.name}: two model copies have two last stages; use dualpipe-v instead"
        )
    if schedule.shards:
        raise ScheduleError(f"{schedule.name} already has vocabulary passes")
    placement, ranks = schedule.placement, range(schedule.ranks)
    costs = costs or textbook_costs(schedule.stages)
    extra = (0 if schedule.name in NO_EXTRA_MEMORY else barriers) if extra is None else extra
    microbatch = [
        sum(costs.activation[stage] for stage in placement.stages_of(rank)) for rank in ranks
    ]
    limits = [
        peak + extra * size
        for peak, size in zip(peak_memory(schedule, costs), microbatch, strict=True)
    ]
    ahead = min(barriers, extra)  # microbatches, as far as the memory allows
    candidates = [
        tuple(forwards_ahead(order, ahead * placement.chunks) for order in schedule.orders)
    ]
    if schedule.name in BLOCKS:
        candidates.append(
            repeated_with_barriers(schedule.name, placement, schedule.microbatches, ahead)
        )
    preferences = [_follow(orders) for orders in candidates]
    if all(
        isinstance(step, Action) and step.op != BW for order in schedule.orders for step in order
    ):
        # all split, no pairs: can be ordered one by one
        preferences.append(_prefer_late_stages(limits))
    lengths, fitting = [len(flatten(order)) for order in schedule.orders], list[Schedule]()
    without_shards = replace(costs, vocab_state=(0,) * costs.stages)
    for choose in preferences:
        state = DispatchState(Task(placement, schedule.microbatches, costs), barriers)
        orders = dispatch(state, choose)
        # it runs to its end
        if [len(flatten(order)) - 2 * schedule.microbatches for order in orders] == lengths:
            inserted = replace(schedule, orders=orders, barriers=barriers)
            peaks = peak_memory(inserted, without_shards)
            fitting += [inserted] * all(
                p <= limit * (1 + 1e-9) for p, limit in zip(peaks, limits, strict=True)
            )
    if not fitting:
        raise ScheduleError(
            f"{schedule.name}: no order with {barriers} barriers fits; raise extra={extra}"
        )
    return min(fitting, key=lambda inserted: max(run_to_end(inserted, costs)[1].end))


def textbook_costs(stages: int) -> Costs:
    """Returns equal times, S and T half a pass each: an output layer that costs as much as a stage
    of the model."""
    return replace(Costs.uniform(stages), vocab_s=(0.5,) * stages, vocab_t=(0.5,) * stages)


def forwards_ahead(order: Sequence[Step], count: int) -> tuple[Step, ...]:
    """Returns `order` with `count` forwards more in front of every backward; a pair takes a later
    forward."""
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


Preference = Callable[[DispatchState, int], Step | None]


def _follow(orders: Orders) -> Preference:
    """Keeps every rank's order of F, B and W, and puts S and T between them."""
    reached = [0] * len(orders)

    def choose(state: DispatchState, rank: int) -> Step | None:
        urgent = _urgent_vocabulary_pass(state, rank)
        if urgent is None and reached[rank] < len(orders[rank]):
            head = orders[rank][reached[rank]]
            if all(map(state.is_ready, flatten((head,)))):
                reached[rank] += 1
                return head
        return urgent or _next_vocabulary_pass(state, T, rank)

    return choose


def _prefer_late_stages(limits: Sequence[float]) -> Preference:
    """Runs the first of these that is ready: the vocabulary pass that must not wait, F of the last
    stage, B, other forwards, T, W. Forwards stay inside the memory limit."""

    def choose(state: DispatchState, rank: int) -> Step | None:
        ready = state.ready(rank)
        forwards = (
            a for a in reversed(ready) if a.op == F and state.fits_forward(rank, a, limits[rank])
        )
        forward = next(forwards, None)  # of the latest stage
        of_last_stage = (
            forward if forward is not None and forward.stage == state.placement.stages - 1 else None
        )
        backward, weight = (oldest(action for action in ready if action.op == op) for op in (B, W))
        urgent, pending = (
            _urgent_vocabulary_pass(state, rank),
            _next_vocabulary_pass(state, T, rank),
        )
        return urgent or of_last_stage or backward or forward or pending or weight

    return choose


def _next_vocabulary_pass(state: DispatchState, op: str, rank: int) -> Action | None:
    return state.next_ready(op, state.placement.stages_of(rank)[0])


def _urgent_vocabulary_pass(state: DispatchState, rank: int) -> Action | None:
    """Returns the vocabulary pass that must not wait: S, and T if the last stage's backward or the
    next S needs it."""
    shard = state.placement.stages_of(rank)[0]
    ready_s, ready_t = (_next_vocabulary_pass(state, op, rank) for op in (S, T))
    is_full = state.started[S, shard] - state.started[T, shard] >= MAX_PENDING_T
    if ready_t is not None and (state.barriers == 2 or (ready_s is not None and is_full)):
        return ready_t
    return None if is_full else ready_s
