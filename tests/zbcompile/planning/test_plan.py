"""`python -m zbcompile.plan`: the table of all ways to divide ranks."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zbcompile.plan import main

TARGET = "examples/targets.py:gpt"


def test_table_picture_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    asked = (
        "--ranks",
        "2",
        "--global-batch",
        "16",
        "--search-seconds",
        "1",
        "--balance",
        "flops",
        "--boundary-bytes",
        "1MB",
        "--svg",
        str(picture),
    )
    assert main([TARGET, *asked]) == 0
    shown = capsys.readouterr().out
    table = [line.split() for line in shown.splitlines() if line.startswith("*")]
    rates, peaks = [float(line[-4].replace(",", "")) for line in table], [float(line[-2]) for line in table]
    assert {(line[1], line[2]) for line in table} <= {("1", "2"), ("2", "1")}
    assert rates == sorted(rates, reverse=True)
    assert peaks == sorted(peaks, reverse=True)
    assert re.search(f"zbcompile.compile {TARGET} --schedule auto --ranks.* --balance flops --boundary-bytes", shown)
    assert len(ElementTree.parse(picture).findall(".//{*}circle")) >= len(table)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((), "--ranks is missing"),
        (("--ranks", "2", "--memory", "1kB"), "no plan for 2 ranks: pp=1: .* rank 0 .* more than memory=1000"),
        (("--ranks", "2", "--global-batch", "7"), "a batch of 7 rows is not"),
    ],
)
def test_what_cannot_be_planned(asked: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TARGET, *asked]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says, line)


def test_what_it_chooses_itself_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--schedule=zb-v", "--microbatches=4", "--chunks=2", "--loss-reduction=sum"):
        with pytest.raises(SystemExit):
            main([TARGET, "--ranks", "2", flag])
        assert f"unrecognized arguments: {flag}" in capsys.readouterr().err
