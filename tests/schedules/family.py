"""Every schedule at small sizes, for tests over the whole family."""

import random
from collections.abc import Iterator

from zbcompile.schedules import Costs, Schedule, ScheduleError, build, names


def small_schedules(ranks: range, microbatches: range) -> Iterator[Schedule]:
    """Every name at every admitted size."""
    for name in names():
        for p in ranks:
            for m in microbatches:
                try:
                    yield build(name, ranks=p, microbatches=m)
                except ScheduleError as error:
                    if "admits" not in str(error):
                        raise


def random_costs(generator: random.Random, stages: int) -> Costs:
    """Whole numbers, so that every sum is exact; some passes empty, some hops free."""

    def draw(low: int, high: int) -> tuple[int, ...]:
        return tuple(generator.randint(low, high) for _ in range(stages))

    return Costs(
        forward=draw(1, 20),
        backward=draw(1, 20),
        weight=draw(0, 20),
        activation=draw(10, 20),
        residue=draw(0, 10),
        comm=generator.choice((0, 1, 5, 30)),
    )
