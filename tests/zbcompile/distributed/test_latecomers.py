"""Every wait lasts `timeout=`, whoever made the process group: a rank that comes late is waited for, or named."""

from pathlib import Path

import pytest

from tests.support.latecomers import GROUPS, KINDS, Case, run
from tests.support.pool import Pool
from tests.support.ports import free_port

OURS, SCRIPTS, HASTY = GROUPS


def name(case: Case) -> str:
    return f"{case.kind} {case.part} {case.group} {case.launcher} {case.late}"


FIRST = (
    Case("start", 1.2, OURS, "torchrun", 0),
    Case("receive", 0.8, OURS, "none", 1),
    Case("collective", 0.8, HASTY, "torchrun", 0),
)
REST = tuple(
    Case(kind, part, GROUPS[(number + (part > 1)) % 3], ("torchrun", "none")[number % 2], (number // 2) % 2)
    for number, kind in enumerate(KINDS)
    for part in (0.8, 1.2)
)


@pytest.mark.parametrize(
    "case", [*FIRST, *(pytest.param(each, marks=pytest.mark.slow) for each in REST if each not in FIRST)], ids=name
)
def test_a_rank_that_is_late(case: Case, pool: Pool, tmp_path: Path) -> None:
    assert run(case, pool, str(tmp_path), free_port()) == ""
