"""Forward-only schedules, which evaluation runs."""

from zbcompile.schedules.ir.actions import Action, F, S
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import Schedule

FORWARD_ONLY = "forward-only"


def forward_only(placement: Placement, microbatches: int, shards: bool = False, lookups: bool = False) -> Schedule:
    """Fill and drain over the stages of `placement`: each rank runs its first stage for all microbatches, then its
    next. Of two model copies the first one runs. With `shards` the output layer is sharded over all ranks, with
    `lookups` the embedding too.

    >>> print(*forward_only(Placement("v", 2, 2), microbatches=2).orders[0])
    F0.0 F0.1 F3.0 F3.1
    """
    single = Placement("linear", placement.ranks) if placement.kind == "dual" else placement
    orders = tuple(_order(single, rank, microbatches, shards) for rank in range(single.ranks))
    return Schedule(FORWARD_ONLY, single, microbatches, orders, lookups=lookups)


def _order(placement: Placement, rank: int, microbatches: int, shards: bool) -> tuple[Action, ...]:
    """S of a microbatch comes once the last stage of the model has run it: as many forwards later as there are stages
    behind this rank's last one."""
    *before, last = stages = placement.stages_of(rank)
    order = [Action(F, stage, i) for stage in before for i in range(microbatches)]
    lag = placement.stages - 1 - last if shards else 0
    for i in range(microbatches + lag):
        order += [Action(F, last, i)] if i < microbatches else []
        order += [Action(S, stages[0], i - lag)] if shards and i >= lag else []
    return tuple(order)
