"""A sharded output layer trains as the unsplit model does: in one process and over gloo."""

import pytest

from tests.runtime.pool import Pool
from tests.runtime.vocabulary_training import VocabularyCase, assert_equal_within, eager, join, sharded

IN_PROCESS = (
    VocabularyCase("gpt", "1f1b", 1, 1),
    VocabularyCase("gpt", "1f1b", 2, 4),
    VocabularyCase("gpt-options", "zb-v", 1, 3, microbatches=6),
    VocabularyCase("gpt-options", "dualpipe-v", 2, 2),
    VocabularyCase("gpt", "interleaved-zb", 1, 2),
    VocabularyCase("gpt-tied", "zb-h1", "auto", 2),
)
PROCESSES = (
    VocabularyCase("gpt", "1f1b", 1, 2),
    VocabularyCase("gpt-tied", "zb-v", 2, 2),
    VocabularyCase("gpt-options", "zb-h1", 1, 4),
    VocabularyCase("gpt-options", "dualpipe-v", 1, 4, microbatches=8),
)


@pytest.mark.parametrize("case", IN_PROCESS, ids=str)
def test_in_one_process(case: VocabularyCase) -> None:
    assert_equal_within(sharded(case), eager(case), 1e-12)


@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_in_processes(case: VocabularyCase, pool: Pool) -> None:
    assert_equal_within(join(pool.run(sharded, case, ranks=case.ranks)), eager(case), 1e-12)
