"""Every way to divide ranks among replicas, pipelines and parts of matrices, with the layouts of each pipeline."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import sub

from zbcompile.compiler.compile_model import LaidOut
from zbcompile.compiler.prices import LinePrices
from zbcompile.passes.compile_options import Barriers, Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.machine.hardware import Connection
from zbcompile.passes.partition.memory_estimate import ReplicaSharding
from zbcompile.planning.fastest_layouts import fastest_layouts
from zbcompile.planning.layouts import HUGE, LayoutSearch, rounded, whole_step
from zbcompile.planning.planner import PricedStep
from zbcompile.program.choice import Choice
from zbcompile.schedules import ScheduleError, bound, simulate
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.searching.pairs import with_pairs

GIANT = 10_000  # ranks x microbatches: at more, a glance takes minutes
SLOW = 3.0  # times longer than the fastest: what holds little because almost nothing runs side by side


@dataclass(frozen=True)
class PlanRow:
    """One way to use the ranks: a layout for a step of `rows` rows of the batch, of `tokens` tokens each. `exchange`:
    seconds that the sum of gradients over replicas adds to the step; `spread`: the share by which calibrated figures
    vary; `best`: no row that takes less memory is faster."""

    choice: Choice
    rows: int
    tokens: int = 1
    exchange: float = 0.0
    spread: float | None = None
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
    """A captured step of one of `tensor` ranks that share every matrix, for a microbatch of `rows` rows with `tokens`
    tokens each. `measured`: seconds of operations, for `balance="measured"`."""

    laid_out: LaidOut
    rows: int
    tokens: int = 1
    measured: Mapping[str, float] = field(default_factory=dict)
    tensor: int = 1


@dataclass(frozen=True)
class PlanQuestion:
    """What is asked of every way to divide the ranks.

    `batch`: rows of a step over all replicas (None: four microbatches for each rank of a pipeline). `dimensions`: those
    of the mesh that may have several ranks. `microbatches` of each replica, and `chunks`, stages per rank, are fixed if
    they are given. `fused`: see `seconds_of`. `zero` and `reshard`: what replicas divide, see `ReplicaSharding`.
    """

    choices: Choices
    batch: int | None = None
    dimensions: Collection[str] = ("dp", "pp")
    schedule: str = "auto"
    microbatches: int | None = None
    chunks: int | None = None
    fused: bool = False
    zero: int = 0
    reshard: bool = False


def factorisations(
    step: CapturedStep,
    question: PlanQuestion,
    ranks: int,
    seconds: float,
    announce: Callable[[str], None],
    best: float = inf,
) -> tuple[list[PlanRow], list[str], float]:
    """The rows for that many ranks altogether, why other numbers of pipeline ranks are impossible or left out, and
    `best`: seconds for a row of the batch that no line in a division that was searched, or before, beats; a larger
    division whose line must take longer is left out. `seconds` may be spent on the search altogether."""
    places, dimensions = ranks // step.tensor, question.dimensions
    copies = find(question.schedule).placement == "dual"  # of the model, whose parameters live whole
    divided = ReplicaSharding(zero=min(question.zero, 2 if copies else 3), reshard=question.reshard)
    least, most = 1 if "dp" in dimensions else places, places if "pp" in dimensions else 1
    sizes = [size for size in range(least, most + 1) if places % size == 0]
    found, impossible = list[PlanRow](), list[str]()
    hardware, choices = question.choices.hardware, on_mesh(question.choices, step.tensor)
    spread = hardware.spread if hardware else None
    priced = PricedStep(step.laid_out, choices, step.measured, fused=question.fused)
    for size in sizes:
        replicas, beside = places // size, f"tp={step.tensor}, " if step.tensor > 1 else ""
        ring = hardware.collective(replicas, size * step.tensor) if hardware else None
        announce(f"dp={replicas}, {beside}pp={size}")
        try:
            own, sharding = _own_rows(step, question, replicas, size), replace(divided, replicas=replicas)
            costs = {vocab: each.for_replicas(sharding) for vocab, each in priced.costs(size).items()}
            search = _search(step, costs, replace(question, choices=choices), size, own)
            if question.schedule == "auto":
                best = min(best, _require_promise(search, own * replicas, best))
            for choice in fastest_layouts(search, seconds / len(sizes), announce):
                choice = _hiding(choice, search)
                exchange = _exchange(choice, search, replicas, ring)
                choice = replace(choice, layout=replace(choice.layout, replicas=replicas, tensor=step.tensor))
                found.append(PlanRow(choice, own * replicas, step.tokens, exchange, spread))
        except (PartitionError, ScheduleError) as error:
            first, *more = str(error).split("; ")[0].splitlines()  # of several reasons one, with what is missing
            impossible.append(f"{beside}pp={size}: {first}{''.join(f': {each.strip()}' for each in more[:1])}")
    return found, impossible, best


def on_mesh(choices: Choices, tensor: int) -> Choices:
    """The choices for a mesh: messages take the link between neighbours of a pipeline, which are `tensor` ranks apart,
    and exchanges the one between ranks that share every matrix."""
    hardware = choices.hardware
    if hardware is None or tensor == 1:
        return choices
    within, exchange = hardware.connection(0, tensor), hardware.collective(tensor) or hardware.exchange
    return replace(choices, hardware=replace(hardware, within=within, exchange=exchange))


def _own_rows(step: CapturedStep, question: PlanQuestion, replicas: int, ranks: int) -> int:
    """The rows of a replica: its share of the batch, a multiple of those of a microbatch."""
    batch, count = question.batch, question.microbatches
    if batch is None:
        return (count or 4 * ranks) * step.rows
    unit = step.rows if count is None else count
    if batch % (replicas * unit):
        what = f"{unit} rows" if count is None else f"{unit} microbatches"
        raise PartitionError(f"a batch of {batch} rows is not {replicas} x a multiple of {what}")
    return batch // replicas


def _require_promise(search: LayoutSearch, rows: int, best: float) -> float:
    """Seconds for a row that a line of this division takes at least. Raises PartitionError for a division whose step is
    large if others fit and `best` of them is less, or if it takes minutes to search."""
    size = search.ranks * min(search.microbatches, 2 * search.ranks)
    if size > GIANT and best < inf:
        raise PartitionError(
            f"left out: {search.ranks} ranks x {search.microbatches} microbatches take minutes to search, and smaller "
            f"pipelines fit; --ranks {search.ranks} --mesh pp searches them"
        )
    found = search.least_of_line() / rows
    if size > HUGE and best <= found < inf:
        raise PartitionError(
            f"left out: a line takes {found * rows:.4g} s a step at least, {found / best:.3g} times as long a row as "
            "one in a smaller division, which was searched"
        )
    return found


def _search(
    step: CapturedStep, costs: Mapping[Barriers, LinePrices], question: PlanQuestion, ranks: int, own: int
) -> LayoutSearch:
    """The search for a pipeline of `ranks`, whose step has `own` rows."""
    count = question.microbatches or own // step.rows
    free = question.batch is not None and question.microbatches is None
    counts = tuple(n for n in range(max(1, ranks), 8 * ranks + 1) if own % n == 0) if free else ()
    task = costs, ranks, count, question.choices, counts, question.chunks
    return LayoutSearch(*task, brief=True, schedule=question.schedule, rows=own / (count * step.rows))


def _hiding(choice: Choice, search: LayoutSearch) -> Choice:
    """The choice with the pairs that a program gets where stages exchange tensors in the middle of a microbatch, if
    they shorten the step. Its bound then counts no exchange that may be hidden."""
    before, layout = search.timeline(choice), choice.layout
    costs = before.costs
    if search.choices.pairs == "given" or not any((*costs.forward_exchange, *costs.backward_exchange)):
        return choice
    after = simulate(with_pairs(choice.order, costs), costs)
    seconds = whole_step(layout, after)
    if seconds >= choice.seconds:
        return choice
    forward = tuple(map(sub, costs.forward, costs.forward_exchange))
    backward = tuple(map(sub, costs.backward, costs.backward_exchange))
    free = replace(costs, forward=forward, backward=backward)
    least = bound(free, layout.ranks, after.schedule.microbatches, layout.placement, barriers=layout.barriers)
    bubble = 1 - after.work * layout.microbatches / after.schedule.microbatches / seconds
    return replace(choice, order=after.schedule, seconds=seconds, bound=min(least, seconds), bubble=bubble)


def _exchange(choice: Choice, search: LayoutSearch, replicas: int, ring: Connection | None) -> float:
    """Seconds from the last pass to the end of the sums of gradients: each rank's begins behind its own last one. A
    ring passes each byte on twice. Where parameters are gathered, with what passes wait for that."""
    if replicas == 1 or ring is None:
        return 0.0
    layout, prices = choice.layout, search.lines[choice.layout.vocab]
    plain = search.timeline(choice)

    def ring_seconds(size: float) -> float:
        return (replicas - 1) * (ring.latency + size / replicas / ring.bandwidth)

    gathers = prices.sharding.gathers
    sizes = [sum(each.size for each in stage.values()) for stage in prices.divided(layout.edges)]
    step = search.timeline(choice, [*map(ring_seconds, sizes)]) if gathers else plain
    ends, before = ([max(rank, default=0.0) for rank in each.run.end] for each in (step, plain))
    sums = [2 * ring_seconds(size) for size in prices.gradients(layout.edges, layout.parsed)]
    return max(0.0, max(map(sum, zip(ends, sums, strict=True))) - max(before))


def ranked(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """The fastest first. The best in their way take less memory than all that are faster, and are not slower than
    any machine would be used for."""
    found, least = sorted(rows, key=lambda row: (-rounded(row.rate), row.peak)), float("inf")
    for at, row in enumerate(found):
        found[at] = replace(row, best=row.peak < least and row.rate >= found[0].rate / SLOW)
        least = min(least, row.peak)
    return found
