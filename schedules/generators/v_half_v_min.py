"""V-Half and V-Min: a half and a third of 1F1B's memory (Qi et al., arXiv 2405.15362).

A *building block* gives every pass of one microbatch a slot; repeated every six slots it is a schedule whose memory
follows from the lifespans inside the block. Then, as in the paper, it is squeezed (every rank runs its order as early
as it can) and its warm-up and cool-down are reordered without raising the peak.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from zbcompile.schedules.generators.list_scheduler import Floor, begins, dispatch, spans
from zbcompile.schedules.generators.task import Orders, Task
from zbcompile.schedules.ir.actions import Action, B, F, W
from zbcompile.schedules.ir.placement import Placement

Actions = tuple[tuple[Action, ...], ...]
PERIOD = 6  # F, B and W of two chunks, one slot each


class Block(NamedTuple):
    """Slots of the passes of microbatch 0 on one rank; 0 is the chunk on the way down, 1 the one on the way up."""

    f0: int
    f1: int
    b1: int
    b0: int

    def slots(self) -> dict[tuple[str, int], int]:
        """Slot by (operation, chunk): W takes the first slot after its B that is free in every period."""
        taken = {(F, 0): self.f0, (F, 1): self.f1, (B, 1): self.b1, (B, 0): self.b0}
        for chunk in (1, 0):
            slot = taken[B, chunk] + 1
            while slot % PERIOD in {other % PERIOD for other in taken.values()}:
                slot += 1
            taken[W, chunk] = slot
        return taken


def v_min_block(p: int, rank: int) -> Block:
    """One slot per hop in all four directions (table 8)."""
    gap = 0 if p % 3 else 2
    return Block(rank, 2 * p - 1 - rank, 2 * p + gap + rank, 4 * p + gap - 1 - rank)


def v_half_block(p: int, rank: int) -> Block:
    """Two slots per hop for F0 and B1, one for F1 and B0 (table 9)."""
    gap = 0 if p % 2 else 3
    return Block(2 * rank, 3 * p - 2 - rank, 3 * p + gap - 1 + 2 * rank, 6 * p + gap - 2 - rank)


def v_min(task: Task) -> Orders:
    """A third of 1F1B's memory: peak (p+4)//3 microbatches, bubble about 4p chunk passes at equal times.

    With unequal times every microbatch adds to the bubble.
    On 3 ranks, 2 microbatches::

        F0.0  F0.1                    F5.0  B5.0  F5.1  B5.1  W5.0  W5.1  B0.0  W0.0  B0.1  W0.1
              F1.0  F1.1        F4.0        F4.1  B4.0  W4.0  B4.1  B1.0  W1.0  B1.1  W4.1  W1.1
                    F2.0  F3.0  F2.1  F3.1              B3.0  B2.0  B3.1  B2.1  W3.0  W2.0  W3.1  W2.1
    """
    return _from_block(task, v_min_block)


def v_half(task: Task) -> Orders:
    """Half of 1F1B's memory: peak (p+2)//2 microbatches, bubble about 3p chunk passes at equal times.

    The steady state is free of bubbles if T_W + 2 T_B >= 2 T_F and T_W + 2 T_F >= 2 T_B.
    On 3 ranks, 2 microbatches::

        F0.0  F0.1                    F5.0  B5.0  F5.1  B5.1  W5.0  W5.1  B0.0  W0.0  B0.1  W0.1
              F1.0  F1.1        F4.0        F4.1  B4.0  W4.0  B4.1  B1.0  W4.1  B1.1  W1.0  W1.1
                    F2.0  F3.0  F2.1  F3.1              B3.0  B2.0  B3.1  B2.1  W3.0  W2.0  W3.1  W2.1
    """
    return _from_block(task, v_half_block)


BLOCKS: Mapping[str, Callable[[int, int], Block]] = {"v-min": v_min_block, "v-half": v_half_block}


def repeated_with_barriers(name: str, placement: Placement, microbatches: int, barriers: int) -> Actions:
    """The block of `name`, repeated, with room for the vocabulary's barriers: B1 and B0 come a period later for each.

    Every barrier adds one microbatch to the peak (arXiv 2411.05288, section 5.3).
    """

    def block(p: int, rank: int) -> Block:
        plain = BLOCKS[name](p, rank)
        return plain._replace(b1=plain.b1 + PERIOD * barriers, b0=plain.b0 + PERIOD * barriers)

    return _repeated(placement, microbatches, block)


def _from_block(task: Task, block: Callable[[int, int], Block]) -> Orders:
    """Returns the order that is made at equal times, as published, whatever the costs."""
    return _shortest_cool_down(replace(task, costs=None), block)


def _shortest_cool_down(task: Task, block: Callable[[int, int], Block]) -> Orders:
    """The block repeated, squeezed and reordered with the cool-down that makes the shortest step in the same memory.

    The best cool-down does not depend on m once there is a steady state, so the search uses 3p microbatches.
    """
    small = replace(task, microbatches=min(task.microbatches, 3 * task.ranks))
    squeezed = _squeezed(small, block)
    made = {size: _reordered(small, squeezed, size) for size in (0, task.ranks // 2, task.ranks // 2 + 1)}
    limit = max(small.peaks(made[0]))
    best = min(
        (size for size in made if max(small.peaks(made[size])) <= limit), key=lambda size: spans(small, made[size])
    )
    return made[best] if small == task else _reordered(task, _squeezed(task, block), best)


class _SqueezedBlock(NamedTuple):
    """The repeated block, when its actions begin if each rank runs them as early as it can, and its peak."""

    orders: Actions
    begins: Mapping[Action, float]
    peak: float


def _squeezed(task: Task, block: Callable[[int, int], Block]) -> _SqueezedBlock:
    orders = _repeated(task.placement, task.microbatches, block)
    return _SqueezedBlock(orders, begins(task, orders), max(task.peaks(orders)))


def _reordered(task: Task, squeezed: _SqueezedBlock, cool_down: int) -> Orders:
    """The squeezed orders with their idle gaps filled and a cool-down of the last `cool_down` microbatches."""
    reorder = _Reorder(squeezed, task.microbatches - cool_down)
    return dispatch(Floor(task), reorder.choose)


def _repeated(placement: Placement, microbatches: int, block: Callable[[int, int], Block]) -> Actions:
    """The building block for every microbatch, each rank sorted by slot."""
    orders = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        slots = block(placement.ranks, rank).slots()
        timed = [
            (slot + PERIOD * microbatch, Action(op, stages[chunk], microbatch))
            for (op, chunk), slot in slots.items()
            for microbatch in range(microbatches)
        ]
        orders.append(tuple(action for _, action in sorted(timed)))
    return tuple(orders)


class _Reorder:
    """Chooses the next action of a rank so that none begins later than in the squeezed order.

    Idle gaps are filled with later actions that end before the next one in order begins. From the B of
    microbatch `free_from` on, a rank is in its cool-down: backwards as soon as they can, W in the time that is left.
    """

    def __init__(self, squeezed: _SqueezedBlock, free_from: int) -> None:
        self._orders, self._begins, self._limit = squeezed
        self._free_from = free_from
        self._reached = [0] * len(self._orders)
        self._cooling = [False] * len(self._orders)

    def choose(self, floor: Floor, rank: int) -> Action | None:
        head = self._head(floor, rank)
        if head is None:
            return None
        if not self._cooling[rank]:
            self._cooling[rank] = head.op == B and head.microbatch >= self._free_from
        if self._cooling[rank]:
            return min(floor.ready(rank), key=self._cool_down_preference, default=None)
        if floor.is_ready(head):
            return head
        fillers = [action for action in floor.ready(rank) if self._fits(floor, rank, action, head)]
        return min(fillers, key=self._begins.__getitem__, default=None)

    def _cool_down_preference(self, action: Action) -> tuple[int, float]:
        return "FBW".index(action.op), self._begins[action]

    def _head(self, floor: Floor, rank: int) -> Action | None:
        order, started = self._orders[rank], floor.started
        for at in range(self._reached[rank], len(order)):
            op, stage, microbatch = order[at]
            if started[op, stage] <= microbatch:
                self._reached[rank] = at
                return order[at]
        return None

    def _fits(self, floor: Floor, rank: int, action: Action, head: Action) -> bool:
        """Whether `action` may run before `head`: it delays nothing and no later peak grows beyond the limit."""
        if floor.now + floor.time(action) > self._begins[head]:
            return False
        memory = floor.memory[rank] + floor.added(action)
        if floor.added(action) <= 0:
            return True
        for skipped in self._orders[rank][self._reached[rank] :]:
            if memory > self._limit:
                return False
            if skipped == action:
                return True
            if floor.started[skipped.op, skipped.stage] <= skipped.microbatch:
                memory += floor.added(skipped)
        return False
