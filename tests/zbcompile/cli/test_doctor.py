"""What `zbcompile.doctor` makes of the reports of machines."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.pool import Pool
from zbcompile.cli.doctor_command import MachineReport, _examine, lines_of, main, problems_of, report_here
from zbcompile.distributed.link_speed import MeasuredLink
from zbcompile.distributed.process_group import find_ranks

GOOD = MachineReport("one", "zbcompile 1", 8, 2, 4, "eth0", {"eth0": "10.0.0.1"}, free=2**30, written=2.0**20)
LINKS = [MeasuredLink(0, other, 1e-4, 1e9, 0.0) for other in (1, 2, 3)]
WRONG = {
    "Install the same": (replace(GOOD, versions="zbcompile 2"), LINKS),
    "Set OMP_NUM_THREADS alike": (replace(GOOD, threads=1), LINKS),
    "Set OMP_NUM_THREADS=1": (replace(GOOD, cores=7), LINKS),
    "Start 3 ranks there": (replace(GOOD, cores=3), LINKS),
    "does not see what rank 0 wrote to shared": (replace(GOOD, sees=False), LINKS),
    "clocks differ by 3.0 s": (GOOD, [replace(LINKS[0], ahead=-3.0), *LINKS[1:]]),
    "ranks 0 and 1: 95 MiB/s, where 954 is usual": (GOOD, [replace(LINKS[0], bandwidth=1e8), *LINKS[1:]]),
}


@pytest.mark.parametrize("says", WRONG)
def test_what_is_wrong_is_named(says: str) -> None:
    assert not list(problems_of([GOOD, GOOD], LINKS, Path("shared")))
    other, links = WRONG[says]
    assert any(says in each for each in problems_of([GOOD, other], links, Path("shared")))


def test_one_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--env", "--checkpoint", str(tmp_path)])
    said = capsys.readouterr().out
    assert all(each in said for each in ("ZBCOMPILE_CACHE=DIR", "rank 0: ", "folder: "))
    assert not list(tmp_path.iterdir())
    assert report_here(None, "").free is None


def examined(folder: str) -> list[str]:
    ranks = find_ranks(lambda: torch.device("cpu"), None, None, 60)
    try:
        return _examine(ranks, Path(folder))
    finally:
        ranks.watch.close()


def test_ranks_measure_their_connection(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(examined, str(tmp_path))
    assert first == second
    assert not any("does not see" in each or "clocks" in each for each in first)
    assert len(list(lines_of([GOOD, GOOD], LINKS))) == 9
