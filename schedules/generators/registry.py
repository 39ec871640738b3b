"""Every schedule by name, with its placement, the counts that it admits, and its generator.

`zbcompile.schedules.searching.by_name` builds them. Every name has a generator, except "auto",
whose order is searched.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from zbcompile.field_check import is_amount
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import run_to_end
from zbcompile.schedules.execution.order_graph import gc_disabled
from zbcompile.schedules.generators import (
    dualpipe,
    gpipe_1f1b,
    interleaved,
    v_half_v_min,
    zb_auto,
    zb_h,
    zb_v,
)
from zbcompile.schedules.generators.task import Generator, Task
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.placement import Placement, require_count
from zbcompile.schedules.ir.schedule import Schedule


class MicrobatchRule(NamedTuple):
    """`holds(ranks, microbatches)` says which numbers of microbatches a schedule admits, `text`
    describes them.

    Every rule is periodic in 2 x ranks or holds from 2 x ranks on.
    """

    text: str
    holds: Callable[[int, int], bool]


ANY_COUNT = MicrobatchRule("any number of microbatches", lambda ranks, microbatches: True)
EVEN_GROUPS = MicrobatchRule(
    "any number below 2 x ranks, multiples of ranks, and what microbatches // ranks divides: groups"
    " of equal size",
    interleaved.even_groups,
)
WIDE = MicrobatchRule(
    "microbatches >= 2 x ranks", lambda ranks, microbatches: microbatches >= 2 * ranks
)
WIDE_AND_EVEN = MicrobatchRule(
    "even ranks and even microbatches >= 2 x ranks",
    lambda ranks, microbatches: microbatches >= 2 * ranks and ranks % 2 == microbatches % 2 == 0,
)


@dataclass(frozen=True)
class Family:
    """One name of the registry.

    `options` are the keywords that `build` passes to the generator. `generate` is None if the order
    is searched.
    """

    name: str
    generate: Generator | None
    placement: str = "linear"
    rule: MicrobatchRule = ANY_COUNT
    options: tuple[str, ...] = ()
    alias: str = ""

    @property
    def chunks(self) -> int:
        """The default number of stages per rank."""
        return 2 if self.placement in ("looped", "v") else 1

    @property
    def free_chunks(self) -> bool:
        """True if another number is allowed."""
        return self.placement == "looped"


GROUP = ("group",)
FAMILIES = (
    Family("gpipe", gpipe_1f1b.gpipe),
    Family("1f1b", gpipe_1f1b.one_f_one_b, alias="pipedream-flush"),
    Family("1f1b-overlap", gpipe_1f1b.overlapped_one_f_one_b),
    Family("interleaved-1f1b", interleaved.interleaved_one_f_one_b, "looped", EVEN_GROUPS, GROUP),
    Family(
        "interleaved-1f1b-overlap", interleaved.overlapped_interleaved, "looped", EVEN_GROUPS, GROUP
    ),
    Family("looped-bfs", gpipe_1f1b.looped_bfs, "looped"),
    Family("zb-h1", zb_h.zb_h1),
    Family("zb-h1-lazy", zb_h.zb_h1_lazy, options=("exact",)),
    Family("zb-h2", zb_h.zb_h2),
    Family("zb-1p", zb_auto.zb_1p),
    Family("zb-2p", zb_auto.zb_2p),
    Family(
        "interleaved-zb",
        interleaved.interleaved_zero_bubble,
        "looped",
        EVEN_GROUPS,
        GROUP,
        "interleaved-zero-bubble",
    ),
    Family("zb-v", zb_v.zb_v, "v", alias="zbv-zero-bubble"),
    Family("v-half", v_half_v_min.v_half, "v"),
    Family("v-min", v_half_v_min.v_min, "v"),
    Family("dualpipe", dualpipe.dualpipe, "dual", WIDE_AND_EVEN),
    Family("dualpipe-v", dualpipe.dualpipe_v, "v", WIDE),
)
AUTO = Family("auto", None, "looped")  # what is searched; the result may be linear or a V


def names() -> tuple[str, ...]:
    """Returns the canonical names of all schedules.

    >>> "zb-v" in names()
    True
    """
    return tuple(family.name for family in (*FAMILIES, AUTO))


def find(name: str) -> Family:
    """Returns the family called `name` in any spelling; raises `ScheduleError` with the nearest
    names."""
    spelled, families = _normalize(name), _families_by_spelling()
    if spelled in families:
        return families[spelled]
    near = [
        families[match].name
        for match in difflib.get_close_matches(spelled, families, n=3, cutoff=0.5)
    ]
    hint = (
        f"did you mean {' or '.join(dict.fromkeys(near))}?"
        if near
        else f"known names: {', '.join(names())}"
    )
    raise ScheduleError(f"no schedule is called {name!r}; {hint}")


@cache
def _families_by_spelling() -> dict[str, Family]:
    spellings = (
        (_normalize(text), family)
        for family in (*FAMILIES, AUTO)
        for text in (family.name, family.alias)
    )
    return {spelling: family for spelling, family in spellings if spelling}


def _normalize(name: str) -> str:
    return "".join(c for c in str(name).lower() if c.isalnum()).removeprefix("schedule")


@gc_disabled()
def build_named(
    family: Family,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    chunks: int | None = None,
    **options: Any,
) -> Schedule:
    """Returns the schedule of a family that a rule generates; arguments and errors as of
    `build`."""
    assert family.generate is not None
    placement, group = placement_of(family, ranks, chunks, costs), options.get("group")
    require_count("microbatches", microbatches)
    if group is not None:
        require_count("group", group)
    elif not family.rule.holds(ranks, microbatches):
        near = _next_admitted(family, ranks, microbatches)
        hint = f"no number works on {ranks} ranks: change ranks, or choose zb-h1 or zb-v"
        hint = f"use {near}" if near else hint
        counts = f"{microbatches} microbatches on {ranks} ranks"
        raise ScheduleError(f"{family.name}: {counts}; it admits {family.rule.text}; {hint}")
    task = Task(placement, microbatches, costs, memory_limit)
    schedule = Schedule(family.name, placement, microbatches, family.generate(task, **options))
    if group is not None:
        run_to_end(schedule, task.costs_or_equal)  # a short last group can end in a deadlock
    peaks = task.peaks(schedule.orders) if memory_limit is not None else ()
    for rank, peak in enumerate(peaks):
        if peak > memory_limit * (1 + 1e-9):  # type: ignore[operator]  # sums of sizes are rounded
            limit = f"rank {rank} holds {peak} at its peak, but memory_limit is {memory_limit}"
            hint = "raise the limit or choose a schedule that needs less (v-half, v-min)"
            raise ScheduleError(f"{schedule.name}: {limit}; {hint}")
    return schedule


def require_limit(limit: Any) -> None:
    """Raises `ScheduleError` unless `limit` can be a limit of memory; infinity is none."""
    if limit is not None and limit != math.inf and not is_amount(limit):
        expected = "a number that is not negative, in the unit of the costs' activation"
        raise ScheduleError(f"memory_limit={limit!r:.80}; expected {expected}")


def admits(name: str, ranks: int, microbatches: int) -> bool:
    """Returns whether `build` accepts these counts."""
    return ranks >= 1 and microbatches >= 1 and find(name).rule.holds(ranks, microbatches)


def smallest_microbatches(
    name: str, ranks: int, at_least: int = 1, chunks: int | None = None
) -> int:
    """Returns the smallest admitted number of microbatches that is not below `at_least`.

    Raises `ScheduleError` if no number is admitted on that many ranks.

    >>> smallest_microbatches("zb-v", ranks=4, at_least=16)
    16
    """
    family = find(name)
    placement_of(family, ranks, chunks)
    microbatches = _next_admitted(family, ranks, max(1, at_least))
    if microbatches is None:
        what = f"no number of microbatches works on {ranks} ranks: it admits {family.rule.text}"
        raise ScheduleError(f"{family.name}: {what}")
    return microbatches


def _next_admitted(family: Family, ranks: int, microbatches: int) -> int | None:
    """Returns the first admitted number of microbatches from this one on; None if there is none."""
    counts = range(microbatches, microbatches + 4 * ranks + 2)
    return next((count for count in counts if family.rule.holds(ranks, count)), None)


def placement_of(
    family: Family, ranks: int, chunks: int | None, costs: Costs | None = None
) -> Placement:
    """Returns the placement of a family; `chunks=None`: with its default number of stages
    per rank."""
    if chunks is not None and chunks != family.chunks and not family.free_chunks:
        what = f"chunks={chunks}; a rank holds exactly {family.chunks} (leave it out)"
        raise ScheduleError(f"{family.name}: {what}")
    chunks = family.chunks if chunks is None else chunks
    placement = Placement.named(family.placement, ranks, chunks)
    if costs is not None and costs.stages != placement.stages:
        what = f"costs of {costs.stages} stages for a schedule of {placement.stages}"
        raise ScheduleError(f"{family.name}: {what}")
    return placement
