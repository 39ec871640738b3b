"""A schedule is data: for every rank the order of its compute actions, and where each stage lives."""

from dataclasses import dataclass
from importlib import import_module

from zbcompile.schedules.actions import BW, Action, S, Step, W, flatten
from zbcompile.schedules.placement import Placement


@dataclass(frozen=True)
class Schedule:
    """`orders[rank]` is the tuple of that rank's actions (or pairs of them), compute only.

    `barriers` says, where there are vocabulary passes, what the backward of the last stage waits for: S of every shard
    (1), or T of every shard (2). `lookups` says that the embedding is sharded, too: the first stage receives what all
    shards have looked up.
    """

    name: str
    placement: Placement
    microbatches: int
    orders: tuple[tuple[Step, ...], ...]
    barriers: int = 1
    lookups: bool = False

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    def __str__(self) -> str:
        """The grid of `text.format_schedule`, which `text.parse_schedule` reads back."""
        return import_module("zbcompile.schedules.text").format_schedule(self)  # text builds on this module

    def copy_of(self, microbatch: int) -> int:
        """The model copy that a microbatch runs through: 0, or 1 for the second half under `dual`."""
        return int(self.placement.kind == "dual" and microbatch >= self.microbatches // 2)

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.placement.rank(stage, self.copy_of(microbatch))

    @property
    def shards(self) -> tuple[int, ...]:
        """The vocabulary shards, each named by a stage of its rank, in order of their ranks; none without S."""
        found = ({step.stage for step in order if step[0] == S and isinstance(step, Action)} for order in self.orders)
        return tuple(stage for stages in found for stage in sorted(stages))

    def weight_order(self, stage: int) -> tuple[int, ...]:
        """The microbatches in the order in which the weight gradients of `stage` accumulate, model copy by copy."""
        ranks = dict.fromkeys((self.rank_of(stage, 0), self.rank_of(stage, self.microbatches - 1)))
        actions = (action for rank in ranks for action in flatten(self.orders[rank]))
        return tuple(action.microbatch for action in actions if action.op in (W, BW) and action.stage == stage)


@dataclass(frozen=True)
class Lowered:
    """A schedule with its communication: `programs[rank]` is the order with SEND and RECV actions placed in it.

    Execution semantics, which `check` proves safe and every runtime must keep: a RECV posts a receive and goes on; a
    compute action waits for the receives it needs; a SEND may block until the matching receive is posted. On every
    channel (ordered pair of ranks) receives are posted in the order in which the peer sends.
    """

    schedule: Schedule
    programs: tuple[tuple[Step, ...], ...]

    def __str__(self) -> str:
        """As of a schedule, with the messages."""
        return import_module("zbcompile.schedules.text").format_schedule(self)  # text builds on this module
