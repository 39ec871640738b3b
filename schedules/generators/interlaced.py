"""The interlaced pipeline of nnScaler (OSDI 2024), which vocabulary parallelism is compared
with."""

from zbcompile.schedules.ir.actions import BW, Action, F, S, Step, T
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import Schedule


def interlaced(ranks: int, microbatches: int) -> Schedule:
    """1F1B in which all ranks run the vocabulary layers at the same time, T right after S.

    Between two such slots a rank runs one forward and one backward. With each rank from the last
    one towards the first, F comes half a slot earlier and B a whole slot later. So the first rank
    holds 1.5p microbatches, where `with_vocabulary` needs p + 1 or p + 2, and in every slot all
    ranks wait for the collectives (arXiv 2411.05288, section 6.1). If collectives are free, the
    step takes as long as that of 1F1B.

    >>> from zbcompile.schedules import simulate
    >>> simulate(interlaced(ranks=4, microbatches=8)).peak_memory
    (6, 4, 3, 1)
    """
    orders = []
    for rank in range(ranks):
        distance = ranks - 1 - rank
        ahead, order = 1 + distance // 2, list[Step]()
        # warm-up below 0, cool-down from `microbatches` on
        for slot in range(-ahead, microbatches + distance):
            if 0 <= slot < microbatches:
                order += [Action(S, rank, slot), Action(T, rank, slot)]
            passes = [Action(BW, rank, slot - distance), Action(F, rank, slot + ahead)]
            order += [
                a for a in passes[:: -1 if distance % 2 else 1] if 0 <= a.microbatch < microbatches
            ]
        orders.append(tuple(order))
    return Schedule(
        "interlaced", Placement.named("linear", ranks), microbatches, tuple(orders), barriers=2
    )
