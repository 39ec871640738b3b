"""The main job, small: in one process, in several, and what it prints."""

import contextlib
import io
import re

import pytest
import torch

import train_gpt
from devices import device_of_rank
from step_report import report
from zbcompile.program.step_record import RecordedSpan, StepRecord
from zbcompile.schedules import build

SMALL = "--layers 2 --width 32 --sequence-length 16 --batch 8 --steps 12 --verify"


def trained(*arguments: str) -> str:
    """Returns what the job prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_gpt.run(train_gpt.parse([*SMALL.split(), *arguments]))
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.beyond_sample)], ids=["one process", "two"]
)
def test_a_job(ranks: int, request: pytest.FixtureRequest) -> None:
    options = ("--schedule", "zb-v", "--tied", "--dropout", "0.1")
    if ranks == 1:
        printed = trained(*options)
    else:
        printed = request.getfixturevalue("pool").run(trained, *options, ranks=2)[0]
    said = r"loss bitwise equal; (\d+) of (\d+) gradients bitwise equal\n"
    assert (equal := re.search(said, printed)), printed
    assert equal[1] == equal[2], printed
    said = r"validation loss: ([\d.]+) before, ([\d.]+) after 12 steps"
    assert (losses := re.search(said, printed)), printed
    assert float(losses[2]) < float(losses[1])
    assert "zb-v: ranks 2," in printed
    assert ranks == 1 or "each rank's own clock" in printed


WRONG = [
    ("--width 30", "not divisible by --heads"),
    ("--steps 3", "needs at least 12"),
    ("--dropout 1.5", "expected a probability"),
    ("--batch 0", "expected at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_gpt.parse(arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu() -> None:
    assert device_of_rank(train_gpt.parse([]).device) == torch.device("cpu")
    with pytest.raises(SystemExit, match="torch finds no GPU on this machine; use --device cpu"):
        device_of_rank("cuda")


@pytest.mark.parametrize(("in_process", "step"), [(True, "6 s"), (False, "7 s")])
def test_report_replays_only_in_one_process(in_process: bool, step: str) -> None:
    """1F1B on two ranks with one microbatch: F takes 1 s, BW 2 s; the clock runs until 7 s."""
    first = [("F0.0", 0, 1), ("SEND_F0.0", 1, 1.1), ("BW0.0", 4, 6)]
    second = [("RECV_F1.0", 0, 0.1), ("F1.0", 1, 2), ("BW1.0", 2, 4)]
    spans = {
        rank: [RecordedSpan(*span) for span in row] for rank, row in enumerate((first, second))
    }
    schedule, stored = build("1f1b", ranks=2, microbatches=1), {0: [1_000_000], 1: [2_000_000]}
    record = StepRecord(spans, stored, {}, 7.0, 0.0, in_process, schedule, {})
    row = report(schedule, [record], [record]).splitlines()[4]
    bubble = "50.0%" if in_process else "57.1%"
    assert row.split() == ["1", "6", "s", *step.split(), "50.0%", bubble, "1.9", "MiB"]
