"""DualPipe and DualPipeV: two directions at once, in overlapped pairs (DeepSeek-V3, arXiv
2412.19437, section 3.2.1).

Both follow the same eight phases. A rank has a *near* side, whose microbatches reach it early, and
a *far* side: two model copies that run in opposite directions (DualPipe), or the two chunks of a V
(DualPipeV: DualPipe cut in half, without the second copy). `depth` is the distance from the near
side's entrance, `turn` the number of ranks up to the turn.

An order has fused backwards and split ones. A W that runs alone is always the oldest pending W of
its rank.
"""

from zbcompile.schedules.generators.order_builder import OrderBuilder
from zbcompile.schedules.generators.task import Order, Task, each_rank


@each_rank
def dualpipe(task: Task, rank: int) -> Order:
    """Microbatches from both ends of the pipeline, through two copies of the model.

    Microbatches below m/2 enter at rank 0 (copy 0), the others at rank p-1 (copy 1). Idle time with
    F = T_B: (p/2-1)(F&B + T_B+T_W - 3 T_W), F&B the time of a pair; peak p+1 activations; twice the
    parameters. The gradients of a stage add up copy by copy. On 2 ranks, 4 microbatches
    (microbatches 2 and 3 run through copy 1, whose stage 0 is on rank 1)::

        F0.0  F1.2  F0.1  BW1.2  (F1.3|BW0.0)  BW1.3  B0.1  W0.1
        F0.2  F1.0  F0.3  BW1.0  (F1.1|BW0.2)  BW1.1  B0.3  W0.3
    """
    half, p = task.microbatches // 2, task.ranks
    first_copy, second_copy = rank, p - 1 - rank
    near, far = (first_copy, second_copy) if rank < p // 2 else (second_copy, first_copy)
    builder = OrderBuilder(half, first={second_copy: half})
    return _phases(builder, near, far, half, midpoint=p // 2, depth=min(first_copy, second_copy))


@each_rank
def dualpipe_v(task: Task, rank: int) -> Order:
    """DualPipe on a V placement: one copy of the model, two chunks a rank (DeepSeek's and Sea AI
    Lab's "cut-in-half").

    Idle time with F = T_B per chunk: (p-1)(F&B + T_B+T_W - 3 T_W) in times of a chunk; peak 2p+1
    chunk activations. On 2 ranks, 4 microbatches::

        F0.0  F0.1  F0.2  F3.0  B3.0  W3.0   F3.1  (F0.3|BW3.1)
              F1.0  F2.0  F1.1  F2.1  F1.2   BW2.0

        (F3.2|BW0.0)  BW3.2         (F3.3|BW0.1)         BW3.3  B0.2  W0.2  B0.3  W0.3
        (F2.2|BW1.0)  (F1.3|BW2.1)  (F2.3|BW1.1)  BW2.2  BW1.2  B2.3  B1.3  W2.3  W1.3
    """
    near, far = rank, 2 * task.ranks - 1 - rank
    return _phases(
        OrderBuilder(task.microbatches),
        near,
        far,
        task.microbatches,
        midpoint=task.ranks,
        depth=rank,
    )


def _phases(
    builder: OrderBuilder, near: int, far: int, microbatches: int, midpoint: int, depth: int
) -> Order:
    """Writes `microbatches` through the near stage and the far one; phase numbers are
    DeepSeek's."""
    outer = midpoint - depth - 1
    for _ in range(2 * outer):  # 1: forwards near
        builder.f(near)
    for _ in range(depth + 1):  # 2: forwards near and far
        builder.f(near)
        builder.f(far)
    for _ in range(outer):  # 3: split backwards and forwards far
        builder.b(far)
        builder.w()
        builder.f(far)
    for index in range(microbatches - 2 * midpoint + depth + 1):  # 4: pairs alone
        # at the turn the first backward needs the forward that it would be paired with
        if outer == 0 and index == 0:
            builder.f(near)
            builder.bw(far)
        else:
            builder.pair(near, far)
        builder.pair(far, near)
    for _ in range(outer):  # 5: no forward near is left
        builder.bw(far)
        builder.pair(far, near)
    # 6: backwards, fused in their first half and split in the second
    for index in range(2 * (depth + 1)):
        (builder.bw if index <= depth else builder.b)(near if index % 2 else far)
    for _ in range(outer):  # 7: the last backwards near, with pending W before each
        builder.w()
        builder.b(near)
    while builder.pending:  # 8: the W that are left
        builder.w()
    return tuple(builder.order)
