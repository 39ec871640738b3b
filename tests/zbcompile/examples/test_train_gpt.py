"""The main job, small: in one process, in several, and what it prints."""

import contextlib
import io
import re

import pytest
import torch

import stdlib_text
import train_gpt
from devices import device_of_rank
from step_report import report
from tests.support.pool import Pool
from zbcompile.program.step_record import RecordedSpan, StepRecord
from zbcompile.schedules import build

SMALL = "--layers 3 --width 32 --sequence-length 16 --batch 8 --steps 12 --verify"


def trained(*arguments: str) -> str:
    """Returns what the job prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_gpt.run(train_gpt.parse([*SMALL.split(), *arguments]))
    return printed.getvalue()


def check_output(printed: str, schedule: str, ranks: int, source: str) -> None:
    equal = re.search(r"loss bitwise equal; (\d+) of (\d+) gradients bitwise equal\n", printed)
    assert equal, printed
    assert equal[1] == equal[2], printed
    losses = re.search(r"validation loss: ([\d.]+) before, ([\d.]+) after 12 steps", printed)
    assert losses, printed
    assert float(losses[2]) < float(losses[1])
    assert f"{schedule}: ranks {ranks}," in printed
    assert source in printed


@pytest.mark.slow
def test_in_processes(pool: Pool) -> None:
    printed = pool.run(trained, "--schedule", "zb-v", "--tied", "--dropout", "0.1", ranks=2)[0]
    check_output(printed, "zb-v", 2, "each rank's own clock")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30"], "not divisible by --heads"),
        (["--steps", "3"], "needs at least 12"),
        (["--dropout", "1.5"], "expected a probability"),
        (["--batch", "0"], "expected at least 1"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_gpt.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu() -> None:
    assert device_of_rank(train_gpt.parse([]).device) == torch.device("cpu")
    with pytest.raises(SystemExit, match="torch finds no GPU on this machine; use --device cpu"):
        device_of_rank("cuda")


@pytest.mark.slow
def test_text_is_the_same_at_every_call_and_held_out() -> None:
    text, again = stdlib_text.load(), stdlib_text.load()
    assert torch.equal(text.train, again.train)
    assert torch.equal(text.validation, again.validation)
    assert 10 < len(text.train) / len(text.validation) < 30
    inputs, targets = stdlib_text.random_batch(text.train, 3, 5, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (3, 5)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def record(in_process: bool) -> StepRecord:
    """1F1B on two ranks with one microbatch: F takes 1 s, BW 2 s; the clock runs until 7 s."""
    spans = {
        0: [
            RecordedSpan("F0.0", 0, 1),
            RecordedSpan("SEND_F0.0", 1, 1.1),
            RecordedSpan("BW0.0", 4, 6),
        ],
        1: [
            RecordedSpan("RECV_F1.0", 0, 0.1),
            RecordedSpan("F1.0", 1, 2),
            RecordedSpan("BW1.0", 2, 4),
        ],
    }
    stored = {0: [1_000_000], 1: [2_000_000]}
    return StepRecord(
        spans, stored, {}, 7.0, 0.0, in_process, build("1f1b", ranks=2, microbatches=1), {}
    )


@pytest.mark.parametrize(("in_process", "step"), [(True, "6 s"), (False, "7 s")])
def test_report_replays_only_in_one_process(in_process: bool, step: str) -> None:
    text = report(
        build("1f1b", ranks=2, microbatches=1), [record(in_process)], [record(in_process)]
    )
    row = text.splitlines()[4]
    assert row.split() == [
        *f"1 6 s {step} 50.0%".split(),
        "50.0%" if in_process else "57.1%",
        "1.9",
        "MiB",
    ]
