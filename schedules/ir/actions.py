"""Actions of a rank: one operation on one stage for one microbatch.

The letters are those of the papers: F forward, B input gradient, W weight gradient, BW the fused
backward, S and T the two vocabulary passes. REDUCE and OPT are the optimizer's, once per stage. A
lowered program also holds SEND_F, RECV_F, SEND_B and RECV_B, and the collectives of the vocabulary
passes (BROADCAST, STATS, INPUT_GRAD, EMBED and EMBED_GRAD). torch writes I for our B, W for our W
and B for our BW; `zbcompile.schedules` reads and writes both. `zbcompile.schedules.ir.kinds` says
everything else about them.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

from zbcompile.schedules.ir.kinds import COLLECTIVE_OPS, COMPUTE_OPS, MESSAGE_OPS, OPTIMIZER_OPS

F, B, W, BW, S, T = "F", "B", "W", "BW", "S", "T"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
BROADCAST, STATS, INPUT_GRAD = "BROADCAST", "STATS", "INPUT_GRAD"
EMBED, EMBED_GRAD = "EMBED", "EMBED_GRAD"
REDUCE, OPT = "REDUCE", "OPT"
ONCE = frozenset(OPTIMIZER_OPS)
COMPUTE = ONCE.union(COMPUTE_OPS)
MESSAGES = frozenset(MESSAGE_OPS)
SENDS = MESSAGES & {SEND_F, SEND_B}
RECEIVES = MESSAGES - SENDS
COLLECTIVES = frozenset(COLLECTIVE_OPS)
COMMUNICATION = frozenset((*MESSAGES, *COLLECTIVES))


class Action(NamedTuple):
    """One operation: `op` on `stage` for `microbatch`, printed as `F0.3`.

    In a lowered program `SEND_F` stage s sends what s made in F to stage s+1 and `RECV_F` stage s
    receives what stage s-1 sent; `SEND_B` stage s sends the gradient of its input to stage s-1 and
    `RECV_B` stage s receives the gradient of its output from stage s+1. A receive is posted, never
    waited for: the compute action that needs the value waits.

    S, T and the collectives name a shard of the vocabulary by the first stage of its rank. A
    collective is posted by every shard and never waited for by the one that posts it: BROADCAST
    carries the last stage's output to all shards (C0), STATS what S made (C1; with one barrier the
    input gradient of the output layer too), INPUT_GRAD, with two barriers, that input gradient once
    T has made it (C2). EMBED sums the shards' rows of a sharded embedding for the first stage,
    EMBED_GRAD carries its gradient back to them.
    """

    op: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.microbatch}"


class Pair(NamedTuple):
    """Two actions that run together: a forward and a backward, printed as `(F0.3|BW3.1)`, or a B or
    F and a W, whose products hide its exchanges, as `(B1.3|W1.2)`."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"({self.first}|{self.second})"


# the operations of pairs
PAIRED = frozenset((one, second) for one, second in ((F, B), (F, BW), (F, W), (B, W)))


Step = Action | Pair


def has_pairs(order: Sequence[Step]) -> bool:
    return Pair in set(map(type, order))


def flatten(order: Sequence[Step]) -> list[Action]:
    """Returns the actions of an order with every pair opened."""
    if not has_pairs(order):
        return cast(list[Action], list(order))
    return [action for step in order for action in (step if isinstance(step, Pair) else (step,))]
