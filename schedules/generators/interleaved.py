"""The interleaved schedules: v chunks a rank, stage s on rank s mod p (Narayanan et al., arXiv
2104.04473, figure 4).

All of them run the forwards of a rank in the same order: microbatches in groups, a whole group on
the first chunk, then on the second, and so on; backwards the same with the chunks reversed. With
one chunk they are 1F1B with a warm-up of 2(p-1-r) forwards, 1F1B in pairs, and ZB-H1. `group=` sets
the size of the groups; the last group is what is left, so any number of microbatches works.
"""

from collections.abc import Iterator
from itertools import islice

from zbcompile.schedules.generators.order_builder import OrderBuilder
from zbcompile.schedules.generators.task import Order, Task, each_rank


def rounds(ranks: int, microbatches: int) -> int:
    """Returns the number of groups of microbatches: as many as possible with at least `ranks` in
    each."""
    return max(1, microbatches // ranks)


def even_groups(ranks: int, microbatches: int) -> bool:
    """Returns whether the microbatches form groups of equal size, which every interleaved schedule
    needs."""
    return microbatches % rounds(ranks, microbatches) == 0


@each_rank
def interleaved_one_f_one_b(task: Task, rank: int, group: int | None = None) -> Order:
    """1F1B over v chunks a rank: a bubble v times smaller for v times the messages.

    Warm-up of (v-1)g + 2(p-1-r) chunk forwards with groups of g microbatches (g = p if p divides
    m). Bubble (p-1)(T_F+T_B+T_W)/v, peak vp + p - 1 chunk activations on rank 0. On 2 ranks, 2
    chunks, 2 microbatches::

        F0.0  F0.1  F2.0  F2.1         BW2.0         BW2.1  BW0.0  BW0.1
              F1.0  F1.1  F3.0  BW3.0  F3.1   BW3.1  BW1.0  BW1.1
    """
    return _interleaved(task, rank, 2 * (task.ranks - 1 - rank), group)


@each_rank
def overlapped_interleaved(task: Task, rank: int, group: int | None = None) -> Order:
    """Interleaved 1F1B in pairs (F|BW), with one more chunk forward in the warm-up: no half of a
    pair needs the other.

    The order of Megatron-LM's combined 1F1B with expert-parallel overlap. On 2 ranks, 2 chunks, 2
    microbatches::

        F0.0  F0.1  F2.0  F2.1                BW2.0  BW2.1  BW0.0  BW0.1
              F1.0  F1.1  F3.0  (F3.1|BW3.0)  BW3.1  BW1.0  BW1.1
    """
    return _interleaved(task, rank, 2 * (task.ranks - 1 - rank) + 1, group, paired=True)


@each_rank
def interleaved_zero_bubble(task: Task, rank: int, group: int | None = None) -> Order:
    """Interleaved 1F1B with every backward split and a shorter warm-up (torch's
    InterleavedZeroBubble).

    Warm-up of (v-1)g + p-1-r chunk forwards; the oldest pending W follows each B once r backwards
    are done. Bubble (p-1)(T_F+T_B-T_W)/v, peak vp chunk activations on every rank: the memory of
    1F1B. On 2 ranks, 2 chunks, 2 microbatches::

        F0.0  F0.1  F2.0  F2.1        B2.0  W2.0  B2.1  W2.1  B0.0  W0.0  B0.1  W0.1
              F1.0  F1.1  F3.0  B3.0  F3.1  B3.1  W3.0  B1.0  W3.1  B1.1  W1.0  W1.1
    """
    return _interleaved(task, rank, task.ranks - 1 - rank, group, split=True)


def _interleaved(
    task: Task, rank: int, extra: int, group: int | None, paired: bool = False, split: bool = False
) -> Order:
    """Writes a warm-up of (v-1)g + `extra` forwards, then forwards and backwards in turn: in pairs,
    or with a split backward whose W is run once `rank` backwards are done."""
    stages = task.placement.stages_of(rank)
    usual = task.microbatches // rounds(task.ranks, task.microbatches)
    group = min(group or usual, task.microbatches) if task.chunks > 1 else 1
    builder = OrderBuilder(task.microbatches)
    forwards = _in_groups(stages, group, task.microbatches)
    for stage in islice(forwards, (task.chunks - 1) * group + extra):  # warm-up
        builder.f(stage)
    backwards = _in_groups(stages[::-1], group, task.microbatches)
    for done, stage in enumerate(backwards):  # steady; cool-down once no forward is left
        forward = next(forwards, None)
        if forward is not None and paired:
            builder.pair(forward, stage)
            continue
        if forward is not None:
            builder.f(forward)
        (builder.b if split else builder.bw)(stage)
        if split and done >= rank:
            builder.w()
    while builder.pending:
        builder.w()
    return tuple(builder.order)


def _in_groups(stages: tuple[int, ...], group: int, microbatches: int) -> Iterator[int]:
    """The stage of each pass of a rank, group by group; the last group is what is left."""
    for done in range(0, microbatches, group):
        for stage in stages:
            yield from [stage] * min(group, microbatches - done)
