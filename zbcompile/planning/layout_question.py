"""What is to be laid out, and one way to do it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from zbcompile.compiler.cut_planning import places_of
from zbcompile.compiler.prices import LinePrices
from zbcompile.compiler.vocabulary_sharding import WORTH
from zbcompile.passes.compile_options import Barriers, Choices, Policy
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.partition.balance import Row, best_cuts, heaviest_piece
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.passes.partition.search import Limits, choose_edges
from zbcompile.schedules import Found, Placement, Schedule

CORNERS: tuple[Policy, ...] = ("hints", 0.5, "full")
PLACEMENTS = ("linear", "looped:2", "v", "looped:4")


def rounded(seconds: float) -> float:
    """To nine digits: sums that differ in their last ones are equal, so that memory decides.

    >>> rounded(0.1 + 0.2) == rounded(0.3)
    True
    """
    return float(f"{seconds:.9g}")


@dataclass(frozen=True)
class Layout:
    """One way to lay a step out: the cuts, the order that was found for them (of a question that is `brief`, for the
    first microbatches alone), what the ranks hold all the time and at most, and the seconds of the step."""

    placement: str
    microbatches: int
    choices: Choices
    edges: tuple[int, ...]
    resident: tuple[float, ...]
    peak: tuple[float, ...]
    found: Found
    seconds: float

    @property
    def bubble(self) -> float:
        """The share of the step in which its busiest rank waits."""
        work = self.found.simulation.work * self.microbatches / self.found.schedule.microbatches
        return 1 - work / self.seconds if self.seconds else 0.0

    @property
    def schedule(self) -> Schedule:
        return self.found.schedule

    def __str__(self) -> str:
        sharded = f", vocab={self.choices.vocab}" if self.choices.vocab != "off" else ""
        recompute = self.choices.recompute
        policies = ",".join(map(str, recompute)) if isinstance(recompute, tuple) else recompute
        shown = f"placement {self.placement}, {self.microbatches} microbatches, recompute={policies}"
        return shown + sharded

    @property
    def rank(self) -> tuple[float, float]:
        """The less, the better: seconds (what a sharded output layer gains must be worth it), then bytes."""
        return rounded(self.seconds / (1 if self.choices.vocab == "off" else WORTH)), max(self.peak)


@dataclass(frozen=True)
class Question:
    """What is laid out: `lines`, by `vocab=`, are the costs of microbatches as they come if the batch has
    `microbatches` of them, `counts` the other numbers that it can be split into; the `ranks`, what the user has chosen
    already, and `chunks` if given. `brief`: of large steps only the first microbatches are ordered and simulated, and
    the rest follows at the same pace."""

    lines: Mapping[Barriers, LinePrices]
    ranks: int
    microbatches: int
    choices: Choices
    counts: tuple[int, ...] = ()
    chunks: int | None = None
    brief: bool = False

    @property
    def placements(self) -> tuple[str, ...]:
        """The placements that there are cuts for. Raises PartitionError for named cuts that fit none."""
        if self.ranks == 1 and self.chunks is None:
            return ("linear",)
        usual = PLACEMENTS if self.chunks in (None, 1, 2, 4) else (f"looped:{self.chunks}",)
        parsed = {name: Placement.parse(name, self.ranks) for name in usual}
        stages = None if isinstance(self.choices.balance, str) else len(self.choices.balance) + 1
        found = [n for n, p in parsed.items() if self.chunks in (None, p.chunks) and stages in (None, p.stages)]
        if not found:
            raise PartitionError(
                f"balance= names the cuts of {stages} stages, which no placement has on {self.ranks} ranks; expected "
                f"{' or '.join(map(str, sorted({p.stages - 1 for p in parsed.values()})))} cuts."
            )
        return tuple(found)

    @property
    def corners(self) -> tuple[Policy, ...]:
        """What each stage may recompute: under a limit of memory something or all, unless something else was asked."""
        return CORNERS if self.choices.memory is not None and self.choices.recompute == "hints" else ()

    @property
    def recomputations(self) -> tuple[Choices, ...]:
        """What all stages recompute at first sight: as asked for, or everything if that is a corner."""
        return (self.choices, replace(self.choices, recompute="full")) if self.corners else (self.choices,)

    @property
    def shardings(self) -> tuple[Barriers, ...]:
        """What the output layer may be at first sight; two barriers are tried where one is best."""
        return tuple(vocab for vocab in self.lines if vocab != 2 or len(self.lines) == 1)

    def costs(self, choices: Choices) -> LinePrices:
        return self.lines[choices.vocab]

    def require_room(self) -> None:
        """Raise PartitionError if what the ranks hold all the time is more than they have together."""
        room, least = self.choices.memory, min(map(self._held, self.lines.values())) / self.ranks
        if room is not None and least > room:
            raise PartitionError(
                f"no layout fits: rank 0 holds {least:,.0f} bytes of parameters, gradients and optimizer state if all "
                f"{self.ranks} ranks hold equally much, {least - room:,.0f} more than memory={room:.15g}"
            )

    def _held(self, costs: LinePrices) -> float:
        """By all ranks together."""
        return costs.resident((), Placement("linear", 1, 1))[0] + (self.ranks - 1) * costs.shard_bytes

    def cuts(self, placement: str, choices: Choices) -> list[int]:
        """Those that `balance=` names, else cuts into equal parts."""
        costs, parsed = self.costs(choices), Placement.parse(placement, self.ranks)
        if not isinstance(choices.balance, str):
            return edges_named(costs.line, choices.balance, parsed.stages)
        key = placement, id(costs.line)
        if key not in self._equal:
            ranks_of = [parsed.rank(stage) for stage in range(parsed.stages)]
            totals = [0.0, *accumulate(costs.loads)]
            self._equal[key] = choose_edges(costs.line, totals, ranks_of, Limits(choices.boundary_bytes))
        return self._equal[key]

    def lean_cuts(self, placement: str, choices: Choices) -> list[int] | None:
        """Those whose fullest rank holds least with one microbatch; None if there are none."""
        costs, parsed = self.costs(choices), Placement.parse(placement, self.ranks)
        recompute = choices.recompute == "full"  # of all stages: there are no cuts yet
        key = placement, id(costs.line), recompute
        if key not in self._lean:
            totals = costs.held_before(recompute)
            ranks_of = [parsed.rank(stage) for stage in range(parsed.stages)]
            edges = [0, *places_of(costs.line, choices.boundary_bytes), len(costs.line.nodes)]
            best = best_cuts(Row(totals, ranks_of, heaviest_piece(totals, edges)), edges)
            self._lean[key] = best and best[1]
        return self._lean[key]

    @cached_property
    def _lean(self) -> dict[tuple[str, int, bool], list[int] | None]:
        return {}

    @cached_property
    def _equal(self) -> dict[tuple[str, int], list[int]]:
        return {}
