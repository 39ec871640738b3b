"""Every way to divide ranks among replicas and pipelines, each with the layouts of its pipeline."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from zbcompile.compiler.compile_model import Drawn
from zbcompile.compiler.line_costs import LineCosts
from zbcompile.passes.compile_options import Barriers, Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.planning.layouts import Layout, Question, find_layouts
from zbcompile.planning.planner import Priced
from zbcompile.schedules import ScheduleError


@dataclass(frozen=True)
class Row:
    """One way to use the ranks: `replicas` of a pipeline of `ranks`, laid out so, with `rows` of the batch per step, of
    so many `tokens` each. `exchange` is by how many seconds the sum of the gradients over the replicas prolongs the
    step. `best`: nothing is faster that takes less memory."""

    replicas: int
    ranks: int
    layout: Layout
    rows: int
    tokens: int = 1
    exchange: float = 0.0
    best: bool = False

    @property
    def seconds(self) -> float:
        return self.layout.seconds + self.exchange

    @property
    def rate(self) -> float:
        """Tokens of the batch (rows, where these are none) per second, of all replicas."""
        return self.rows * self.tokens / self.seconds

    @property
    def peak(self) -> float:
        """Bytes on the fullest rank."""
        return max(self.layout.peak)


def factorisations(
    drawn: Drawn,
    choices: Choices,
    ranks: int,
    microbatch: int,
    tokens: int,
    batch: int | None,
    seconds: float,
    measured: Mapping[str, float],
    announce: Callable[[str], None],
    dimensions: Collection[str] = ("dp", "pp"),
) -> tuple[list[Row], list[str]]:
    """The rows, the fastest first, with those marked that nothing beats in both time and memory; and why other numbers
    of pipeline ranks are impossible.

    `microbatch` is the number of rows of the captured microbatch, `tokens` that in each of them, `batch` that of a
    whole step over all replicas, by default four microbatches for each rank; `seconds` may be spent on the search
    altogether; `measured` are the times of operations for `balance="measured"`; `dimensions` of the mesh have several
    ranks, others one.
    """
    least, most = 1 if "dp" in dimensions else ranks, ranks if "pp" in dimensions else 1
    sizes = [size for size in range(least, most + 1) if ranks % size == 0]
    found: list[Row] = []
    impossible: list[str] = []
    priced = Priced(drawn, choices, measured)
    for size in sizes:
        replicas = ranks // size
        announce(f"{replicas} replicas of {size} pipeline ranks")
        try:
            task = priced.costs(size), choices, replicas, size, microbatch, batch, seconds / len(sizes), announce
            found += (replace(row, tokens=tokens) for row in _rows(*task))
        except (PartitionError, ScheduleError) as error:
            impossible.append(f"pp={size}: {str(error).splitlines()[0]}")
    return list(_marked(sorted(found, key=lambda row: (-row.rate, row.peak)))), impossible


def _rows(
    costs: Mapping[Barriers, LineCosts],
    choices: Choices,
    replicas: int,
    ranks: int,
    microbatch: int,
    batch: int | None,
    seconds: float,
    announce: Callable[[str], None],
) -> Iterator[Row]:
    own = 4 * ranks * microbatch if batch is None else batch // replicas
    if batch is not None and (batch % replicas or own % microbatch):
        raise PartitionError(f"a batch of {batch} rows is not {replicas} x a multiple of {microbatch} rows")
    count = own // microbatch
    counts = tuple(n for n in range(max(1, ranks), 8 * ranks + 1) if own % n == 0) if batch is not None else ()
    question = Question(costs, ranks, count, choices, counts, brief=True)
    for layout in find_layouts(question, seconds, announce):
        exchange = _exchange(layout, costs[layout.choices.vocab], replicas)
        yield Row(replicas, ranks, layout, own * replicas, exchange=exchange)


def _exchange(layout: Layout, costs: LineCosts, replicas: int) -> float:
    """By how many seconds sums of gradients end after the last pass: each rank's begins behind its own last one. A ring
    passes each byte on twice, over the slowest link between replicas, which stand next to each other in no node."""
    hardware, timeline = layout.choices.hardware, layout.found.simulation
    placement = timeline.schedule.placement
    link = hardware.connection(0, (replicas - 1) * placement.ranks) if hardware else None
    if replicas == 1 or link is None:
        return 0.0
    steps, share = 2 * (replicas - 1), 1 / replicas
    sums = [steps * (link.latency + share * size / link.bandwidth) for size in costs.gradients(layout.edges, placement)]
    ends = [max(rank, default=0.0) for rank in timeline.run.end]
    return max(0.0, max(map(sum, zip(ends, sums, strict=True))) - max(ends))


def _marked(rows: Iterable[Row]) -> Iterator[Row]:
    """Of rows by falling rate, each that takes less memory than all before is the best in its way."""
    least = float("inf")
    for row in rows:
        yield replace(row, best=row.peak < least)
        least = min(least, row.peak)
