"""`schedule="auto"`: from a captured step to the fastest layout that fits, and from its graphs to the final order."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import Any

from torch.fx import Node

from zbcompile.compiler.block_prices import Made
from zbcompile.compiler.compile_model import LaidOut, whole_of
from zbcompile.compiler.paired_schedule import in_order
from zbcompile.compiler.prices import LinePrices, ShardPrice
from zbcompile.compiler.stage_price import running_of
from zbcompile.compiler.vocabulary_sharding import VocabularySharding, tiling_of
from zbcompile.errors import PipelineError
from zbcompile.passes.compile_options import Barriers, Choices
from zbcompile.passes.machine.hardware import Connection
from zbcompile.passes.vocabulary.shard_program import even_bounds
from zbcompile.planning.fastest_layouts import fastest_layouts
from zbcompile.planning.layouts import LayoutSearch
from zbcompile.prediction.measure_passes import measure_pieces, measured_costs
from zbcompile.prediction.predict import hardware_of, predicted_costs, prices_of, with_memory
from zbcompile.program.choice import Choice, Layout
from zbcompile.program.program import Program
from zbcompile.schedules import Schedule, SearchResult, search
from zbcompile.schedules.checking.schedule_rules import OWN_WEIGHT_ORDER
from zbcompile.schedules.execution.memory import most_beside, with_messages

SHARE = 0.5  # of the time for the search, spent on layouts; the rest finds the order under the costs of the graphs
LAYOUTS = 6  # that can be tried on the ranks, or compiled in turn until one fits
CLOSE = 1.25  # how much longer than the best one the steps of those are that are tried, by prediction
NAMES = 4  # named schedules that can be tried on the ranks,
NEAR = 1.05  # if they take no more than this share of the best order

SEARCH_SECONDS = 20.0  # of a search, and then of the trials of what it found


def decide(
    laid_out: LaidOut,
    provisional: Schedule,
    choices: Choices,
    counts: Sequence[int],
    chunks: int | None,
    budget: float,
    link: Connection | None = None,
    announce: Callable[[str], None] = lambda text: None,
) -> list[Choice]:
    """Lay out the captured step, which has a microbatch of `provisional`, within `budget` seconds of search: the
    fastest layout, and behind it others: on other placements, with other numbers of microbatches or recomputation, or
    where only one of two shards the output layer.

    `counts` are the numbers of microbatches that may be chosen, `chunks` the stages per rank if they are given,
    `link` what connects two ranks if the hardware does not
    say it. Raises PartitionError if nothing fits.
    """
    lines = PricedStep(laid_out, choices, link).costs(provisional.ranks)
    search = LayoutSearch(lines, provisional.ranks, provisional.microbatches, choices, tuple(counts), chunks)
    found = fastest_layouts(search, SHARE * budget, announce)
    kinds = {_kind(each.layout): each for each in reversed(found)}
    best = sorted(kinds.values(), key=found.index)[:LAYOUTS]
    return [
        replace(
            each,
            nominal=each.seconds,
            others=tuple((str(other.layout), other.seconds) for other in found if other is not each),
        )
        for each in best
    ]


def _kind(layout: Layout) -> tuple[str, int, bool, object]:
    recompute = "by stage" if isinstance(layout.recompute, tuple) else layout.recompute
    return layout.placement, layout.microbatches, layout.vocab == "off", recompute


@dataclass(frozen=True, eq=False)
class PricedStep:
    """A captured step priced by its operations, for any number of ranks; `link` is what connects two ranks if the
    hardware does not say it; `fused`: see `seconds_of`."""

    laid_out: LaidOut
    choices: Choices
    link: Connection | None = None
    fused: bool = False

    def costs(self, ranks: int) -> dict[Barriers, LinePrices]:
        """The prices of the line for each `vocab=` that may be chosen: the user's, or for "auto" the output layer
        whole, and sharded with one barrier and with two. Every rank has an equal part of a sharded one."""
        asked: tuple[Barriers, ...] = (self.choices.vocab,)
        if self.choices.vocab == "auto":
            asked = ("off", 1, 2) if self.laid_out.sharding and ranks > 1 else ("off",)
        return {vocab: self._costs(vocab, ranks) for vocab in asked}

    def _costs(self, vocab: Barriers, ranks: int) -> LinePrices:
        if vocab == "off" or self.laid_out.sharding is None:
            return self._whole
        return self._trunk.with_shard(_shard(self.laid_out.sharding, self._head / ranks, ranks, self.choices, vocab))

    @cached_property
    def _whole(self) -> LinePrices:
        return self._prices(whole_of(self.laid_out))

    @cached_property
    def _trunk(self) -> LinePrices:
        return self._prices(self.laid_out)

    @cached_property
    def _head(self) -> float:
        """Seconds of what is sharded."""
        return max(0.0, sum(self._whole.loads) - sum(self._trunk.loads))

    @cached_property
    def _made(self) -> Made:
        return {}

    def _prices(self, laid_out: LaidOut) -> LinePrices:
        """Prices of the whole step, or of one without its output layer; the two have most blocks in common."""
        hardware = self.choices.hardware
        link = hardware.within if hardware else self.link
        behind = laid_out.sharding.gradient if laid_out.sharding else None
        of_line = laid_out.canonical, laid_out.line, self.choices, behind, self._made
        return LinePrices(*of_line, link=link, fused=self.fused)


def _shard(sharding: VocabularySharding, seconds: float, ranks: int, choices: Choices, vocab: Barriers) -> ShardPrice:
    """An equal part of the output layer and of the embedding that is sharded with it."""
    head = sharding.head
    logits = head.logits // ranks * head.dtype.itemsize
    kept = tiling_of(head, even_bounds(head.size, ranks)).keep
    sizes = [
        {n.meta["slot"].name: n.meta["val"].nbytes for n in each.graph.find_nodes(op="placeholder") if _trains(n)}
        for each in (sharding.whole, sharding.trunk)
    ]
    parameters = sum(size for name, size in sizes[0].items() if name not in sizes[1]) / ranks
    third, scans = seconds / 3, 1 if vocab == 2 else 2  # of three products S makes two with one barrier
    output = next(iter(sharding.gradient.values())).nbytes
    return ShardPrice(scans * third, (3 - scans + (not kept)) * third, logits * kept, parameters, output)


def _trains(node: Node) -> bool:
    return bool(node.meta["slot"].kind == "parameter")


def pass_seconds(program: Program) -> dict[str, float]:
    """The seconds of the program's passes, as `measure_pieces` measures them here; empty if the program is for other
    hardware, or if its graphs have collectives, which one process cannot run."""
    if program.choices.hardware is None:
        with suppress(PipelineError):
            return measure_pieces(program)
    return {}


def order_by_graphs(
    program: Program,
    choice: Choice,
    budget: float,
    measured: Mapping[str, float] | None = None,
    link: Connection | None = None,
) -> list[Choice]:
    """The choice with the order that was found for the costs of the compiled graphs, and behind it with the named
    schedules that come close. Costs are the seconds of `pass_seconds` and of the `link`, or else FLOPs. `budget`:
    seconds of which the search gets its share. Raises ScheduleError if no order fits into the memory."""
    costs, basis = predicted_costs(program), f"FLOPs and bytes on {hardware_of(program)}"
    if measured:
        costs, basis = with_memory(measured_costs(program, measured), program), "passes measured on this device"
        if link is not None:
            costs, basis = replace(costs, comm=link.latency, bandwidth=link.bandwidth), "passes and messages measured"
    schedule, memory = program.schedule, program.choices.memory
    costs, room = with_messages(costs, schedule.placement), None
    if memory is not None:
        held = map(add, choice.resident, most_beside(schedule.placement, costs, running_of(prices_of(program))))
        room = [max(0.0, memory - each) for each in held]
    barriers = program.vocabulary.barriers if program.vocabulary else 1
    task = costs, schedule.ranks, schedule.microbatches, room, (str(schedule.placement),)
    found = search(*task, barriers=barriers, seconds=(1 - SHARE) * budget)
    figures: dict[str, Any] = {"bound": float(found.bound), "basis": basis, "best_name": found.best_name}
    orders = [(float(found.objective), found.origin, found.schedule)]
    orders += [(seconds, order.name, order) for seconds, order in _names_near(found)]
    return [
        replace(choice, **figures, seconds=seconds, origin=origin, order=replace(order, lookups=schedule.lookups))
        for seconds, origin, order in orders
    ]


def _names_near(found: SearchResult) -> list[tuple[float, Schedule]]:
    """The named orders that are little longer than the one that was found, shortest first."""
    near = [(float(seconds), order) for seconds, order in found.named if seconds <= NEAR * found.objective]
    near = [each for each in near if each[1].name not in OWN_WEIGHT_ORDER]  # the choice cannot change the bits
    other = {str(order.orders): (seconds, order) for seconds, order in reversed(near)}  # of equal ones the first
    other.pop(str(found.schedule.orders), None)
    return sorted(other.values(), key=lambda each: each[0])[:NAMES]


def reordered(program: Program, choice: Choice) -> Program:
    """The program with the order that was chosen for its passes."""
    return replace(in_order(program, choice.order), plan=choice)
