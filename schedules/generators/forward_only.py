"""Forward-only schedules, which evaluation runs."""

from zbcompile.schedules.ir.actions import Action, F, S
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import Schedule

FORWARD_ONLY = "forward-only"


def forward_only(
    placement: Placement, microbatches: int, shards: bool = False, lookups: bool = False
) -> Schedule:
    """Fills and drains the stages of `placement`: each rank runs its first stage for all
    microbatches, then its next.

    Of two model copies the first one runs. With `shards` the output layer is sharded over all
    ranks, with `lookups` the embedding too. S of a microbatch comes once the last stage of the
    model has run it: as many forwards later as there are stages behind the rank's last one.

    >>> print(*forward_only(Placement.named("v", 2, 2), microbatches=2).orders[0])
    F0.0 F0.1 F3.0 F3.1
    """
    placement = Placement.of_ranks(owners[0] for owners in placement.owners)
    orders, last_stages = [], {placement.stages_of(rank)[-1] for rank in range(placement.ranks)}
    for rank in range(placement.ranks):
        *before, last = stages = placement.stages_of(rank)
        order = [Action(F, stage, m) for stage in before for m in range(microbatches)]
        lag = placement.stages - 1 - last if shards else 0
        if shards and not last_stages.issuperset(range(last, placement.stages)):
            # a later rank runs all forwards of one stage before those of its last
            lag = microbatches
        for m in range(microbatches + lag):
            order += [Action(F, last, m)] if m < microbatches else []
            order += [Action(S, stages[0], m - lag)] if shards and m >= lag else []
        orders.append(tuple(order))
    return Schedule(FORWARD_ONLY, placement, microbatches, tuple(orders), lookups=lookups)
