"""`python -m zbcompile.run`: a program, a data function, and a command that goes on where it
stopped."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.error_lines import error_lines
from tests.support.training import assert_same_tensors
from zbcompile.cli.command_line import FAILED
from zbcompile.run import main

DATA = "tests.support.run_data"
Program = Callable[[str, int], Path]


def command(program: Path, folder: Path, name: str, steps: int, data: str, *more: str) -> list[str]:
    """The command of a run whose checkpoints and weights have a name of their own."""
    return [
        *(
            str(program),
            "--data",
            f"{DATA}:{data}",
            "--init",
            f"{DATA}:init",
            "--steps",
            str(steps),
            "--seed",
            "3",
        ),
        *("--lr", "0.01", "--checkpoint", str(folder / name), "--every", "2", "--resume"),
        *("--export", str(folder / f"{name}.safetensors"), *more),
    ]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("data", ["batches", "batches_from", "loader"])
def test_a_resumed_run_has_the_same_bits(data: str, small_program: Program, tmp_path: Path) -> None:
    """Whatever way the data takes back to its place. Not every step has a checkpoint."""
    program = small_program("zb-h1", 2)
    assert main(command(program, tmp_path, "whole", 5, data)) == 0
    assert main(command(program, tmp_path, "parts", 3, data)) == 0
    assert main(command(program, tmp_path, "parts", 5, data)) == 0
    assert (tmp_path / "whole.safetensors").read_bytes() == (
        tmp_path / "parts.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_options_of_a_run(
    small_program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the steps; a run that is over prints no step; another run starts from its weights."""
    program = small_program("zb-h1", 2)
    more = ("--log-every", "2")
    assert main(command(program, tmp_path, "first", 4, "numbered", *more)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"step 0 of 4: the weights of {DATA}:init"
    assert [line.split(",")[0].rpartition(" ")[0] for line in lines if "loss" in line] == [
        "step 2 of 4: loss",
        "step 4 of 4: loss",
    ]
    assert all(line.endswith("tokens/s") for line in lines if "loss" in line)
    assert main(command(program, tmp_path, "first", 4, "numbered", *more)) == 0
    assert "step 4 of 4: resumed from" in capsys.readouterr().out
    (tmp_path / "mixed").mkdir()
    shutil.copy(tmp_path / "first.safetensors", tmp_path / "mixed" / "model.safetensors")
    (tmp_path / "mixed" / ".metadata").write_bytes(
        b"cos\nabort\n(tR."
    )  # a pickle beside weights is not looked at
    for weights in ("first.safetensors", "mixed"):
        again = [
            str(program),
            "--data",
            f"{DATA}:numbered",
            "--weights",
            str(tmp_path / weights),
            "--steps",
            "1",
        ]
        assert main([*again, "--export", str(tmp_path / "last.safetensors"), "--lr", "0"]) == 0
        assert_same_tensors(
            load_file(tmp_path / "last.safetensors"),
            load_file(tmp_path / "first.safetensors"),
            "weight",
        )


REFUSED = {
    "no weights": (["--data", f"{DATA}:numbered"], "the parameters have no values"),
    "no program": (
        ["--data", f"{DATA}:numbered", "--init", f"{DATA}:init"],
        "has no manifest.json",
    ),
    "no data function": (["--data", f"{DATA}:nothing"], "has no nothing; it defines"),
    "no iterable": (
        ["--data", f"{DATA}:SIZE", "--init", f"{DATA}:init"],
        "gives a int; expected an iterable",
    ),
    "too few batches": (
        ["--data", f"{DATA}:two", "--init", f"{DATA}:init"],
        "ended after 2 batches",
    ),
    "no batches": (
        ["--data", f"{DATA}:bare", "--init", f"{DATA}:init"],
        "is a Tensor; expected (args, kwargs)",
    ),
    "no count": (
        ["--data", f"{DATA}:numbered", "--every", "0"],
        "--every is 0; expected at least 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_said_in_one_line(
    case: str, small_program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED[case]
    program = tmp_path if case == "no program" else small_program("zb-h1", 2)
    assert main([str(program), "--steps", "3", *arguments]) == FAILED
    (line,) = error_lines(capsys)
    assert line.startswith("zbcompile.run: ")
    assert message in line


@pytest.mark.slow
def test_checkpoints_are_not_mixed(
    small_program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(small_program("zb-h1", 2), tmp_path, "run", 1, "numbered")
    assert main(arguments) == 0
    assert main([argument for argument in arguments if argument != "--resume"]) == FAILED
    assert "holds checkpoints up to step-00000001. Pass --resume" in capsys.readouterr().err
    assert main([*arguments[:7], "--resume"]) == FAILED
    assert "--resume needs --checkpoint" in capsys.readouterr().err
