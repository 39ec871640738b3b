"""V-Half and V-Min: a half and a third of 1F1B's memory (Qi et al., arXiv 2405.15362).

A *building block* gives every pass of one microbatch a slot; repeated every six slots it is a
schedule whose memory follows from the lifespans inside the block. Then, as in the paper, it is
squeezed (every rank runs its order as early as it can) and its warm-up and cool-down are reordered
without raising the peak.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from zbcompile.schedules.generators.list_scheduler import DispatchState, dispatch, spans, starts
from zbcompile.schedules.generators.task import Orders, Task
from zbcompile.schedules.ir.actions import Action, B, F, W
from zbcompile.schedules.ir.placement import Placement

Actions = tuple[tuple[Action, ...], ...]
PERIOD = 6  # F, B and W of two chunks, one slot each


class Block(NamedTuple):
    """Slots of the passes of microbatch 0 on one rank; 0 is the chunk on the way down, 1 the one on
    the way up."""

    f0: int
    f1: int
    b1: int
    b0: int

    def slots(self) -> dict[tuple[str, int], int]:
        """Returns the slot by operation and chunk: W takes the first one after its B that is free
        in every period."""
        slots = {(F, 0): self.f0, (F, 1): self.f1, (B, 1): self.b1, (B, 0): self.b0}
        for chunk in (1, 0):
            slot = slots[B, chunk] + 1
            while slot % PERIOD in {used % PERIOD for used in slots.values()}:
                slot += 1
            slots[W, chunk] = slot
        return slots


def v_min_block(p: int, rank: int) -> Block:
    """Returns one slot per hop in all four directions (table 8)."""
    gap = 0 if p % 3 else 2
    return Block(rank, 2 * p - 1 - rank, 2 * p + gap + rank, 4 * p + gap - 1 - rank)


def v_half_block(p: int, rank: int) -> Block:
    """Returns two slots per hop for F0 and B1, one for F1 and B0 (table 9)."""
    gap = 0 if p % 2 else 3
    return Block(2 * rank, 3 * p - 2 - rank, 3 * p + gap - 1 + 2 * rank, 6 * p + gap - 2 - rank)


def v_min(task: Task) -> Orders:
    """A third of 1F1B's memory: peak (p+4)//3 microbatches, bubble about 4p chunk passes at equal
    times.

    With unequal times every microbatch adds to the bubble.
    On 3 ranks, 2 microbatches::

        F0.0  F0.1                    F5.0  B5.0  F5.1  B5.1  W5.0  W5.1  B0.0  W0.0
              F1.0  F1.1        F4.0        F4.1  B4.0  W4.0  B4.1  B1.0  W1.0  B1.1
                    F2.0  F3.0  F2.1  F3.1              B3.0  B2.0  B3.1  B2.1  W3.0

        B0.1  W0.1
        W4.1  W1.1
        W2.0  W3.1  W2.1
    """
    return _from_block(task, "v-min")


def v_half(task: Task) -> Orders:
    """Half of 1F1B's memory: peak (p+2)//2 microbatches, bubble about 3p chunk passes at equal
    times.

    The steady state is free of bubbles if T_W + 2 T_B >= 2 T_F and T_W + 2 T_F >= 2 T_B.
    On 3 ranks, 2 microbatches::

        F0.0  F0.1                    F5.0  B5.0  F5.1  B5.1  W5.0  W5.1  B0.0  W0.0
              F1.0  F1.1        F4.0        F4.1  B4.0  W4.0  B4.1  B1.0  W4.1  B1.1
                    F2.0  F3.0  F2.1  F3.1              B3.0  B2.0  B3.1  B2.1  W3.0

        B0.1  W0.1
        W1.0  W1.1
        W2.0  W3.1  W2.1
    """
    return _from_block(task, "v-half")


BLOCKS: Mapping[str, Callable[[int, int], Block]] = {"v-min": v_min_block, "v-half": v_half_block}


def repeated_with_barriers(
    name: str, placement: Placement, microbatches: int, barriers: int
) -> Actions:
    """Returns the block of `name` for every microbatch, each rank sorted by slot.

    With room for the vocabulary's barriers: B1 and B0 come a period later for each, which adds one
    microbatch to the peak (arXiv 2411.05288, section 5.3).
    """
    orders = []
    for rank in range(placement.ranks):
        stages, block = placement.stages_of(rank), BLOCKS[name](placement.ranks, rank)
        block = block._replace(b1=block.b1 + PERIOD * barriers, b0=block.b0 + PERIOD * barriers)
        timed = [
            (slot + PERIOD * microbatch, Action(op, stages[chunk], microbatch))
            for (op, chunk), slot in block.slots().items()
            for microbatch in range(microbatches)
        ]
        orders.append(tuple(action for _, action in sorted(timed)))
    return tuple(orders)


def _from_block(task: Task, name: str) -> Orders:
    """Returns the block repeated, squeezed and reordered, at equal times, as published, whatever
    the costs.

    Of three sizes of the cool-down it has the one that makes the shortest step in the same memory.
    The best one does not depend on m once there is a steady state, so it is sought with 3p
    microbatches.
    """
    task = replace(task, costs=None)
    small = replace(task, microbatches=min(task.microbatches, 3 * task.ranks))
    squeezed = _squeeze(small, name)
    sizes = (0, task.ranks // 2, task.ranks // 2 + 1)
    candidates = {size: _Reordering(small, squeezed, size).orders() for size in sizes}
    limit = max(small.peaks(candidates[0]))
    fitting = (size for size, orders in candidates.items() if max(small.peaks(orders)) <= limit)
    best = min(fitting, key=lambda size: spans(small, candidates[size]))
    return (
        candidates[best]
        if small == task
        else _Reordering(task, _squeeze(task, name), best).orders()
    )


Squeezed = tuple[Actions, Mapping[Action, float], float]


def _squeeze(task: Task, name: str) -> Squeezed:
    """Returns the repeated block, the start of every action if each starts as early as it can, and
    the peak memory."""
    orders = repeated_with_barriers(name, task.placement, task.microbatches, 0)
    return orders, starts(task, orders), max(task.peaks(orders))


class _Reordering:
    """Chooses the next action of a rank so that none starts later than in the squeezed order.

    Idle gaps are filled with later actions that end before the next one in order starts. From the B
    of the first of the last `cool_down` microbatches on, a rank runs backwards as soon as it can,
    and W in the time that is left.
    """

    def __init__(self, task: Task, squeezed: Squeezed, cool_down: int) -> None:
        self._state, self._first_free = DispatchState(task), task.microbatches - cool_down
        self._squeezed, self._starts, self._limit = squeezed
        self._reached = [0] * task.ranks
        self._cooling = [False] * task.ranks

    def orders(self) -> Orders:
        """Returns the orders that the ranks choose."""
        return dispatch(self._state, self._choose)

    def _choose(self, state: DispatchState, rank: int) -> Action | None:
        order, index, started = self._squeezed[rank], self._reached[rank], state.started
        while index < len(order) and started[order[index][:2]] > order[index].microbatch:
            index += 1
        self._reached[rank] = index
        if index == len(order):
            return None
        head = order[index]
        self._cooling[rank] |= head.op == B and head.microbatch >= self._first_free
        if self._cooling[rank]:
            return min(
                state.ready(rank),
                key=lambda a: (a.op != F, a.op != B, self._starts[a]),
                default=None,
            )
        if state.is_ready(head):
            return head
        fillers = (action for action in state.ready(rank) if self._fits(rank, action, head))
        return min(fillers, key=self._starts.__getitem__, default=None)

    def _fits(self, rank: int, action: Action, head: Action) -> bool:
        """Returns whether `action` may run before `head`: it delays nothing and keeps later peaks
        within the limit."""
        added, memory = self._state.added, self._state.memory[rank] + self._state.added(action)
        if self._state.now + self._state.time(action) > self._starts[head]:
            return False
        for skipped in self._squeezed[rank][self._reached[rank] :] if added(action) > 0 else ():
            if skipped == action or memory > self._limit:
                break
            memory += 0 if self._state.started[skipped[:2]] > skipped.microbatch else added(skipped)
        return added(action) <= 0 or memory <= self._limit
