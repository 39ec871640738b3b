"""Every way to divide ranks among replicas, pipelines and parts of matrices, with the layouts of each pipeline."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from zbcompile.compiler.compile_model import LaidOut
from zbcompile.compiler.prices import LinePrices
from zbcompile.passes.compile_options import Barriers, Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.machine.hardware import Connection
from zbcompile.planning.layouts import LayoutSearch, rounded
from zbcompile.planning.planner import PricedStep
from zbcompile.program.choice import Choice
from zbcompile.schedules import ScheduleError

SLOW = 3.0  # times longer than the fastest: what holds little because almost nothing runs side by side


@dataclass(frozen=True)
class PlanRow:
    """One way to use the ranks, with `rows` of the batch per step, of `tokens` tokens each. `exchange` is by how many
    seconds the sum of the gradients over the replicas prolongs the step. `best`: nothing is faster that takes less
    memory."""

    choice: Choice
    rows: int
    tokens: int = 1
    exchange: float = 0.0
    best: bool = False

    @property
    def mesh(self) -> tuple[int, int, int]:
        """The ranks along "dp", "tp" and "pp"."""
        return self.choice.layout.replicas, self.choice.layout.tensor, self.choice.layout.ranks

    @property
    def seconds(self) -> float:
        return self.choice.seconds + self.exchange

    @property
    def rate(self) -> float:
        """Tokens of the batch (rows, where these are none) per second, of all replicas."""
        return self.rows * self.tokens / self.seconds

    @property
    def peak(self) -> float:
        """Bytes on the fullest rank."""
        return max(self.choice.peak)


@dataclass(frozen=True)
class CapturedStep:
    """The step of one of `tensor` ranks that share every matrix, for a microbatch of `rows` rows, with this many
    `tokens` each; `measured` are the times of operations for `balance="measured"`."""

    laid_out: LaidOut
    rows: int
    tokens: int = 1
    measured: Mapping[str, float] = field(default_factory=dict)
    tensor: int = 1


def factorisations(
    step: CapturedStep,
    choices: Choices,
    ranks: int,
    batch: int | None,
    seconds: float,
    announce: Callable[[str], None],
    dimensions: Collection[str] = ("dp", "pp"),
) -> tuple[list[PlanRow], list[str]]:
    """The rows for that many ranks altogether, and why other numbers of pipeline ranks are impossible.

    `batch` is the number of rows of a whole step over all replicas, by default four microbatches for each pipeline
    rank; `seconds` may be spent on the search altogether; `dimensions` of the mesh have several ranks, others one.
    """
    places = ranks // step.tensor
    least, most = 1 if "dp" in dimensions else places, places if "pp" in dimensions else 1
    sizes = [size for size in range(least, most + 1) if places % size == 0]
    found: list[PlanRow] = []
    impossible: list[str] = []
    hardware, choices = choices.hardware, on_mesh(choices, step.tensor)
    priced = PricedStep(step.laid_out, choices, step.measured)
    for size in sizes:
        replicas, beside = places // size, f"tp={step.tensor}, " if step.tensor > 1 else ""
        ring = hardware.collective(replicas, size * step.tensor) if hardware else None
        announce(f"dp={replicas}, {beside}pp={size}")
        try:
            search = _search(step, priced.costs(size), choices, replicas, size, batch)
            for choice in search.run(seconds / len(sizes), announce):
                exchange = _exchange(choice, search, replicas, ring)
                choice = replace(choice, layout=replace(choice.layout, replicas=replicas, tensor=step.tensor))
                found.append(PlanRow(choice, search.microbatches * step.rows * replicas, step.tokens, exchange))
        except (PartitionError, ScheduleError) as error:
            first, *more = str(error).split("; ")[0].splitlines()  # of several reasons one, with what is missing
            impossible.append(f"{beside}pp={size}: {first}{''.join(f': {each.strip()}' for each in more[:1])}")
    return found, impossible


def on_mesh(choices: Choices, tensor: int) -> Choices:
    """With the link between two neighbours of a pipeline, which are `tensor` ranks apart, and for exchanges that among
    the ranks that share every matrix."""
    hardware = choices.hardware
    if hardware is None or tensor == 1:
        return choices
    within, exchange = hardware.connection(0, tensor), hardware.collective(tensor) or hardware.exchange
    return replace(choices, hardware=replace(hardware, within=within, exchange=exchange))


def _search(
    step: CapturedStep,
    costs: Mapping[Barriers, LinePrices],
    choices: Choices,
    replicas: int,
    ranks: int,
    batch: int | None,
) -> LayoutSearch:
    """The search for a pipeline of `ranks`, each replica with its share of the batch."""
    own = 4 * ranks * step.rows if batch is None else batch // replicas
    if batch is not None and (batch % replicas or own % step.rows):
        raise PartitionError(f"a batch of {batch} rows is not {replicas} x a multiple of {step.rows} rows")
    counts = tuple(n for n in range(max(1, ranks), 8 * ranks + 1) if own % n == 0) if batch is not None else ()
    return LayoutSearch(costs, ranks, own // step.rows, choices, counts, brief=True)


def _exchange(choice: Choice, search: LayoutSearch, replicas: int, ring: Connection | None) -> float:
    """By how many seconds sums of gradients end after the last pass: each rank's begins behind its own last one. A ring
    passes each byte on twice."""
    if replicas == 1 or ring is None:
        return 0.0
    layout, ends = choice.layout, [max(rank, default=0.0) for rank in search.timeline(choice).run.end]
    sizes = search.lines[layout.vocab].gradients(layout.edges, layout.parsed)
    sums = [2 * (replicas - 1) * (ring.latency + size / replicas / ring.bandwidth) for size in sizes]
    return max(0.0, max(map(sum, zip(ends, sums, strict=True))) - max(ends))


def ranked(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """The fastest first. The best in their way take less memory than all that are faster, and are not slower than
    any machine would be used for."""
    found, least = sorted(rows, key=lambda row: (-rounded(row.rate), row.peak)), float("inf")
    for at, row in enumerate(found):
        found[at] = replace(row, best=row.peak < least and row.rate >= found[0].rate / SLOW)
        least = min(least, row.peak)
    return found
