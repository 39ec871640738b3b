"""The handcrafted zero-bubble schedules with one stage a rank (Qi et al., Zero Bubble, arXiv
2401.10241, section 2)."""

from zbcompile.schedules.generators.interleaved import interleaved_zero_bubble
from zbcompile.schedules.generators.order_builder import OrderBuilder
from zbcompile.schedules.generators.task import Order, Orders, Task, each_rank
from zbcompile.schedules.ir.actions import F


def zb_h1(task: Task) -> Orders:
    """1F1B with every backward split and W running r microbatches behind B on rank r (figure 3,
    top).

    Bubble (p-1)(T_F+T_B-T_W) for T_W <= min(T_F, T_B), peak (p-r) activations + r residues: no more
    than 1F1B. No shorter order with one stage a rank and that memory was found. On 2 ranks, 3
    microbatches::

        F0.0  F0.1        B0.0  W0.0  F0.2  B0.1  W0.1  B0.2  W0.2
              F1.0  B1.0  F1.1  B1.1  W1.0  F1.2  B1.2  W1.1  W1.2
    """
    return interleaved_zero_bubble(task)


@each_rank
def zb_h1_lazy(task: Task, rank: int, exact: bool = False) -> Order:
    """ZB-H1 that splits a backward only if that shortens the step (the default of sail-sg's and
    DeepSpeed's ZB-H1).

    Rank 0 never splits. Rank r runs B alone for its first r backwards, then fused backwards. From
    the backward that goes with the last forward on, each B is followed by the oldest pending W,
    which belongs to an earlier microbatch. So weight gradients do not add up in the order of
    microbatches, as they do under 1F1B. With `exact=True` they do: a B and the oldest pending W run
    in place of each fused backward. If messages take no time, time and memory are those of ZB-H1;
    otherwise the bubble grows with m, as that of 1F1B does. On 2 ranks, 4 microbatches::

        F0.0  F0.1        BW0.0         F0.2  BW0.1         F0.3  BW0.2        BW0.3
              F1.0  B1.0  F1.1   BW1.1        F1.2   BW1.2        F1.3   B1.3  W1.0   W1.3
    """
    builder = OrderBuilder(task.microbatches)
    warm_up = min(task.microbatches, task.ranks - 1 - rank)
    for _ in range(warm_up):
        builder.f(rank)
    last_paired = task.microbatches - warm_up - 1  # the last backward of the steady phase
    for backward in range(task.microbatches):  # steady; cool-down once no forward is left
        if builder.has(F, rank):
            builder.f(rank)
        if rank == 0 or (rank <= backward < last_paired and not exact):
            builder.bw(rank)
            continue
        builder.b(rank)
        if backward >= rank:
            builder.w(rank)
    builder.flush(rank)
    return tuple(builder.order)


@each_rank
def zb_h2(task: Task, rank: int) -> Order:
    """Twice the warm-up of 1F1B and W running 2r microbatches behind B (figure 3, bottom).

    No bubble on a rank's own clock when all passes take the same time, (p-1) max(0, T_F+T_B-2T_W)
    in general; measured with an optimizer barrier the gain over ZB-H1 is gone. Peak (2p-2r-1)
    activations + 2r residues on rank r. On 2 ranks, 4 microbatches::

        F0.0  F0.1  F0.2  B0.0  W0.0  F0.3  B0.1  W0.1  B0.2  W0.2  B0.3  W0.3
              F1.0  B1.0  F1.1  B1.1  F1.2  B1.2  W1.0  F1.3  B1.3  W1.1  W1.2  W1.3
    """
    builder = OrderBuilder(task.microbatches)
    for _ in range(min(task.microbatches, 2 * (task.ranks - rank) - 1)):  # warm-up
        builder.f(rank)
    for backward in range(task.microbatches):  # steady; cool-down once no forward is left
        builder.b(rank)
        if backward >= 2 * rank:
            builder.w(rank)
        if builder.has(F, rank):
            builder.f(rank)
    builder.flush(rank)
    return tuple(builder.order)
