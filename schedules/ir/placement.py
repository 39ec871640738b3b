"""The ranks that own the stages."""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zbcompile.schedules.errors import ScheduleError

ANY = range(1, sys.maxsize)
# with the chunks that each admits
KINDS = {"linear": (1,), "v": ANY[1:], "looped": ANY, "dual": (1,)}
MOST_STAGES = 1 << 20


def require_count(what: str, value: Any) -> None:
    """Raises `ScheduleError` unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScheduleError(f"{what}={value!r:.80}; expected a whole number of at least 1")


@dataclass(frozen=True)
class Placement:
    """`owners[stage]`: the ranks that own a stage, one for each copy of the model; every rank owns
    a stage."""

    owners: tuple[tuple[int, ...], ...]

    @classmethod
    def named(cls, kind: str, ranks: int, chunks: int = 1) -> "Placement":
        """Returns one of the placements that have a name:

        * `linear`: stage s on rank s (one chunk per rank);
        * `looped`: stage s on rank s mod p;
        * `v`: down the ranks and back up, two chunks per rank or more: stage s on rank s for s < p,
          on rank 2p-1-s for p <= s < 2p, and so on;
        * `dual`: two copies of the model, copy 0 has stage s on rank s, copy 1 on rank p-1-s.
        """
        require_count("ranks", ranks)
        require_count("chunks", chunks)
        counts = f"placement {kind!r:.80} of {ranks} ranks with {chunks} chunks each"
        if chunks not in KINDS.get(kind, ()):
            kinds = f"{', '.join(KINDS)}; linear and dual hold 1 chunk per rank, v 2 or more"
            raise ScheduleError(f"{counts}; expected {kinds}")
        if ranks * chunks > MOST_STAGES:
            raise ScheduleError(f"{counts}; expected at most {MOST_STAGES} stages")
        if kind == "dual":
            return cls(tuple((rank, ranks - 1 - rank) for rank in range(ranks)))
        down = tuple((rank,) for rank in range(ranks))
        up = down[::-1] if kind == "v" else down
        return cls(
            tuple(owners for chunk in range(chunks) for owners in (up if chunk % 2 else down))
        )

    @classmethod
    def of_ranks(cls, ranks: Iterable[int]) -> "Placement":
        """Returns the placement that has stage s on rank `ranks[s]`.

        >>> str(Placement.of_ranks((0, 1, 1, 0))), str(Placement.of_ranks((0, 0, 1, 1, 0)))
        ('v', 'map:0,0,1,1,0')
        """
        owners = tuple((rank,) for rank in ranks)
        if {*owners} != {(rank,) for rank in range(max(1, len({*owners})))}:
            listing = f"{[rank for (rank,) in owners]!r:.80}"
            raise ScheduleError(
                f"placement of stages on ranks {listing}: expected ranks 0 to n-1, each with a"
                " stage"
            )
        return cls(owners)

    @classmethod
    def parse(cls, text: str, ranks: int) -> "Placement":
        """Returns the placement written as `linear`, `looped:2` (with its chunks), `v`, `v:4`,
        `dual` or `map:0,0,1`.

        >>> Placement.parse("looped:4", ranks=2).stages
        8
        """
        kind, _, chunks = text.partition(":")
        if kind == "map" and re.fullmatch(r"\d{1,9}(,\d{1,9})*", chunks):
            return cls.of_ranks(map(int, chunks.split(",")))
        if not re.fullmatch(r"linear|dual|looped:\d{1,9}|v(:\d{1,9})?", text):
            kinds = (
                "linear, looped:N (N stages on each rank), v, v:N, dual or map:R,R,... (the rank of"
                " each stage)"
            )
            raise ScheduleError(f"placement {text!r:.80}; expected {kinds}")
        return cls.named(kind, ranks, int(chunks or 1 + (kind == "v")))

    def __str__(self) -> str:
        """Returns the text that `parse` reads."""
        return self._text

    @cached_property
    def _text(self) -> str:
        for kind, counts in KINDS.items():
            if self.chunks in counts and Placement.named(kind, self.ranks, self.chunks) == self:
                return f"{kind}:{self.chunks}" if kind == "looped" or self.chunks > 2 else kind
        return f"map:{','.join(str(rank) for rank, *_ in self.owners)}"

    @property
    def kind(self) -> str:
        """The name of the placement without its number of chunks; "map" if it has none."""
        return self._text.partition(":")[0]

    @property
    def stages(self) -> int:
        return len(self.owners)

    @property
    def copies(self) -> int:
        """How many copies of the model there are."""
        return len(self.owners[0])

    @cached_property
    def ranks(self) -> int:
        return 1 + max(map(max, self.owners))

    @cached_property
    def chunks(self) -> int:
        """The most stages of one copy of the model on a rank."""
        return -(-max(map(len, self._stages_of)) // self.copies)

    def rank(self, stage: int, copy: int = 0) -> int:
        """Returns the rank that owns `stage` of a model copy."""
        return self.owners[stage][copy]

    def rank_of_neighbour(self, rank: int, stage: int, neighbour: int) -> int:
        """Returns the rank of stage `neighbour` in the model copy whose `stage` is on `rank`."""
        return self.owners[neighbour][self.owners[stage].index(rank)]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of `rank` in ascending order."""
        return self._stages_of[rank]

    @cached_property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        stages: list[dict[int, None]] = [{} for _ in range(self.ranks)]
        for stage, owners in enumerate(self.owners):
            for rank in owners:
                stages[rank][stage] = None
        return tuple(map(tuple, stages))
