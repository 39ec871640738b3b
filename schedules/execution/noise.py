"""Random variation of a run: passes that take a little longer or shorter than their costs, and late messages."""

import random
from dataclasses import dataclass

from zbcompile.field_check import is_amount
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import Action


@dataclass(frozen=True)
class Noise:
    """How far a run may differ from its costs.

    * `spread`: of the time of every single pass, relative to its cost (standard deviation);
    * `links`: by how much of its delay a message is late on average; most are late by less, a few by much more;
    * `quantile`: which of the `draws` counts; at 0.9, nine of ten steps take at most as long. The same `seed` gives the
      same draws.
    """

    spread: float = 0.1
    links: float = 0.0
    quantile: float = 0.9
    draws: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        shares = is_amount(self.spread) and is_amount(self.links) and is_amount(self.quantile)
        if not shares or not 0 < self.quantile <= 1 or type(self.draws) is not int or self.draws < 1:
            expected = "shares of at least 0, a quantile above 0 and up to 1, and at least one draw"
            raise ScheduleError(f"{self}; expected {expected}")


def as_noise(noise: "Noise | float | None") -> Noise | None:
    """A number is the spread of every pass."""
    return noise if noise is None or isinstance(noise, Noise) else Noise(spread=noise)


class Draw:
    """One draw: the same factor for an action in whatever order it runs."""

    def __init__(self, noise: Noise, number: int) -> None:
        self.noise, self.number = noise, number
        self._factors: dict[Action, tuple[float, float]] = {}

    def factors(self, action: Action) -> tuple[float, float]:
        """What the time of a pass, and the delay of the message that it waits for, are multiplied by."""
        if action not in self._factors:
            generator = random.Random(f"{self.noise.seed} {self.number} {action}")
            longer = max(0.0, 1 + self.noise.spread * generator.gauss(0, 1))
            self._factors[action] = longer, 1 + self.noise.links * generator.expovariate(1)
        return self._factors[action]
