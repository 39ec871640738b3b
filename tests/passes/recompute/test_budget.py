"""The choice of what to keep against every choice there is, on small random forwards."""

import random

import pytest
from torch.fx import Graph

from tests.support.plain_versions import every_choice
from zbcompile.passes.recompute.budget import Values, fit, quickest, smallest


def random_values(seed: int) -> Values:
    """Ten values, each made of up to two earlier ones; some cannot be kept, some not be made again."""
    rng, graph = random.Random(seed), Graph()
    nodes = [graph.placeholder(f"v{i}") for i in range(10)]
    inputs = {node: tuple(rng.sample(nodes[:i], min(i, rng.randint(0, 2)))) for i, node in enumerate(nodes)}
    unkept = {node for node in nodes if rng.random() < 0.2}
    return Values(
        wanted=frozenset(rng.sample(nodes, 5)),
        inputs=inputs,
        bytes={node: rng.randint(1, 20) for node in nodes if node not in unkept},
        time={node: rng.randint(0, 20) for node in nodes if node in unkept or rng.random() < 0.8},
    )


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_better(seed: int) -> None:
    values = random_values(seed)
    choices = list(every_choice(values))
    small, quick = smallest(values), quickest(values)
    assert (small.bytes, small.time) == min(choices)
    assert (quick.time, quick.bytes) == min((time, size) for size, time in choices)
    for budget in range(small.bytes, quick.bytes + 1):
        best = min(time for size, time in choices if size <= budget)
        found = fit(values, budget, tries=1000, tolerance=0.0)
        assert found is not None
        assert found.saving.bytes <= budget
        assert found.saving.time == best
        bounded = fit(values, budget, tries=1)
        assert bounded is not None
        assert bounded.least_time <= best <= bounded.saving.time
    assert fit(values, small.bytes - 1) is None
