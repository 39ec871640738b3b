"""ZB-1p and ZB-2p: the automatic heuristic under a memory limit (Qi et al., arXiv 2401.10241, section 3.1).

It reads the times, hops and memory of each stage; the published runtime gives it medians.
"""

from collections.abc import Sequence
from itertools import product
from operator import le
from typing import NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.generators.list_scheduler import spans
from zbcompile.schedules.generators.task import Orders, Task
from zbcompile.schedules.generators.zb_h import zb_h1, zb_h2
from zbcompile.schedules.ir.actions import Action, B, F, W
from zbcompile.schedules.ir.costs import Costs

ROUNDING = 1e-9  # share up to which sums of measured times and sizes count as equal


def zb_1p(task: Task) -> Orders:
    """The shortest order found in the memory of 1F1B: p activations of its own stage on every rank.

    If all stages are alike it is ZB-H1, which is optimal in that memory. On 2 ranks, 3 microbatches at equal times::

        F0.0  F0.1        B0.0  W0.0  F0.2  B0.1  W0.1  B0.2  W0.2
              F1.0  B1.0  F1.1  B1.1  W1.0  F1.2  B1.2  W1.1  W1.2
    """
    return _automatic(task, 1)


def zb_2p(task: Task) -> Orders:
    """The shortest order found in twice the memory of 1F1B: almost no bubble on a rank's own clock where W is light.

    On 2 ranks, 3 microbatches at equal times::

        F0.0  F0.1  F0.2  B0.0  W0.0  B0.1  W0.1  B0.2  W0.2
              F1.0  B1.0  F1.1  B1.1  F1.2  B1.2  W1.0  W1.1  W1.2
    """
    return _automatic(task, 2)


def _automatic(task: Task, times_1f1b: int) -> Orders:
    """The best of the heuristic's eight variants and of the handcrafted orders that fit into the limit."""
    limits = _limits(task, times_1f1b)
    switches = (Switches(*flags) for flags in product((False, True), repeat=3))
    found = [Heuristic(task, limits, each).orders() for each in switches]
    most = [limit * (1 + ROUNDING) for limit in limits]
    handcrafted = (each for each in (zb_h1(task), zb_h2(task)) if all(map(le, task.peaks(each), most)))

    def preference(orders: Orders) -> tuple[float, float, float]:
        return *spans(task, orders), max(task.peaks(orders))

    return min((*found, *handcrafted), key=preference)


def _limits(task: Task, times_1f1b: int) -> list[float]:
    activation = task.costs_or_equal.activation
    if task.memory_limit is None:
        return [times_1f1b * task.ranks * size for size in activation]
    largest = max(activation)
    if task.memory_limit < largest:
        where = f"stage {activation.index(largest)} alone needs {largest} for one microbatch"
        raise ScheduleError(f"memory_limit={task.memory_limit}: {where}; allow at least that")
    return [task.memory_limit] * task.ranks


class Switches(NamedTuple):
    """The switches that the heuristic is tried with and without.

    * `spare_first_backward`: a forward that would delay the first B is not issued before it (else it is, rather than
      leaving a gap);
    * `prioritise_backward`: skip a forward that would delay a B if the next rank has enough work;
    * `fill_every_gap`: run W in gaps too small for it even on ranks that can afford the gap.
    """

    spare_first_backward: bool
    prioritise_backward: bool
    fill_every_gap: bool


class _Rank:
    """One rank while its order is written: clock, memory, idle time since its first action, what it has run."""

    def __init__(self, costs: Costs, stage: int, limit: float) -> None:
        self.stage = stage
        self.limit = limit * (1 + ROUNDING)
        self.time = {op: costs.time(op, stage) for op in (F, B, W)}
        self.added = {op: costs.added(op)[stage] for op in (F, B, W)}
        self.clock: float = 0
        self.memory: float = 0
        self.bubble: float = 0
        self.order: list[Action] = []
        self.ends: dict[str, list[float]] = {F: [], B: [], W: []}

    @property
    def pending(self) -> int:
        """How many W are left to run."""
        return len(self.ends[B]) - len(self.ends[W])

    def run(self, op: str, arrival: float = 0) -> None:
        """The next microbatch of `op`, whose input arrives then."""
        idle = max(0, arrival - self.clock)
        if self.order:
            self.bubble += idle
        self.clock += idle + self.time[op]
        self.order.append(Action(op, self.stage, len(self.ends[op])))
        self.ends[op].append(self.clock)
        self.memory += self.added[op]

    def flush(self) -> None:
        while self.pending:
            self.run(W)

    def weights_before_forward(self) -> int:
        """How many pending W must run to make room for one more forward."""
        excess = self.memory + self.added[F] - self.limit
        count = 0
        while excess > count * -self.added[W] and count < self.pending:
            count += 1
        return count


class Heuristic:
    """One run of the published procedure with one setting of its switches.

    After the warm-up it goes round by round: in round i every rank may issue one F, first rank to last, and then issues
    B of microbatch i, last rank to first. W fills the waits.
    """

    def __init__(self, task: Task, limits: Sequence[float], switches: Switches) -> None:
        costs = task.costs_or_equal
        self.microbatches = task.microbatches
        self.switches = switches
        self.ranks = [_Rank(costs, stage, limit) for stage, limit in enumerate(limits)]
        self._worst_bubble: float = 0
        self._tolerance = ROUNDING * max((*costs.forward, *costs.backward, *costs.weight))
        self._hop_down = [0, *(costs.hop(stage, stage, stage + 1) for stage in range(task.ranks - 1))]
        self._hop_up = [*(costs.hop(stage, stage + 1, stage) for stage in range(task.ranks - 1)), 0]

    def orders(self) -> Orders:
        self._warm_up()
        self._backwards()
        for microbatch in range(1, self.microbatches):
            for index, granted in enumerate(self._grants(microbatch)):
                if granted:
                    self._forward(index)
            self._backwards()
        for rank in self.ranks:
            rank.flush()
        return tuple(tuple(rank.order) for rank in self.ranks)

    def _warm_up(self) -> None:
        for index in range(len(self.ranks)):
            self._forward(index)
        extra = self._extra_forwards()
        for index in range(1, len(extra)):  # a rank far from the end has more microbatches in flight
            extra[index] = max(0, min(extra[index], extra[index - 1] - 1))
        for index, count in enumerate(extra):
            for _ in range(count):
                self._forward(index)

    def _extra_forwards(self) -> list[int]:
        """Per rank, how many more forwards fit into memory and into the wait for the first B."""
        extra = [0] * len(self.ranks)
        ready: float = 0
        for index, rank in reversed(list(enumerate(self.ranks))):
            now = rank.clock
            while 1 + extra[index] < self.microbatches and self._worth_issuing(rank, extra[index], now, ready):
                extra[index] += 1
                now += rank.time[F]
            ready = max(now, ready) + rank.time[B] + self._hop_up[index - 1]
        return extra

    def _worth_issuing(self, rank: _Rank, issued: int, now: float, ready: float) -> bool:
        if rank.memory + (issued + 1) * rank.added[F] > rank.limit:
            return False
        if self.switches.spare_first_backward:
            return now + rank.time[F] <= ready + self._tolerance
        return now < ready - self._tolerance

    def _backwards(self) -> None:
        for index in reversed(range(len(self.ranks))):
            self._backward(index)

    def _forward(self, index: int) -> None:
        rank = self.ranks[index]
        arrival: float = 0
        if index:
            arrival = self.ranks[index - 1].ends[F][len(rank.ends[F])] + self._hop_down[index]
        for _ in range(rank.weights_before_forward()):
            rank.run(W)
        self._fill(rank, arrival)
        rank.run(F, arrival)
        self._worst_bubble = max(self._worst_bubble, rank.bubble)

    def _backward(self, index: int) -> None:
        rank = self.ranks[index]
        microbatch = len(rank.ends[B])
        if index == 0 and len(rank.ends[F]) == self.microbatches:
            rank.flush()  # nothing waits for rank 0 any more
        if index + 1 < len(self.ranks):
            arrival = self.ranks[index + 1].ends[B][microbatch] + self._hop_up[index]
        else:
            arrival = rank.ends[F][microbatch]
        self._fill(rank, arrival)
        rank.run(B, arrival)
        self._worst_bubble = max(self._worst_bubble, rank.bubble)

    def _fill(self, rank: _Rank, arrival: float) -> None:
        """Run the W that fit before `arrival`, and one that does not fit if waiting would raise the largest bubble."""
        while rank.pending and rank.clock + rank.time[W] <= arrival:
            rank.run(W)
        wait = arrival - rank.clock
        costly = rank.bubble + wait > self._worst_bubble + self._tolerance
        if rank.pending and wait > self._tolerance and (costly or self.switches.fill_every_gap):
            rank.run(W)

    def _grants(self, microbatch: int) -> list[bool]:
        """The ranks that issue a forward before B of `microbatch`; a rank does so only if the next rank does."""
        grants = [False] * len(self.ranks)
        estimate: float = 0  # of the end of that B on the successor
        for index, rank in reversed(list(enumerate(self.ranks))):
            arrival = estimate + self._hop_up[index]
            allowed = index + 1 == len(self.ranks) or grants[index + 1]
            left = len(rank.ends[F]) < self.microbatches
            must = len(rank.ends[F]) <= microbatch
            grants[index] = must or (allowed and left and not self._better_skipped(index, arrival))
            now = rank.clock + (rank.time[F] if grants[index] else 0)
            estimate = max(now, arrival) + rank.time[B]
        return grants

    def _better_skipped(self, index: int, arrival: float) -> bool:
        """Whether B, expected at `arrival`, should not wait for a forward that the successor does not need yet."""
        if not self.switches.prioritise_backward or index + 1 == len(self.ranks):
            return False
        rank, successor = self.ranks[index], self.ranks[index + 1]
        if len(rank.ends[F]) < len(successor.ends[F]) + 2:
            return False
        end = rank.clock + rank.weights_before_forward() * rank.time[W] + rank.time[F]
        bubble = max(0, arrival - rank.clock)
        return arrival < end and rank.bubble + bubble <= self._worst_bubble + self._tolerance
