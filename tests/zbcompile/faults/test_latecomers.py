"""Every wait lasts `timeout=`, whoever made the process group: a rank that comes late is waited
for, or named. Each kind of wait once; `tests/support/latecomers.py` has all combinations."""

from pathlib import Path

import pytest

from tests.support.latecomers import GROUPS, KINDS, Case, run
from tests.support.pool import Pool
from tests.support.ports import free_port

pytestmark = pytest.mark.waits
OURS, SCRIPTS, HASTY = GROUPS
DAILY = (
    Case("start", 1.2, OURS, "torchrun", 0),
    Case("receive", 0.8, OURS, "none", 1),
    Case("collective", 0.8, HASTY, "torchrun", 0),
)
REST = (
    Case("start", 0.8, OURS, "none", 0),
    Case("compile", 0.8, SCRIPTS, "none", 0),
    Case("receive", 1.2, HASTY, "none", 0),
    Case("save", 1.2, SCRIPTS, "torchrun", 1),
    Case("load", 0.8, HASTY, "none", 1),
    Case("eval", 1.2, OURS, "none", 1),
    Case("clip", 1.2, HASTY, "torchrun", 0),
    Case("state_dict", 0.8, SCRIPTS, "torchrun", 1),
)
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in REST]


def name(case: Case) -> str:
    return f"{case.kind} {case.part} {case.group} {case.launcher} {case.late}"


@pytest.mark.mostly_slow(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("case", [*DAILY, *SLOW], ids=name)
def test_a_rank_that_is_late(case: Case, pool: Pool, tmp_path: Path) -> None:
    assert run(case, pool, str(tmp_path), free_port()) == ""


def test_no_kind_of_wait_is_left_out() -> None:
    assert {case.kind for case in (*DAILY, *REST)} == set(KINDS)
