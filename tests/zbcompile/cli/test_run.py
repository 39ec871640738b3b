"""`python -m zbcompile.run`: a program, a data function, and a command that goes on where it
stopped."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import zbcompile
from tests.support.checkpointing import MICROBATCHES, PROBLEM
from tests.support.error_lines import error_lines
from tests.support.oracle import Batch
from tests.support.pool import Pool
from tests.support.run_data import numbered
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
    """What is printed; a run that is over; then from its weights and from its checkpoint another
    one starts."""
    program = small_program("zb-h1", 2)
    more = ("--log-every", "2", "--save-async")
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
    for weights in ("first.safetensors", "first", "first/step-00000004", "mixed"):
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


def run_replicas(program: str, weights: str, folder: str) -> None:
    arguments = [
        program,
        "--data",
        f"{DATA}:numbered",
        "--steps",
        "1",
        "--seed",
        "3",
        "--replicas",
        "2",
    ]
    assert main([*arguments, "--weights", weights, "--checkpoint", f"{folder}/checkpoints"]) == 0


@pytest.mark.slow
def test_two_replicas_of_two_ranks(small_program: Program, pool: Pool, tmp_path: Path) -> None:
    """They train on the batches of both, concatenated."""
    model = PROBLEM.model()
    zbcompile.save_weights(tmp_path / "first.safetensors", model)
    program, weights = str(small_program("zb-h1", 2)), str(tmp_path / "first.safetensors")
    pool.run(run_replicas, program, weights, str(tmp_path), ranks=4)
    sources = [numbered(0, 3, replica, 2) for replica in range(2)]
    parts = [next(source) for source in sources]
    inputs, targets = (
        torch.cat(each) for each in zip(*((p[0][0], p[1]["target"]) for p in parts), strict=True)
    )
    eager_step_seeded(model, Batch((inputs,), {}, targets), 0)
    loaded = PROBLEM.model()
    optimizer = torch.optim.AdamW(loaded.parameters())
    assert zbcompile.load_checkpoint(tmp_path / "checkpoints", loaded, optimizer).step == 1
    for found, (name, parameter) in zip(loaded.parameters(), model.named_parameters(), strict=True):
        assert parameter.grad is not None
        moment = 0.1 * parameter.grad
        assert (
            optimizer.state[found]["exp_avg"] - moment
        ).abs().max() <= 2e-6 * moment.abs().max(), name


def eager_step_seeded(model: torch.nn.Module, batch: Batch, step: int) -> None:
    """The oracle's step for the run's seed."""
    count = 2 * MICROBATCHES
    for i, part in enumerate(batch.parts(count)):
        torch.manual_seed(zbcompile.microbatch_seed(step, i, 3))
        assert PROBLEM.loss is not None
        (PROBLEM.loss(model(*part.args), part.target) / count).backward()


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
    "no group": (
        ["--data", f"{DATA}:numbered", "--replicas", "2"],
        "Start the command with torchrun",
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


def test_checkpoints_are_not_mixed(
    small_program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(small_program("zb-h1", 2), tmp_path, "run", 1, "numbered")
    assert main(arguments) == 0
    assert main([each for each in arguments if each != "--resume"]) == FAILED
    assert "holds checkpoints up to step-00000001. Pass --resume" in capsys.readouterr().err
    assert main([*arguments[:7], "--resume"]) == FAILED
    assert "--resume needs --checkpoint" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pickles_are_never_read(
    small_program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a checkpoint to take weights from, and in one to resume from."""
    model = PROBLEM.model()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, torch.optim.AdamW(model.parameters()), options=options)
    dcp.save(
        {"model": weights, "optimizer": moments},
        checkpoint_id=tmp_path / "old" / "step-00000002",
        no_dist=True,
    )
    shutil.copytree(tmp_path / "old", tmp_path / "weights")
    resumed = command(small_program("zb-h1", 2), tmp_path, "old", 1, "numbered")
    named = [*resumed[:7], "--weights", str(tmp_path / "weights"), "--lr", "0"]
    named = [each for each in named if each != "--init" and each != f"{DATA}:init"] + resumed[-2:]
    for arguments in (resumed, named):
        assert main(arguments) == FAILED
        assert re.fullmatch(
            r"zbcompile.run: .*pickles, which are never read.\n", capsys.readouterr().err
        )
