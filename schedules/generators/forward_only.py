"""Forward-only schedules, which evaluation runs."""

from zbcompile.schedules.ir.actions import Action, F
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import Schedule

FORWARD_ONLY = "forward-only"


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Fill and drain over the stages of `placement`: each rank runs its first stage for all microbatches, then its
    next. Of two model copies the first one runs.

    >>> print(*forward_only(Placement("v", 2, 2), microbatches=2).orders[0])
    F0.0 F0.1 F3.0 F3.1
    """
    single = Placement("linear", placement.ranks) if placement.kind == "dual" else placement
    orders = (single.stages_of(rank) for rank in range(single.ranks))
    return Schedule(
        FORWARD_ONLY,
        single,
        microbatches,
        tuple(tuple(Action(F, stage, i) for stage in stages for i in range(microbatches)) for stages in orders),
    )
