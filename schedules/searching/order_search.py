"""From costs to an order: the search and the bound of what any order takes."""

from collections.abc import Callable, Sequence

from zbcompile.field_check import is_amount
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.searching.hunt import Hunt, SearchResult
from zbcompile.schedules.searching.lower_bound import lower_bound
from zbcompile.schedules.searching.question import problems_of
from zbcompile.schedules.searching.search_budget import Budget


def search(
    costs: Costs | Callable[[int], Costs],
    ranks: int,
    microbatches: int,
    memory_limit: float | Sequence[float] | None = None,
    placements: Sequence[str | Placement] | None = None,
    barrier: bool = True,
    seconds: float = 20,
    moves: int | None = None,
    seed: int = 0,
    barriers: int = 1,
    lean: bool = True,
) -> SearchResult:
    """Search the shortest order of `microbatches` on `ranks`, and say how far from the best it can be.

    `costs` are those of the whole model cut into the largest number of stages that may be used, merged for fewer, or a
    function from a number of stages to costs. `placements` ("linear", "looped:2", "v", ...) are all that the costs
    allow by default; "dual", which keeps two copies of every stage, only on request. `memory_limit` is one number or
    one for each rank, in the unit of `costs.activation`. With `barrier` the makespan counts, else the cost.
    `barriers` is that of `with_vocabulary`, for costs with S and T.

    Of equally short orders it finds the one whose fullest rank holds least; `lean=False` saves looking for one that
    holds still less. It stops when the bound is met, after `moves` tried changes (0: the best of
    the orders to start from) or after `seconds`. What it tries does not depend on how much of either it gets: the same
    seed and number of moves find the same order, and more never a longer one. Ctrl-C returns the best so far. Raises
    `ScheduleError` if nothing fits, and for costs or placements that do not fit the ranks.

    >>> from zbcompile.schedules import Costs, search
    >>> found = search(Costs.uniform(2), ranks=2, microbatches=4, placements=["linear"], moves=1000)
    >>> found.objective, found.bound, found.proven
    (13, 13, True)
    """
    if not is_amount(seconds):
        raise ScheduleError(f"seconds={seconds!r:.80}; expected a finite number that is not negative")
    if moves is not None and not (isinstance(moves, int) and is_amount(moves)):
        raise ScheduleError(f"moves={moves!r:.80}; expected a whole number from 0 on, or None")
    budget = Budget(seconds, moves)
    problems = problems_of(costs, ranks, microbatches, memory_limit, placements, barrier, barriers)
    hunt = Hunt(problems, budget, seed)
    try:
        hunt.run()
        if lean:
            hunt.run_as_short()
    except KeyboardInterrupt:
        if not hunt.pool:
            raise
    finally:
        hunt.progress.end()
    return hunt.found()


def bound(
    costs: Costs | Callable[[int], Costs],
    ranks: int,
    microbatches: int,
    placement: str | Placement,
    memory_limit: float | Sequence[float] | None = None,
    barrier: bool = True,
    barriers: int = 1,
) -> float:
    """What no order on this placement can be shorter than: its makespan, without `barrier` its cost.

    Arguments and errors as of `search`.

    >>> from zbcompile.schedules import Costs, bound
    >>> bound(Costs.uniform(4), ranks=4, microbatches=8, placement="linear")
    27
    """
    (problem,) = problems_of(costs, ranks, microbatches, memory_limit, (placement,), barrier, barriers)
    return lower_bound(problem)
