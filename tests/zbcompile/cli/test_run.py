"""`python -m zbcompile.run`: a program, a data function, and a command that goes on where it
stopped."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

import zbcompile
from tests.support.checkpointing import PROBLEM
from tests.support.error_lines import error_lines
from tests.support.training import assert_same_tensors
from zbcompile.cli.command_line import FAILED
from zbcompile.run import main

DATA = "tests.zbcompile.cli.run_data"
Program = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "first.safetensors"
    zbcompile.save_weights(path, PROBLEM.model())
    return str(path)


def command(program: Path, weights: str, folder: Path, steps: int, data: str) -> list[str]:
    """The command of a run with a folder of checkpoints."""
    return [
        *(str(program), "--data", f"{DATA}:{data}", "--weights", weights, "--steps", str(steps)),
        *("--seed", "3", "--lr", "0.01", "--checkpoint", str(folder), "--every", "2", "--resume"),
    ]


def content(folder: Path) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint: of the model, the optimizer, the generators."""
    newest = zbcompile.latest_checkpoint(folder)
    assert newest is not None
    return load_file(newest / "part-00000.safetensors")


@pytest.mark.mostly_slow(every=3)
@pytest.mark.slow
@pytest.mark.parametrize("data", ["batches", "batches_from", "loader"])
def test_a_resumed_run_has_the_same_bits(
    data: str, small_program: Program, weights: str, tmp_path: Path
) -> None:
    """Whatever way the data takes back to its place. Not every step has a checkpoint."""
    program, whole, parts = small_program("zb-h1", 2), tmp_path / "whole", tmp_path / "parts"
    assert main(command(program, weights, whole, 5, data)) == 0
    assert main(command(program, weights, parts, 3, data)) == 0
    assert main(command(program, weights, parts, 5, data)) == 0
    assert_same_tensors(content(whole), content(parts), "")


@pytest.mark.slow
def test_options_of_a_run(
    small_program: Program, weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the steps; a run that is over prints no step. Weights may be a folder, in which a
    pickle is not looked at. Checkpoints of two runs are not mixed."""
    program = small_program("zb-h1", 2)
    arguments = command(program, weights, tmp_path / "first", 12, "numbered")
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"step 0 of 12: the weights of {weights}"
    losses = [line for line in lines if "loss" in line]
    assert [line.split(":")[0] for line in losses] == ["step 10 of 12", "step 12 of 12"]
    assert all(line.endswith("tokens/s") for line in losses)
    assert main(arguments) == 0
    assert "step 12 of 12: resumed from" in capsys.readouterr().out
    assert main(arguments[:-1]) == FAILED
    assert "holds checkpoints up to step-00000012. Pass --resume" in capsys.readouterr().err
    assert main([*arguments[:7], "--resume"]) == FAILED
    assert "--resume needs --checkpoint" in capsys.readouterr().err
    (mixed := tmp_path / "mixed").mkdir()
    shutil.copy(weights, mixed / "model.safetensors")
    (mixed / ".metadata").write_bytes(b"cos\nabort\n(tR.")
    last = command(program, str(mixed), tmp_path / "last", 1, "numbered")
    assert main([*last, "--lr", "0"]) == 0
    zbcompile.load_checkpoint(tmp_path / "last", model := PROBLEM.make())
    assert_same_tensors(dict(model.state_dict()), dict(PROBLEM.model().state_dict()), "weight")


REFUSED = {
    "no weights": ("numbered", "", "the parameters have no values"),
    "no program": ("numbered", "--weights FILE", "has no manifest.json"),
    "no data function": ("nothing", "", "has no nothing; it defines"),
    "too few batches": ("two", "--weights FILE", "ended after 2 batches"),
    "no batches": ("bare", "--weights FILE", "is a Tensor; expected (args, kwargs)"),
    "no count": ("numbered", "--every 0", "--every is 0; expected at least 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_said_in_one_line(
    case: str,
    small_program: Program,
    weights: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, options, message = REFUSED[case]
    more = options.replace("FILE", weights).split()
    program = tmp_path if case == "no program" else small_program("zb-h1", 2)
    assert main([str(program), "--steps", "3", "--data", f"{DATA}:{data}", *more]) == FAILED
    (line,) = error_lines(capsys)
    assert line.startswith("zbcompile.run: ")
    assert message in line
