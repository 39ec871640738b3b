"""The input of a generator, and the form of its result."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.ir.actions import Step
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import Schedule

Order = tuple[Step, ...]
Orders = tuple[Order, ...]


@dataclass(frozen=True)
class Task:
    """Order `microbatches` on `placement`.

    `costs` is None if the caller gave none; `memory_limit` (unit of `costs.activation`) likewise.
    """

    placement: Placement
    microbatches: int
    costs: Costs | None = None
    memory_limit: float | None = None

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def chunks(self) -> int:
        return self.placement.chunks

    @cached_property
    def costs_or_equal(self) -> Costs:
        """The given costs, or the textbook's: F, B and W take the same time and messages none."""
        return self.costs or Costs.uniform(self.placement.stages)

    def schedule(self, orders: Orders) -> Schedule:
        """Returns these orders as a schedule without a name."""
        return Schedule("", self.placement, self.microbatches, orders)

    def peaks(self, orders: Orders) -> tuple[float, ...]:
        """Returns the peak memory of each rank."""
        return peak_memory(self.schedule(orders), self.costs_or_equal)


Generator = Callable[..., Orders]


def each_rank(order: Callable[..., Order]) -> Generator:
    """Turn `order(task, rank)` of one rank into a generator of all of them."""

    @wraps(order)
    def generate(task: Task, **options: Any) -> Orders:
        return tuple(order(task, rank, **options) for rank in range(task.ranks))

    return generate
