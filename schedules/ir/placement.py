"""Which rank owns which stage."""

import sys
from dataclasses import dataclass
from functools import cached_property

from zbcompile.schedules.errors import ScheduleError

ANY = range(1, sys.maxsize)
KINDS = {"linear": (1,), "looped": ANY, "v": (2,), "dual": (1,)}


@dataclass(frozen=True)
class Placement:
    """Stages on ranks. `kind` is one of

    * `linear`: stage s on rank s (one chunk a rank);
    * `looped`: stage s on rank s mod p;
    * `v`: two chunks a rank, stage s on rank s for s < p and on rank 2p-1-s for s >= p;
    * `dual`: two copies of the model, copy 0 has stage s on rank s, copy 1 on rank p-1-s.
    """

    kind: str
    ranks: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(f"placement {self.kind!r}; expected one of {', '.join(KINDS)}")
        if min(self.ranks, self.chunks) < 1 or self.chunks not in KINDS[self.kind]:
            counts = f"{self.ranks} ranks with {self.chunks} chunks each"
            raise ScheduleError(f"placement {self.kind!r} of {counts}: linear and dual hold 1 chunk a rank, v holds 2")

    @classmethod
    def parse(cls, text: str, ranks: int) -> "Placement":
        """The placement written as `linear`, `looped:2` (with its chunks), `v` or `dual`.

        >>> Placement.parse("looped:4", ranks=2).stages
        8
        """
        kind, _, chunks = text.partition(":")
        if kind not in KINDS or (chunks and not chunks.isdecimal()) or (kind == "looped") != bool(chunks):
            raise ScheduleError(f"placement {text!r}; expected linear, looped:N (N stages on each rank), v or dual")
        return cls(kind, ranks, int(chunks or (2 if kind == "v" else 1)))

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.kind}:{self.chunks}" if self.kind == "looped" else self.kind

    @property
    def stages(self) -> int:
        return self.ranks if self.kind == "dual" else self.ranks * self.chunks

    def rank(self, stage: int, copy: int = 0) -> int:
        """The rank that owns `stage` (of model copy `copy`; only `dual` has a copy 1)."""
        if self.kind == "dual":
            return self.ranks - 1 - stage if copy else stage
        if self.kind == "v":
            return stage if stage < self.ranks else 2 * self.ranks - 1 - stage
        return stage % self.ranks

    def rank_beside(self, rank: int, stage: int, other: int) -> int:
        """The rank of stage `other` for the microbatches that run through `stage` on `rank`."""
        return self.rank(other, copy=int(self.rank(stage) != rank))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank` in ascending order."""
        return self._stages_of[rank]

    @cached_property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        owned: list[set[int]] = [set() for _ in range(self.ranks)]
        for stage in range(self.stages):
            for copy in (0, 1) if self.kind == "dual" else (0,):
                owned[self.rank(stage, copy)].add(stage)
        return tuple(tuple(sorted(stages)) for stages in owned)
