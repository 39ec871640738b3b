"""The messages that each action of a lowered order needs, makes, sends or receives. The engine
plans a rank by them, and memory is predicted from them."""

from typing import NamedTuple

from zbcompile.schedules.ir.actions import RECEIVES, Action, B, F, S, T, flatten
from zbcompile.schedules.ir.dependencies import routes_of, shard_dependencies
from zbcompile.schedules.ir.kinds import MESSAGE_OPS, result_of
from zbcompile.schedules.ir.schedule import Schedule

# Messages between stages and vocabulary shards: the last stage's output and its gradient, the
# gradient of what the shards have looked up for the first stage.
HIDDEN_MESSAGE, GRADIENT_MESSAGE, ROWS_MESSAGE = "HIDDEN", "GRADIENT", "ROWS"


class Message(NamedTuple):
    """The `F` or `B` values that arrive at `stage` for `microbatch`, or the values of a collective
    of the vocabulary passes at that stage."""

    kind: str
    stage: int
    microbatch: int


class Edge(NamedTuple):
    """The values of an action. A compute action needs the messages `needs` and makes others, each
    for a rank; a SEND `carries` one to `peer`, a RECV one from there."""

    needs: tuple[Message, ...] = ()
    makes: tuple[tuple[Message, int], ...] = ()
    carries: Message | None = None
    peer: int = -1


def edges_of(schedule: Schedule, rank: int) -> dict[Action, Edge]:
    """Returns the edges of all actions of a rank, in their order.

    >>> from zbcompile.schedules import build, lower
    >>> edge = edges_of(lower(build("1f1b", ranks=2, microbatches=1)), 1)[Action("BW", 1, 0)]
    >>> edge.needs, edge.makes
    ((), ((Message(kind='B', stage=0, microbatch=0), 0),))
    """
    routes, collectives = routes_of(schedule, rank), shard_dependencies(schedule, lowered=True)
    kinds = {F: HIDDEN_MESSAGE, S: S} if schedule.shards else {}  # what the collectives carry
    if schedule.shards and schedule.barriers == 2:
        kinds[T] = T
    if schedule.shards and schedule.lookups:
        kinds[B] = ROWS_MESSAGE
    edges: dict[Action, Edge] = {}
    for action in flatten(schedule.orders[rank]):
        op, stage, microbatch = action
        route, result = routes.get((op, stage)), result_of(op)
        if route is not None:
            at, peer = (stage, route.source) if op in RECEIVES else (route.stage, route.destination)
            edges[action] = Edge(carries=Message(MESSAGE_OPS[op], at, microbatch), peer=peer)
            continue
        needs, makes = list[Message](), list[tuple[Message, int]]()
        if (f"RECV_{result}", stage) in routes:
            needs.append(Message(result, stage, microbatch))
        if (op, stage) in collectives:
            needs.append(
                Message(
                    GRADIENT_MESSAGE if result == B else collectives[op, stage], stage, microbatch
                )
            )
        if (f"SEND_{result}", stage) in routes:
            _, destination, target = routes[f"SEND_{result}", stage]
            makes.append((Message(result, target, microbatch), destination))
        elif result in kinds:
            makes.append((Message(kinds[result], stage, microbatch), rank))
        edges[action] = Edge(tuple(needs), tuple(makes))
    return edges


def channels_of(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Returns every pair of ranks, source and destination, between which a schedule sends
    messages."""
    routes = (
        route for rank in range(schedule.ranks) for route in routes_of(schedule, rank).values()
    )
    return tuple(
        sorted(
            {(source, destination) for source, destination, _ in routes if source != destination}
        )
    )
