"""Every schedule by name, with its placement, the counts that it admits, and its generator.

`zbcompile.schedules.searching.by_name` builds them. Every name has a generator, except "auto", whose order is searched.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from zbcompile.field_check import is_amount
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import run_to_end
from zbcompile.schedules.generators import dualpipe, gpipe_1f1b, interleaved, v_half_v_min, zb_auto, zb_h, zb_v
from zbcompile.schedules.generators.task import Generator, Task
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.placement import Placement, require_count
from zbcompile.schedules.ir.schedule import Schedule


@dataclass(frozen=True)
class MicrobatchRule:
    """Which numbers of microbatches a schedule admits on `ranks` ranks (`holds`), in words (`text`)."""

    text: str
    holds: Callable[[int, int], bool]


ANY_COUNT = MicrobatchRule("any number of microbatches", lambda ranks, microbatches: True)
EVEN_GROUPS = MicrobatchRule(
    "any number below 2 x ranks, multiples of ranks, and what microbatches // ranks divides: groups of equal size",
    interleaved.even_groups,
)
WIDE = MicrobatchRule("microbatches >= 2 x ranks", lambda ranks, microbatches: microbatches >= 2 * ranks)
WIDE_AND_EVEN = MicrobatchRule(
    "even ranks and even microbatches >= 2 x ranks",
    lambda ranks, microbatches: microbatches >= 2 * ranks and ranks % 2 == microbatches % 2 == 0,
)


@dataclass(frozen=True)
class Family:
    """One name of the registry.

    `chunks` is how many stages a rank holds by default, `free_chunks` whether another number is allowed; `options` are
    the keywords that `build` hands on to the generator. `generate` is None if the order is searched.
    """

    name: str
    generate: Generator | None
    placement: str = "linear"
    chunks: int = 1
    free_chunks: bool = False
    rule: MicrobatchRule = ANY_COUNT
    options: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def _interleaved(name: str, generate: Generator, *aliases: str) -> Family:
    return Family(
        name, generate, "looped", chunks=2, free_chunks=True, rule=EVEN_GROUPS, options=("group",), aliases=aliases
    )


FAMILIES = (
    Family("gpipe", gpipe_1f1b.gpipe),
    Family("1f1b", gpipe_1f1b.one_f_one_b, aliases=("pipedream-flush",)),
    Family("1f1b-overlap", gpipe_1f1b.overlapped_one_f_one_b),
    _interleaved("interleaved-1f1b", interleaved.interleaved_one_f_one_b),
    _interleaved("interleaved-1f1b-overlap", interleaved.overlapped_interleaved),
    Family("looped-bfs", gpipe_1f1b.looped_bfs, "looped", chunks=2, free_chunks=True),
    Family("zb-h1", zb_h.zb_h1),
    Family("zb-h1-lazy", zb_h.zb_h1_lazy, options=("exact",)),
    Family("zb-h2", zb_h.zb_h2),
    Family("zb-1p", zb_auto.zb_1p, options=()),
    Family("zb-2p", zb_auto.zb_2p, options=()),
    _interleaved("interleaved-zb", interleaved.interleaved_zero_bubble, "interleaved-zero-bubble"),
    Family("zb-v", zb_v.zb_v, placement="v", chunks=2, aliases=("zbv-zero-bubble",)),
    Family("v-half", v_half_v_min.v_half, placement="v", chunks=2),
    Family("v-min", v_half_v_min.v_min, placement="v", chunks=2),
    Family("dualpipe", dualpipe.dualpipe, placement="dual", rule=WIDE_AND_EVEN),
    Family("dualpipe-v", dualpipe.dualpipe_v, placement="v", chunks=2, rule=WIDE),
)
AUTO = Family("auto", None, "looped", chunks=2, free_chunks=True)  # or v


def names() -> tuple[str, ...]:
    """The canonical names of all schedules.

    >>> "zb-v" in names()
    True
    """
    return tuple(family.name for family in (*FAMILIES, AUTO))


def find(name: str) -> Family:
    """The family called `name` in any spelling; raises `ScheduleError` with the nearest names."""
    spelled, known = _spelling(name), _known()
    if spelled in known:
        return known[spelled]
    near = [known[match].name for match in difflib.get_close_matches(spelled, known, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else f"known names: {', '.join(names())}"
    raise ScheduleError(f"no schedule is called {name!r}; {hint}")


@cache
def _known() -> dict[str, Family]:
    return {_spelling(alias): family for family in (*FAMILIES, AUTO) for alias in (family.name, *family.aliases)}


def _spelling(name: str) -> str:
    return "".join(c for c in str(name).lower() if c.isalnum()).removeprefix("schedule")


def build_named(
    family: Family,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    chunks: int | None = None,
    **options: Any,
) -> Schedule:
    """Returns the schedule of a family that a rule generates; arguments and errors as of `build`."""
    assert family.generate is not None
    placement = placement_of(family, ranks, chunks)
    require_count("microbatches", microbatches)
    require_limit(memory_limit)
    if options.get("group") is None and not family.rule.holds(ranks, microbatches):
        raise ScheduleError(_inadmissible(family, ranks, microbatches))
    require_options(family, options)
    if options.get("group") is not None:
        require_count("group", options["group"])
    if costs is not None and costs.stages != placement.stages:
        raise ScheduleError(f"{family.name}: costs of {costs.stages} stages for a schedule of {placement.stages}")
    task = Task(placement, microbatches, costs, memory_limit)
    schedule = Schedule(family.name, placement, microbatches, family.generate(task, **options))
    if options.get("group") is not None:
        run_to_end(schedule, task.costs_or_equal)  # a short last group can end in a deadlock
    _require_within(schedule, task)
    return schedule


def require_options(family: Family, options: Mapping[str, Any]) -> None:
    """Raises `ScheduleError` for options that a family does not have."""
    unknown = sorted(set(options) - set(family.options))
    if unknown:
        expected = f"expected {', '.join(family.options)}" if family.options else "it has none"
        raise ScheduleError(f"{family.name}: unknown option {', '.join(unknown)}; {expected}")


def require_limit(limit: Any) -> None:
    """Raise `ScheduleError` unless `limit` can be a limit of memory; infinity is none."""
    if limit is not None and limit != math.inf and not is_amount(limit):
        expected = "a number that is not negative, in the unit of the costs' activation"
        raise ScheduleError(f"memory_limit={limit!r:.80}; expected {expected}")


def _require_within(schedule: Schedule, task: Task) -> None:
    """Raise `ScheduleError` if a rank holds more than the task allows."""
    if task.memory_limit is None:
        return
    peaks = task.peaks(schedule.orders)
    rank = max(range(task.ranks), key=peaks.__getitem__)
    if peaks[rank] > task.memory_limit * (1 + 1e-9):  # sums of sizes count as equal up to rounding
        raise ScheduleError(
            f"{schedule.name}: rank {rank} holds {peaks[rank]} at its peak, but memory_limit is {task.memory_limit}; "
            "raise the limit or choose a schedule that needs less (v-half, v-min)"
        )


def admits(name: str, ranks: int, microbatches: int) -> bool:
    """Whether `build` accepts these counts."""
    return ranks >= 1 and microbatches >= 1 and find(name).rule.holds(ranks, microbatches)


def smallest_microbatches(name: str, ranks: int, at_least: int = 1, chunks: int | None = None) -> int:
    """The smallest admitted number of microbatches that is not below `at_least`.

    Raises `ScheduleError` if no number is admitted on that many ranks.

    >>> smallest_microbatches("zb-v", ranks=4, at_least=16)
    16
    """
    family = find(name)
    placement_of(family, ranks, chunks)
    for microbatches in range(max(1, at_least), max(1, at_least) + _horizon(ranks)):
        if family.rule.holds(ranks, microbatches):
            return microbatches
    raise ScheduleError(
        f"{family.name}: no number of microbatches works on {ranks} ranks: it admits {family.rule.text}"
    )


def _horizon(ranks: int) -> int:
    """Every rule is periodic in 2 x ranks or holds from 2 x ranks on."""
    return 4 * ranks + 2


def _inadmissible(family: Family, ranks: int, microbatches: int) -> str:
    holds, far = family.rule.holds, _horizon(ranks)
    below = [m for m in range(microbatches - 1, max(0, microbatches - far), -1) if holds(ranks, m)]
    above = [m for m in range(microbatches + 1, microbatches + far) if holds(ranks, m)]
    nearest = [str(m) for m in below[:1] + above[:1]]
    hint = f"the nearest that work: {' and '.join(nearest)}" if nearest else f"no number works on {ranks} ranks"
    return f"{family.name}: {microbatches} microbatches on {ranks} ranks; it admits {family.rule.text}; {hint}"


def placement_of(family: Family, ranks: int, chunks: int | None) -> Placement:
    require_count("ranks", ranks)
    chunks = family.chunks if chunks is None else chunks
    require_count("chunks", chunks)
    if chunks != family.chunks and not family.free_chunks:
        raise ScheduleError(f"{family.name}: chunks={chunks}; a rank holds exactly {family.chunks} (leave it out)")
    return Placement(family.placement, ranks, chunks)
