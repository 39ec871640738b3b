"""ZB-1p and ZB-2p: the automatic heuristic under a memory limit (Qi et al., arXiv 2401.10241,
section 3.1).

It reads the times, hops and memory of each stage; the published runtime gives it medians.
"""

from collections.abc import Sequence
from itertools import product
from operator import le

from zbcompile.schedules.generators.list_scheduler import spans
from zbcompile.schedules.generators.task import Orders, Task
from zbcompile.schedules.generators.zb_h import zb_h1, zb_h2
from zbcompile.schedules.ir.actions import Action, B, F, W
from zbcompile.schedules.ir.costs import Costs

ROUNDING = 1e-9  # share up to which sums of measured times and sizes count as equal


def zb_1p(task: Task) -> Orders:
    """The shortest order found in the memory of 1F1B: p activations of its stage on every rank.

    If all stages are equal it is ZB-H1, which is optimal in that memory. On 2 ranks, 3 microbatches
    at equal times::

        F0.0  F0.1        B0.0  W0.0  F0.2  B0.1  W0.1  B0.2  W0.2
              F1.0  B1.0  F1.1  B1.1  W1.0  F1.2  B1.2  W1.1  W1.2
    """
    return _automatic(task, 1)


def zb_2p(task: Task) -> Orders:
    """The shortest order found in twice the memory of 1F1B: almost no bubble on a rank's own clock
    where W is light.

    On 2 ranks, 3 microbatches at equal times::

        F0.0  F0.1  F0.2  B0.0  W0.0  B0.1  W0.1  B0.2  W0.2
              F1.0  B1.0  F1.1  B1.1  F1.2  B1.2  W1.0  W1.1  W1.2
    """
    return _automatic(task, 2)


def _automatic(task: Task, times_1f1b: int) -> Orders:
    """Returns the best of the heuristic's eight variants and of the handcrafted orders that fit
    into the limit."""
    activation, limit = task.costs_or_equal.activation, task.memory_limit
    limits = [
        (times_1f1b * task.ranks * size if limit is None else limit) * (1 + ROUNDING)
        for size in activation
    ]
    candidates = [
        _Heuristic(task, limits, *switches).orders()
        for switches in product((False, True), repeat=3)
    ]
    handcrafted = zb_h1(task), zb_h2(task)
    candidates += [orders for orders in handcrafted if all(map(le, task.peaks(orders), limits))]
    return min(candidates, key=lambda orders: (*spans(task, orders), max(task.peaks(orders))))


class _Rank:
    """One rank while its order is written: clock, memory, idle time since its first action, what it
    has run."""

    def __init__(self, costs: Costs, stage: int, limit: float) -> None:
        self.stage, self.limit = stage, limit
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
        """Runs the next microbatch of `op`, whose input arrives then."""
        idle = max(0, arrival - self.clock)
        if self.order:
            self.bubble += idle
        self.clock += idle + self.time[op]
        self.order.append(Action(op, self.stage, len(self.ends[op])))
        self.ends[op].append(self.clock)
        self.memory += self.added[op]

    def weights_before_forward(self) -> int:
        """Returns how many pending W must run to make room for one more forward."""
        excess = self.memory + self.added[F] - self.limit
        return next((n for n in range(self.pending) if excess <= n * -self.added[W]), self.pending)


class _Heuristic:
    """One run of the published procedure with one setting of its switches.

    After the warm-up it goes round by round: in round i every rank may issue one F, first rank to
    last, and then issues B of microbatch i, last rank to first. W fills the waits. The switches:

    * `spare_first_backward`: a forward that would delay the first B is not issued before it (else
      it is, rather than leaving a gap);
    * `prioritise_backward`: skip a forward that would delay a B if the next rank has enough work;
    * `fill_every_gap`: run W in gaps too small for it even on ranks that can afford the gap.
    """

    def __init__(
        self,
        task: Task,
        limits: Sequence[float],
        spare_first_backward: bool,
        prioritise_backward: bool,
        fill_every_gap: bool,
    ) -> None:
        costs, last = task.costs_or_equal, task.ranks - 1
        self.microbatches, self.last = task.microbatches, last
        self.spare_first_backward, self.prioritise_backward = (
            spare_first_backward,
            prioritise_backward,
        )
        self.fill_every_gap = fill_every_gap
        self.ranks = [_Rank(costs, stage, limit) for stage, limit in enumerate(limits)]
        self._worst_bubble: float = 0
        self._tolerance = ROUNDING * max((*costs.forward, *costs.backward, *costs.weight))
        self._hop_down = [0, *(costs.hop(stage, stage, stage + 1) for stage in range(last))]
        self._hop_up = [*(costs.hop(stage, stage + 1, stage) for stage in range(last)), 0]

    def orders(self) -> Orders:
        """Returns the orders of all ranks."""
        self._warm_up()
        for microbatch in range(self.microbatches):
            for index, granted in enumerate(self._grants(microbatch) if microbatch else ()):
                if granted:
                    self._issue(F, index)
            for index in reversed(range(len(self.ranks))):
                self._issue(B, index)
        for rank in self.ranks:
            while rank.pending:
                rank.run(W)
        return tuple(tuple(rank.order) for rank in self.ranks)

    def _warm_up(self) -> None:
        """Issues one forward per rank, and more that fit into memory and into the wait for the
        first B."""
        for index in range(len(self.ranks)):
            self._issue(F, index)
        extra, ready = [0] * len(self.ranks), 0.0  # when the first B can start
        for index, rank in reversed(list(enumerate(self.ranks))):
            now = rank.clock
            while 1 + extra[index] < self.microbatches:
                if self.spare_first_backward:
                    worthwhile = now + rank.time[F] <= ready + self._tolerance
                else:
                    worthwhile = now < ready - self._tolerance
                if not worthwhile or rank.memory + (extra[index] + 1) * rank.added[F] > rank.limit:
                    break
                extra[index] += 1
                now += rank.time[F]
            ready = max(now, ready) + rank.time[B] + self._hop_up[index - 1]
        # a rank far from the end has more microbatches in flight
        for index in range(1, len(extra)):
            extra[index] = max(0, min(extra[index], extra[index - 1] - 1))
        for index, count in enumerate(extra):
            for _ in range(count):
                self._issue(F, index)

    def _issue(self, op: str, index: int) -> None:
        """Runs the next F or B of a rank, and before it W that fit into the wait for its input.

        A W that does not fit runs if waiting would raise the largest bubble.
        """
        rank, arrival = self.ranks[index], 0.0
        microbatch = len(rank.ends[op])
        if op == F:
            if index:
                arrival = self.ranks[index - 1].ends[F][microbatch] + self._hop_down[index]
            for _ in range(rank.weights_before_forward()):
                rank.run(W)
        else:
            while index == 0 and rank.pending and len(rank.ends[F]) == self.microbatches:
                rank.run(W)  # nothing waits for rank 0 any more
            if index < self.last:
                arrival = self.ranks[index + 1].ends[B][microbatch] + self._hop_up[index]
            else:
                arrival = rank.ends[F][microbatch]
        while rank.pending and rank.clock + rank.time[W] <= arrival:
            rank.run(W)
        wait = arrival - rank.clock
        costly = rank.bubble + wait > self._worst_bubble + self._tolerance
        if rank.pending and wait > self._tolerance and (costly or self.fill_every_gap):
            rank.run(W)
        rank.run(op, arrival)
        self._worst_bubble = max(self._worst_bubble, rank.bubble)

    def _grants(self, microbatch: int) -> list[bool]:
        """Returns which ranks issue a forward before B of `microbatch`; a rank does so only if the
        next rank does."""
        grants, estimate = [False] * len(self.ranks), 0.0  # of the end of that B on the successor
        for index, rank in reversed(list(enumerate(self.ranks))):
            arrival, forwards = estimate + self._hop_up[index], len(rank.ends[F])
            allowed = forwards < self.microbatches and (index == self.last or grants[index + 1])
            if allowed and self.prioritise_backward and index < self.last:
                end = rank.clock + rank.weights_before_forward() * rank.time[W] + rank.time[F]
                bubble = rank.bubble + max(0, arrival - rank.clock)
                # the successor does not need it yet
                is_early = forwards >= len(self.ranks[index + 1].ends[F]) + 2
                affordable = bubble <= self._worst_bubble + self._tolerance
                allowed = not (is_early and arrival < end and affordable)
            grants[index] = forwards <= microbatch or allowed
            estimate = (
                max(rank.clock + (rank.time[F] if grants[index] else 0), arrival) + rank.time[B]
            )
        return grants
