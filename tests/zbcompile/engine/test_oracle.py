"""Pipelined training against eager gradient accumulation, bit by bit: the promise of `exact=True`.

Every pair of (schedule, where it runs, microbatches, tied or not) occurs;
`examples/benchmarks/oracle_sweep.py` runs every combination.
"""

import pytest

from tests.support.pool import Pool
from tests.support.training import (
    Case,
    assert_bitwise,
    assert_close,
    join,
    on_ranks,
    pipelined,
    quickly,
    reference,
)

IN_PROCESS = (
    Case("gpt-tied", "1f1b", 1, 1),
    Case("gpt", "zb-h1", 1, 2),
    Case("gpt", "zb-v", 1, 5),
    Case("gpt-tied", "zb-v", 1, 8),
    Case("gpt", "1f1b", 2, 2),
    Case("gpt-tied", "zb-h1", 2, 5),
    Case("gpt-tied", "zb-v", 2, 1),
    Case("gpt", "zb-h1", 2, 8),
    Case("gpt-tied", "1f1b", 4, 5),
    Case("gpt", "zb-h1", 4, 1),
    Case("gpt", "1f1b", 4, 8),
    Case("gpt-tied", "zb-v", 4, 2),
)
PROCESSES = (
    Case("gpt", "1f1b", 2, 1),
    Case("gpt-tied", "zb-h1", 2, 2),
    Case("gpt", "zb-v", 2, 5),
    Case("gpt-tied", "1f1b", 2, 8),
    Case("gpt-tied", "1f1b", 4, 2),
    Case("gpt", "zb-h1", 4, 5),
    Case("gpt-tied", "zb-v", 4, 8),
    Case("gpt", "zb-v", 4, 1),
)
OTHER_MODELS = (
    Case("skips", "zb-v", 2, 4),
    Case("skips", "1f1b", 4, 2),
    Case("loss-scalar", "zb-h1", 2, 4),
    Case("loss-mapping", "zb-v", 2, 4),
    Case("loss-object", "1f1b", 2, 4),
    Case("frozen", "zb-v", 2, 4),
    Case("frozen", "zb-h1", 4, 4),
)


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("case", IN_PROCESS, ids=str)
def test_in_one_process(case: Case) -> None:
    assert_bitwise(quickly(case), reference(case))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_in_processes(case: Case, pool: Pool) -> None:
    assert_bitwise(on_ranks(pool, quickly, case), reference(case))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=7)
@pytest.mark.parametrize("case", OTHER_MODELS, ids=str)
def test_other_models(case: Case, pool: Pool) -> None:
    """Skip connections, loss inside the model, frozen and unused parameters."""
    alone = pool.alone(quickly, case)
    assert_bitwise(alone, reference(case))
    assert_bitwise(join(pool.run(quickly, case, ranks=case.ranks)), alone)


DEFAULT = [
    Case(
        "gpt-tied", "zb-v", 2, 5, exact=False, steps=1
    ),  # an optimizer makes much of small differences
    pytest.param(Case("gpt", "1f1b", 4, 3, exact=False, steps=1), marks=pytest.mark.beyond_sample),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_default_is_close_and_the_same_in_processes(case: Case, pool: Pool) -> None:
    """Fused accumulation: within 1e-6 of the largest entry of eager; the same bits in one process
    and in several."""
    alone = pool.alone(pipelined, case)
    assert_close(alone, reference(case))
    assert_bitwise(join(pool.run(pipelined, case, ranks=case.ranks)), alone)
