"""The protocol of updates that do not wait: over random histories of norms the result is that of
the barrier."""

import math
import random
import struct
from copy import deepcopy
from dataclasses import dataclass, field

from zbcompile.optimizer.post_validation import Speculation

HISTORIES, STEPS, LIMIT = 1000, 6, 1.0


@dataclass
class Stage:
    """A parameter with its moment, updated by something that cannot be inverted."""

    value: float = 1.0
    moment: float = 0.0

    def update(self, gradient: float) -> None:
        self.moment = 0.9 * self.moment + gradient
        self.value -= 0.1 * self.moment / (abs(self.moment) + 1e-3)


@dataclass
class Step:
    """Of each rank the gradients of its stages."""

    gradients: list[list[float]]

    def factor(self, squares: float) -> float:
        factor = LIMIT / (math.sqrt(squares) + 1e-6) if squares != math.inf else 0.0
        return 1.0 if factor >= 1 else factor

    def clips(self, squares: float) -> bool:
        return self.factor(squares) != 1.0

    @property
    def total(self) -> float:
        return sum(each * each for rank in self.gradients for each in rank)


def drawn(generator: random.Random, ranks: int, stages: int) -> Step:
    """A usual step, one of a norm close to or above the limit, or one with infinities and NaNs on
    some ranks."""
    scale = generator.choice([0.1, 0.1, 0.9, 1.0, 20.0]) / math.sqrt(ranks * stages)
    gradients = [[generator.gauss(0, scale) for _ in range(stages)] for _ in range(ranks)]
    if generator.random() < 0.2:
        odd = generator.choice([math.inf, -math.inf, math.nan])
        gradients[generator.randrange(ranks)][generator.randrange(stages)] = odd
    return Step(gradients)


def with_barrier(model: list[list[Stage]], step: Step) -> None:
    factor = step.factor(step.total)
    for stages, gradients in zip(model, step.gradients, strict=True):
        for stage, gradient in zip(stages, gradients, strict=True):
            stage.update(gradient * factor)


@dataclass
class Rank:
    """What one rank has done without waiting."""

    stages: list[Stage]
    speculation: Speculation = field(default_factory=Speculation)
    kept: dict[int, Stage] = field(default_factory=dict)


def without_barrier(
    model: list[list[Stage]], step: Step, generator: random.Random
) -> tuple[int, int]:
    """Returns how many stages have updated without waiting, and how many of these updates were
    undone."""
    ranks, known = [Rank(stages) for stages in model], 0.0
    for rank, gradients in zip(ranks, step.gradients, strict=True):
        for number, gradient in enumerate(gradients):
            known += gradient * gradient
            # another replica's sum may be rounded differently
            clips = step.clips(known) or generator.random() < 0.02
            if rank.speculation.may_update(clips):
                rank.kept[number] = deepcopy(rank.stages[number])
                rank.stages[number].update(gradient)
    total, held = step.clips(step.total), any(rank.speculation.held for rank in ranks)
    updated = sum(len(rank.kept) for rank in ranks)
    if all(rank.speculation.update_is_valid(total, held) for rank in ranks):
        return updated, 0
    assert not any(rank.speculation.update_is_valid(total, held) for rank in ranks), (
        "ranks disagree"
    )
    for rank in ranks:
        for number, stage in rank.kept.items():
            rank.stages[number] = stage
    model[:] = [rank.stages for rank in ranks]
    with_barrier(model, step)
    return updated, updated


def bits(model: list[list[Stage]]) -> list[bytes]:
    return [struct.pack("dd", stage.value, stage.moment) for stages in model for stage in stages]


def test_the_result_is_that_of_the_barrier() -> None:
    generator = random.Random(0)
    updated = undone = 0
    for _ in range(HISTORIES):
        ranks, stages = generator.randint(1, 4), generator.randint(1, 2)
        early = [[Stage() for _ in range(stages)] for _ in range(ranks)]
        late = deepcopy(early)
        for _ in range(STEPS):
            step = drawn(generator, ranks, stages)
            found = without_barrier(early, step, generator)
            updated, undone = updated + found[0], undone + found[1]
            with_barrier(late, step)
            assert bits(early) == bits(late)
    assert updated > 2 * undone > 1000
