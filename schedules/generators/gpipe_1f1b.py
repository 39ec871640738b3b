"""GPipe and the 1F1B family: one stage a rank, the backward fused."""

from zbcompile.schedules.generators.interleaved import overlapped_interleaved
from zbcompile.schedules.generators.order_builder import OrderBuilder
from zbcompile.schedules.generators.task import Order, Orders, Task, each_rank
from zbcompile.schedules.ir.actions import B, F


def gpipe(task: Task) -> Orders:
    """All forwards, then all backwards (Huang et al., GPipe, arXiv 1811.06965, figure 2c).

    Bubble (p-1)(T_F+T_B+T_W), peak memory m activations. On 2 ranks, 3 microbatches::

        F0.0  F0.1  F0.2               BW0.0  BW0.1  BW0.2
              F1.0  F1.1  F1.2  BW1.0  BW1.1  BW1.2
    """
    return looped_bfs(task)


@each_rank
def looped_bfs(task: Task, rank: int) -> Order:
    """GPipe over v chunks a rank: stage after stage, all microbatches of each (Lamy-Poirier, arXiv
    2211.05953).

    Bubble (p-1)(T_F+T_B+T_W)/v if m >= p, peak memory m activations. torch's order runs the
    backwards of a stage from its last microbatch to its first. On 2 ranks, 2 chunks, 2
    microbatches::

        F0.0  F0.1  F2.0  F2.1                       BW2.0  BW2.1  BW0.0  BW0.1
              F1.0  F1.1  F3.0  F3.1  BW3.0  BW3.1  BW1.0  BW1.1
    """
    builder = OrderBuilder(task.microbatches)
    stages = task.placement.stages_of(rank)
    for stage in stages:  # all forwards
        for _ in range(task.microbatches):
            builder.f(stage)
    for stage in reversed(stages):  # all backwards
        for _ in range(task.microbatches):
            builder.bw(stage)
    return tuple(builder.order)


@each_rank
def one_f_one_b(task: Task, rank: int) -> Order:
    """Warm-up of p-1-r forwards, then one forward and one backward in turn (PipeDream-Flush, arXiv
    2006.09503).

    Bubble (p-1)(T_F+T_B+T_W), peak memory p-r activations on rank r. On 2 ranks, 3 microbatches::

        F0.0  F0.1         BW0.0         F0.2  BW0.1         BW0.2
              F1.0  BW1.0  F1.1   BW1.1        F1.2   BW1.2
    """
    builder = OrderBuilder(task.microbatches)
    for _ in range(min(task.microbatches, task.ranks - 1 - rank)):  # warm-up
        builder.f(rank)
    while builder.has(B, rank):  # steady; cool-down once no forward is left
        if builder.has(F, rank):
            builder.f(rank)
        builder.bw(rank)
    return tuple(builder.order)


def overlapped_one_f_one_b(task: Task) -> Orders:
    """1F1B in pairs (F|BW), for models that communicate themselves: one half computes while the
    other communicates.

    Warm-up of 2(p-1-r)+1 forwards: the extra one makes the two halves of a pair independent. Peak
    2(p-r) activations on rank r (the steady state of Megatron-LM's 1F1B with expert-parallel
    overlap). On 2 ranks, 4 microbatches::

        F0.0  F0.1  F0.2          (F0.3|BW0.0)  BW0.1         BW0.2  BW0.3
              F1.0  (F1.1|BW1.0)  (F1.2|BW1.1)  (F1.3|BW1.2)  BW1.3
    """
    return overlapped_interleaved(task)
