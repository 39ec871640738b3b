"""`python -m zbcompile.plan`: the table of all ways to divide ranks."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.oracle import PROBLEMS
from zbcompile import Example, Hardware
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import draw_step
from zbcompile.passes.compile_options import Choices
from zbcompile.plan import main
from zbcompile.planning.factorisations import factorisations

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
        "--rows",
        "1",
    )
    assert main([TARGET, *asked]) == 0
    shown = capsys.readouterr().out
    table = [line.split() for line in shown.splitlines() if line.startswith("*")]
    rates, peaks = [float(line[-4].replace(",", "")) for line in table], [float(line[-2]) for line in table]
    assert {(line[1], line[2]) for line in table} <= {("1", "2"), ("2", "1")}
    assert rates == sorted(rates, reverse=True)
    assert peaks == sorted(peaks, reverse=True)
    assert {("1", "2"), ("2", "1")} <= {tuple(re.findall(r"\d+", line)[:2]) for line in shown.splitlines()}
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


def test_dimensions_of_the_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--ranks", "2", "--global-batch", "16", "--search-seconds", "1"
    assert main([TARGET, *asked, "--mesh", "dp,tp"]) == 0
    shown = capsys.readouterr().out
    assert {tuple(line.split()[1:3]) for line in shown.splitlines() if line.startswith("*")} == {("2", "1")}
    assert "tp>1: GPT brings no tensor-parallel plan" in shown
    with pytest.raises(SystemExit):
        main([TARGET, *asked, "--mesh", "dp,cp"])
    assert "'dp,cp'; expected some of dp,tp,pp, with dp or pp" in capsys.readouterr().err


def test_replicas_sum_their_gradients() -> None:
    problem, hardware = PROBLEMS["gpt"], Hardware.find("h100-sxm")
    (batch,), model, choices = problem.batches(1, 2), problem.model(), Choices(hardware=hardware)
    example = Example(model, batch.args, loss=problem.loss, target=batch.target)
    drawn = draw_step(model, one_microbatch(example), problem.loss, choices)
    rows, _ = factorisations(drawn, choices, 2, 2, 1, 16, 0.1, {}, lambda text: None, ("dp",))
    assert hardware.within is not None
    size = sum(parameter.nbytes for parameter in model.parameters())
    expected = 2 * (hardware.within.latency + size / 2 / hardware.within.bandwidth)
    assert [row.exchange for row in rows] == pytest.approx([expected] * len(rows))
    assert all(row.seconds == row.layout.seconds + row.exchange for row in rows)
