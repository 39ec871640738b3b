"""A cache of searches that took a while, by all that they were asked, in the folder of compiled graphs."""

import gzip
import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from zbcompile import schedules
from zbcompile.backends.compile_cache import cache_folder
from zbcompile.errors import PipelineError
from zbcompile.safe_files import write_whole
from zbcompile.schedules import Costs, SearchResult, Timeline, check, search, simulate
from zbcompile.schedules.ir.files import from_json, to_json
from zbcompile.schedules.searching.problem import ROUNDING

WORTH = 1.0  # seconds of search; what takes less is searched again
NEAR = 1.05  # how much longer than the best order a named one may take and still be kept with it


def cached_search(
    costs: Costs,
    ranks: int,
    microbatches: int,
    limits: Sequence[float] | None,
    placement: str,
    barriers: int,
    seconds: float,
    moves: int | None = None,
    keep: bool = True,
    lean: bool = True,
) -> SearchResult:
    """What `zbcompile.schedules.search` finds on one placement, read from the cache if it was asked the same before.
    Raises what that raises. `keep=False` is for measured costs, which are never the same again."""
    find = partial(search, costs, ranks, microbatches, limits, (placement,))
    find = partial(find, barriers=barriers, seconds=seconds, moves=moves, lean=lean)
    if not keep:
        return find()
    asked = [ranks, microbatches, limits, placement, barriers, seconds, moves, lean, costs.to_json(), _code()]
    key = hashlib.sha256(json.dumps(asked, default=float).encode()).hexdigest()
    file = cache_folder() / f"search-{key}.json.gz"
    with suppress(Exception):  # nothing there, or damaged: the next one takes its place
        return _read(file, costs, limits)
    found = find()
    if found.seconds >= WORTH:
        with suppress(OSError, PipelineError):  # a folder that cannot be written keeps nothing
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(file, _written(found))
    return found


def best_name_of(found: SearchResult) -> tuple[str, float] | None:
    """The named schedule that comes nearest to what was found, with its objective; None if none fits."""
    names = {name: seconds for (name, _), seconds in found.names.items()}
    return min(names.items(), key=lambda each: each[1], default=None)


def _written(found: SearchResult) -> bytes:
    figures = [found.bound, found.objective, found.origin, found.moves, found.seconds]
    names = [[*name, value] for name, value in found.names.items()]
    near = [(seconds, to_json(order)) for seconds, order in found.named if seconds <= NEAR * found.objective]
    return gzip.compress(json.dumps([figures, names, to_json(found.schedule), near], default=float).encode())


def _read(file: Path, costs: Costs, limits: Sequence[float] | None) -> SearchResult:
    """Checked and simulated anew, so a file that was changed is no answer."""
    (bound, objective, origin, moves, seconds), names, text, near = json.loads(gzip.decompress(file.read_bytes()))
    simulation = _simulated(text, costs, limits)
    if float(simulation.makespan) != objective:
        raise PipelineError(f"{file}: not what was found for these costs")
    named = {(name, on): value for name, on, value in names}
    on = {str(simulation.schedule.placement): (bound, objective)}
    orders = tuple((takes, _simulated(order, costs, limits).schedule) for takes, order in near)
    return SearchResult(simulation.schedule, simulation, bound, objective, origin, moves, seconds, named, on, orders)


def _simulated(text: str, costs: Costs, limits: Sequence[float] | None) -> Timeline:
    simulation = simulate(from_json(text).program, costs)
    check(simulation.schedule)
    if limits is not None and any(a > b * ROUNDING for a, b in zip(simulation.peak_memory, limits, strict=True)):
        raise PipelineError("an order that was kept holds more than the limits")
    return simulation


@cache
def _code() -> str:
    """What searches: another version may find something else."""
    files = sorted(Path(schedules.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
