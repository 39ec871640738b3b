"""`python -m zbcompile.run`: a program, a data function, and a command that goes on where it stopped."""

import io
import re
import shutil
import sys
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
from zbcompile.cli.train_job import train
from zbcompile.cli.train_optimizer import rate_factor
from zbcompile.cli.train_pipeline import Job
from zbcompile.run import main

DATA = "tests.support.run_data"
Program = Callable[[str, int], Path]


def command(program: Path, folder: Path, name: str, steps: int, data: str, *more: str) -> list[str]:
    """The command of a run whose checkpoints and weights have a name of their own."""
    return [
        *(str(program), "--data", f"{DATA}:{data}", "--init", f"{DATA}:init", "--steps", str(steps), "--seed", "3"),
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
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "parts.safetensors").read_bytes()


@pytest.mark.slow
def test_options_of_a_run(small_program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An optimizer of the user's, a rate that changes, clipping; what is printed; a run that is over; then from its
    weights and from its checkpoint another one starts."""
    program = small_program("zb-h1", 2)
    more = ("--optimizer", f"{DATA}:sgd", "--warmup", "1", "--decay", "cosine", "--clip", "0.1", "--log-every", "2")
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
    (tmp_path / "mixed" / ".metadata").write_bytes(b"cos\nabort\n(tR.")  # a pickle beside weights is not looked at
    for weights in ("first.safetensors", "first", "first/step-00000004", "mixed"):
        again = [str(program), "--data", f"{DATA}:numbered", "--weights", str(tmp_path / weights), "--steps", "1"]
        assert main([*again, "--export", str(tmp_path / "last.safetensors"), "--optimizer", "sgd", "--lr", "0"]) == 0
        assert_same_tensors(
            load_file(tmp_path / "last.safetensors"), load_file(tmp_path / "first.safetensors"), "weight"
        )


@pytest.mark.slow
def test_updates_inside_of_the_step_change_no_bit(small_program: Program, tmp_path: Path) -> None:
    """Nor does a run that is resumed."""
    program, after = small_program("zb-h1", 2), ("--validate", "after", "--clip", "1e6")
    assert main(command(program, tmp_path, "usual", 3, "numbered")) == 0
    assert main(command(program, tmp_path, "early", 3, "numbered", "--early")) == 0
    assert main(command(program, tmp_path, "after", 2, "numbered", *after)) == 0
    assert main(command(program, tmp_path, "after", 3, "numbered", *after)) == 0
    (weights,) = {(tmp_path / f"{name}.safetensors").read_bytes() for name in ("usual", "early", "after")}
    assert weights


def run_replicas(program: str, weights: str, folder: str, zero: int) -> None:
    job = Job(
        *(Path(program), f"{DATA}:numbered", 2, "sgd", {"lr": 0.1}),
        weights=Path(weights),
        checkpoint=Path(folder, f"checkpoints{zero}"),
        export=Path(folder, f"replicas{zero}.safetensors"),
        seed=3,
        replicas=2,
        zero=zero,
    )
    train(job)


@pytest.mark.slow
def test_two_replicas_of_two_ranks(small_program: Program, pool: Pool, tmp_path: Path) -> None:
    """They train on the batches of both, concatenated; whether they divide the optimizer changes no bit."""
    model = PROBLEM.model()
    zbcompile.save_weights(tmp_path / "first.safetensors", model)
    given = (str(small_program("zb-h1", 2)), str(tmp_path / "first.safetensors"), str(tmp_path))
    for zero in (0, 1):
        pool.run(run_replicas, *given, zero, ranks=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sources = [numbered(0, 3, replica, 2) for replica in range(2)]
    for step in range(2):
        parts = [next(source) for source in sources]
        inputs, targets = (torch.cat(each) for each in zip(*((p[0][0], p[1]["target"]) for p in parts), strict=True))
        eager_step_seeded(model, Batch((inputs,), {}, targets), step)
        optimizer.step()
        optimizer.zero_grad()
    found = load_file(tmp_path / "replicas0.safetensors")
    assert_same_tensors(load_file(tmp_path / "replicas1.safetensors"), found, "weight")
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter).abs().max() <= 2e-6 * parameter.abs().max(), name


def run_target(folder: str, tensor: int, target: str = "layers") -> None:
    targets = "tests.support.mesh_targets"
    job = Job(
        *(Path(f"{targets}:{target}"), f"{targets}:batches", 3, "sgd", {"lr": 0.1}),
        export=Path(folder, f"tensor{tensor}.safetensors"),
        tensor=tensor,
        compiling={"schedule": "1f1b", "microbatches": 2},
    )
    train(job)


@pytest.mark.slow
def test_ranks_share_the_matrices_of_a_target(pool: Pool, tmp_path: Path) -> None:
    """Two ranks as a pipeline, and with parts of every matrix."""
    for tensor in (1, 2):
        pool.run(run_target, str(tmp_path), tensor, ranks=2)
    one, other = (load_file(tmp_path / f"tensor{tensor}.safetensors") for tensor in (1, 2))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value - other[name]).abs().max() <= 2e-6 * value.abs().max(), name


def refused(folder: str) -> str:
    with pytest.raises(zbcompile.PipelineError) as raised:
        run_target(folder, 2, "whole")
    return str(raised.value)


def test_ranks_that_share_nothing_are_refused(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(refused, str(tmp_path), ranks=2):
        assert "--tensor 2: no parameter of tests.support.mesh_targets:whole is divided along tp" in text


def eager_step_seeded(model: torch.nn.Module, batch: Batch, step: int) -> None:
    """The oracle's step for the run's seed."""
    count = 2 * MICROBATCHES
    for i, part in enumerate(batch.parts(count)):
        torch.manual_seed(zbcompile.microbatch_seed(step, i, 3))
        assert PROBLEM.loss is not None
        (PROBLEM.loss(model(*part.args), part.target) / count).backward()


REFUSED = {
    "no weights": (["--data", f"{DATA}:numbered"], "the parameters have no values"),
    "no program": (["--data", f"{DATA}:numbered", "--init", f"{DATA}:init"], "has no manifest.json"),
    "no data function": (["--data", f"{DATA}:nothing"], "has no nothing; it defines"),
    "no iterable": (["--data", f"{DATA}:SIZE", "--init", f"{DATA}:init"], "gives a int; expected an iterable"),
    "too few batches": (["--data", f"{DATA}:two", "--init", f"{DATA}:init"], "ended after 2 batches"),
    "no batches": (["--data", f"{DATA}:bare", "--init", f"{DATA}:init"], "is a Tensor; expected (args, kwargs)"),
    "no optimizer": (["--data", f"{DATA}:numbered", "--optimizer", "adamv"], "expected adamw, adam, sgd, or FILE"),
    "no option": (["--data", f"{DATA}:numbered", "--option", "speed=1"], "unexpected keyword argument 'speed'"),
    "no backend": (["--data", f"{DATA}:numbered", "--backend", "fxx"], "fxx"),
    "no group": (["--data", f"{DATA}:numbered", "--replicas", "2"], "Start the command with torchrun"),
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


def test_checkpoints_are_not_mixed(small_program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(small_program("zb-h1", 2), tmp_path, "run", 1, "numbered")
    assert main(arguments) == 0
    assert main([each for each in arguments if each != "--resume"]) == FAILED
    assert "holds checkpoints up to step-00000001. Pass --resume" in capsys.readouterr().err
    assert main([*arguments[:7], "--resume"]) == FAILED
    assert "--resume needs --checkpoint" in capsys.readouterr().err
    assert main([*arguments, "--zero", "1"]) == FAILED
    assert "--zero 1 divides the optimizer among replicas; pass --replicas" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pickles_are_never_read(small_program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a checkpoint to take weights from, and in one to resume from."""
    model = PROBLEM.model()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.5), options=options)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "old" / "step-00000002", no_dist=True)
    shutil.copytree(tmp_path / "old", tmp_path / "weights")
    resumed = command(small_program("zb-h1", 2), tmp_path, "old", 1, "numbered", "--optimizer", "sgd")
    named = [*resumed[:7], "--weights", str(tmp_path / "weights"), "--lr", "0", "--optimizer", "sgd"]
    named = [each for each in named if each != "--init" and each != f"{DATA}:init"] + resumed[-4:-2]
    for arguments in (resumed, named):
        assert main(arguments) == FAILED
        assert re.fullmatch(r"zbcompile.run: .*pickles, which are never read.\n", capsys.readouterr().err)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(small_program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(command(small_program("zb-h1", 2), tmp_path, "run", 2, "numbered")) == 0
    last = terminal.getvalue().split("\r")[-1]
    assert "2/2" in last
    assert re.search(r"loss \d\.\d+, [\d,]+ tokens/s", last)


def test_rates() -> None:
    assert [rate_factor(step, 4) for step in range(4)] == [1.0] * 4
    cosine = [rate_factor(step, 4, decay="cosine") for step in range(4)]
    assert cosine[0] == 1.0
    assert cosine[2] == pytest.approx(0.5)
    assert cosine == sorted(cosine, reverse=True)


@pytest.mark.slow
def test_a_target_goes_on_at_another_number_of_ranks(
    small_program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is compiled for the ranks that are there; the bits are those of a program that was never stopped."""
    assert main(command(small_program("zb-h1", 2), tmp_path, "whole", 4, "numbered")) == 0
    target = [f"{DATA}:example", "--schedule", "zb-h1", "--microbatches", str(MICROBATCHES), "--exact"]
    for steps, ranks in ((2, 2), (4, 1)):
        more = command(Path(target[0]), tmp_path, "parts", steps, "numbered")[1:]
        assert main([*target, "--ranks", str(ranks), *more]) == 0
    assert "step 2 of 4: resumed from" in capsys.readouterr().out
    whole, parts = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "parts"))
    assert_same_tensors(parts, whole, "weight")


def test_only_a_target_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program, more, says in (
        (str(tmp_path), ["--schedule", "zb-h1"], "--schedule is for a TARGET"),
        (f"{DATA}:example", [], "a TARGET needs --microbatches"),
    ):
        assert main([program, "--data", f"{DATA}:numbered", "--steps", "1", *more]) == FAILED
        assert says in capsys.readouterr().err
