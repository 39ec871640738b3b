"""`python -m zbcompile.compile`, and `python -m zbcompile.inspect` of the directory that it
makes."""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import zbcompile
import zbcompile.compile
import zbcompile.inspect
from tests.support.training import assert_same_tensors, gradients_of
from zbcompile.cli.target import load_example

TARGET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    def forward(self, x, scale=1.0):
        return (self.layers(x) * scale).square().mean()

class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.full((8,), 3.0), persistent=False)
    def forward(self, x):
        return (self.layers(x) * self.factor).square().mean()

class Plain(Net):
    def __init__(self):
        super().__init__()
        self.factor = torch.full((8,), 3.0)
    forward = Scaled.forward

def net():
    print("building")
    return Net(), (torch.ones(2, 8),), {"scale": 2.0}
def scaled(): return Scaled(), (torch.ones(2, 8),)
def plain(): return Plain(), (torch.ones(2, 8),)
"""
PLAN = ("--schedule", "zb-h1", "--microbatches", "4", "--exact", "--loss-reduction", "sum")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("target") / "small.py"
    path.write_text(TARGET)
    return f"{path}:net"


@pytest.fixture(scope="module")
def program(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("programs") / "program"
    weights = directory.parent / "first.safetensors"
    assert (
        zbcompile.compile.main(
            [target, *PLAN, "--output", str(directory), "--weights", str(weights)]
        )
        == 0
    )
    return directory


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; returns its status and what it prints and says."""

    def run(main: Callable[[list[str]], int], *arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


Command = Callable[..., tuple[int, str, str]]


def test_progress_is_said_and_the_place_printed(
    target: str, tmp_path: Path, command: Command
) -> None:
    lines: list[str] = []
    main = partial(zbcompile.compile.main, say=lines.append)
    status, printed, said = command(main, target, "--output", tmp_path / "new" / "program")
    assert (status, printed, said) == (0, f"{tmp_path}/new/program\n", "building\n")
    assert lines[0] == "Net is built; capturing it for zb-v, 2 ranks"
    assert "accumulate: adds gradients into their buffers" in lines
    assert lines[-1] == "saved"


def test_a_compiled_program_trains_with_eagers_bits(target: str, program: Path) -> None:
    model, pipe = load_example(target).model, zbcompile.load(program)
    zbcompile.load_weights(program.parent / "first.safetensors", pipe)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    loss = pipe.step(x, scale=2.0)
    losses = [model(part, scale=2.0) for part in x.chunk(4)]
    for item in losses:
        item.backward()
    assert torch.equal(loss, losses[0] + losses[1] + losses[2] + losses[3])
    assert_same_tensors(gradients_of(pipe), gradients_of(model), "gradient of")


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_without_memory_the_program_is_the_same(target: str, tmp_path: Path) -> None:
    """For the same hardware: with fake tensors that is not taken to be the machine at hand."""
    complete, fake = tmp_path / "whole", tmp_path / "fake"
    for directory, flags in ((complete, ()), (fake, ("--fake",))):
        here = ("--hardware", "cpu-core", "--output", str(directory))
        assert zbcompile.compile.main([target, *PLAN, *flags, *here]) == 0
    assert files(fake) == files(complete)


@pytest.mark.slow
def test_what_has_no_values_is_filled_by_init(target: str, tmp_path: Path) -> None:
    of = target.replace(":net", ":scaled")
    assert zbcompile.compile.main([of, *PLAN, "--fake", "--output", str(tmp_path)]) == 0
    with pytest.raises(
        zbcompile.PipelineError, match=r"factor is a buffer .* Pass init=fn\(name, tensor\)"
    ):
        zbcompile.load(tmp_path)

    def init(name: str, tensor: torch.Tensor) -> None:
        if name == "factor":
            tensor.fill_(3.0)

    model, x = load_example(of).model, torch.ones(8, 8)
    loss = zbcompile.load(tmp_path, model.state_dict(), init=init).step(x)
    assert torch.equal(loss, sum((model(part) for part in x.chunk(4)), torch.zeros(())))


def test_a_plain_tensor_without_values_is_refused(
    target: str, tmp_path: Path, command: Command
) -> None:
    of = target.replace(":net", ":plain")
    status, _, said = command(zbcompile.compile.main, of, *PLAN, "--fake", "--output", tmp_path)
    assert status == 2
    assert (
        "is a tensor in a plain attribute of a model that was built without memory"
        in said.splitlines()[-1]
    )


def test_every_option_arrives(target: str, tmp_path: Path) -> None:
    plan = ("--recompute", "full", "--balance", "flops", "--seed", "7", "--ranks", "1")
    more = ("--memory", "1 MB", "--optimizer-state", "1", "--chunks", "2")
    more = (*more, "--accumulate-dtype", "float64", "--split", "args[0]=yes")
    command = [target, "--schedule", "interleaved-1f1b", *plan, *more, "--output", str(tmp_path)]
    assert zbcompile.compile.main(command) == 0
    written = json.loads((tmp_path / "manifest.json").read_text())
    expected = {
        "recompute": "full",
        "balance": "flops",
        "memory": 1000000,
        "optimizer_state": 1.0,
        "accumulate_dtype": "float64",
    }
    program = written["program"]
    assert {key: program["choices"][key] for key in expected} == expected
    assert (program["step"]["seed"], program["step"]["split"], len(program["stages"])) == (
        7,
        {"args[0]": True},
        2,
    )


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("notes.txt", "notes.txt is a file; expected a directory"),
        (".", "holds other files (notes.txt)"),
    ],
)
def test_a_wrong_place_is_known_at_once(
    place: str, message: str, target: str, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    status, printed, said = command(zbcompile.compile.main, target, "--output", tmp_path / place)
    assert (status, printed, said.count("\n")) == (2, "", 1)  # the model was not built
    assert message in said


def operations(text: str) -> list[str]:
    """The operators and shapes of a graph, or all of a report in JSON."""
    return re.findall(r"torch\.ops[\w.]+|\w\d+\[[^\"]*", text) or text.splitlines()


@pytest.mark.slow
def test_a_directory_is_inspected_as_its_model_is(
    target: str, program: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(target).parent)  # a program knows a source file's name, not its folder
    for request in (("--json",), ("--graph", "1.B")):
        of_model = command(zbcompile.inspect.main, target, *PLAN, *request)
        of_program = command(zbcompile.inspect.main, program, *request)
        assert (of_program[0], of_program[2]) == (0, "")
        assert operations(of_program[1]) == operations(
            of_model[1]
        )  # a program keeps no names of nodes


def test_pictures_of_a_directory(program: Path, tmp_path: Path, command: Command) -> None:
    picture = tmp_path / "step.svg"
    assert command(zbcompile.inspect.main, program, "--timeline", picture)[:2] == (
        0,
        f"{picture}\n",
    )
    assert re.search(r"^model +Net$", command(zbcompile.inspect.main, program)[1], re.MULTILINE)
    assert command(zbcompile.inspect.main, program, "--graphs", tmp_path)[0] == 0


@pytest.mark.parametrize("option", [("--ranks", "4"), ("--compare", "1f1b"), ("--exact",)])
def test_what_needs_the_model_is_refused(
    option: tuple[str, ...], program: Path, command: Command
) -> None:
    status, printed, said = command(zbcompile.inspect.main, program, *option)
    assert (status, printed, said.count("\n")) == (2, "", 1)
    assert f"is a compiled program: {option[0]} needs its model" in said


def test_a_damaged_directory_is_one_line(program: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "manifest.json").write_text((program / "manifest.json").read_text()[:-9])
    status, _, said = command(zbcompile.inspect.main, tmp_path)
    assert (status, said.count("\n")) == (2, 1)
    assert "is damaged or incomplete" in said


def test_torchrun_is_refused(
    target: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, said = command(zbcompile.compile.main, target, "--output", tmp_path)
    assert (status, said) == (
        2,
        (
            "zbcompile.compile: one process compiles for all ranks. Start zbcompile.compile without"
            " torchrun.\n"
        ),
    )


def test_the_command_needs_a_place(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zbcompile.compile.main([target])
    assert "--output" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
