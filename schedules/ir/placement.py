"""Which rank owns which stage."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zbcompile.schedules.errors import ScheduleError

ANY = range(1, sys.maxsize)


def require_count(what: str, value: Any) -> None:
    """Raise `ScheduleError` unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScheduleError(f"{what}={value!r:.80}; expected a whole number of at least 1")


KINDS = {"linear": (1,), "looped": ANY, "v": ANY[1:], "dual": (1,), "map": ANY}


@dataclass(frozen=True)
class Placement:
    """Stages on ranks. `kind` is one of

    * `linear`: stage s on rank s (one chunk a rank);
    * `looped`: stage s on rank s mod p;
    * `v`: down the ranks and back up, two chunks a rank or more: stage s on rank s for s < p, on rank 2p-1-s for
      p <= s < 2p, and so on;
    * `dual`: two copies of the model, copy 0 has stage s on rank s, copy 1 on rank p-1-s;
    * `map`: stage s on rank `owners[s]`, at most `chunks` on each (see `of_owners`).
    """

    kind: str
    ranks: int
    chunks: int = 1
    owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ScheduleError(f"placement {self.kind!r:.80}; expected one of {', '.join(KINDS)}")
        object.__setattr__(self, "owners", tuple(self.owners))
        require_count("ranks", self.ranks)
        require_count("chunks", self.chunks)
        if self.chunks not in KINDS[self.kind]:
            counts = f"{self.ranks} ranks with {self.chunks} chunks each"
            raise ScheduleError(
                f"placement {self.kind!r} of {counts}: linear and dual hold 1 chunk a rank, v 2 or more"
            )
        most = max(Counter(self.owners).values(), default=0)
        few = self.ranks <= len(self.owners)  # else a set of all ranks may fill the memory
        if self.kind == "map" and not (few and {*self.owners} == {*range(self.ranks)} and most == self.chunks):
            raise ScheduleError(
                f"placement of {len(self.owners)} stages on ranks {list(self.owners)!r:.80}, at most {self.chunks} on "
                f"each: expected ranks 0 to {self.ranks - 1}, each with a stage"
            )

    @classmethod
    def of_owners(cls, owners: Sequence[int]) -> "Placement":
        """The placement that has stage s on rank `owners[s]`, by its name if it has one.

        >>> str(Placement.of_owners((0, 1, 1, 0))), str(Placement.of_owners((0, 0, 1, 1, 0)))
        ('v', 'map:0,0,1,1,0')
        """
        ranks = 1 + max(owners, default=0)
        chunks = max(1, len(owners) // ranks)
        for kind in ("linear", "v", "looped"):
            if len(owners) == ranks * chunks and chunks in KINDS[kind]:
                named = cls(kind, ranks, chunks)
                if tuple(map(named.rank, range(len(owners)))) == tuple(owners):
                    return named
        return cls("map", ranks, max(Counter(owners).values(), default=1), tuple(owners))

    @classmethod
    def parse(cls, text: str, ranks: int) -> "Placement":
        """The placement written as `linear`, `looped:2` (with its chunks), `v`, `v:4`, `dual` or `map:0,0,1`.

        >>> Placement.parse("looped:4", ranks=2).stages
        8
        """
        kind, _, chunks = text.partition(":")
        if kind == "map" and re.fullmatch(r"\d{1,9}(,\d{1,9})*", chunks):
            owners = tuple(map(int, chunks.split(",")))
            return cls(kind, ranks, max(Counter(owners).values()), owners)
        if kind not in ("linear", "looped", "v", "dual") or (chunks and not re.fullmatch(r"\d{1,9}", chunks)):
            chunks = "?"
        if chunks == "?" or (kind != "v" and (kind == "looped") != bool(chunks)):
            kinds = "linear, looped:N (N stages on each rank), v, v:N, dual or map:R,R,... (the rank of each stage)"
            raise ScheduleError(f"placement {text!r:.80}; expected {kinds}")
        return cls(kind, ranks, int(chunks or (2 if kind == "v" else 1)))

    def __str__(self) -> str:
        """As `parse` reads it."""
        if self.kind == "map":
            return f"map:{','.join(map(str, self.owners))}"
        return f"{self.kind}:{self.chunks}" if self.kind == "looped" or self.chunks > 2 else self.kind

    @property
    def stages(self) -> int:
        if self.kind == "map":
            return len(self.owners)
        return self.ranks if self.kind == "dual" else self.ranks * self.chunks

    def rank(self, stage: int, copy: int = 0) -> int:
        """The rank that owns `stage` (of model copy `copy`; only `dual` has a copy 1)."""
        if self.kind == "dual":
            return self.ranks - 1 - stage if copy else stage
        if self.kind == "map":
            return self.owners[stage]
        leg, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.kind == "v" and leg % 2 else place

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that own `stage`: one for each copy of the model."""
        return tuple(self.rank(stage, copy) for copy in ((0, 1) if self.kind == "dual" else (0,)))

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
            for rank in self.ranks_of(stage):
                owned[rank].add(stage)
        return tuple(tuple(sorted(stages)) for stages in owned)
