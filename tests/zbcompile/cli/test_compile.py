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


Command = Callable[..., tuple[int, str, str]]
compile_, inspect = zbcompile.compile.main, zbcompile.inspect.main


@pytest.fixture(scope="module")
def program(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("programs") / "program"
    output = ("--output", str(directory), "--weights", f"{directory}.safetensors")
    assert compile_([target, *PLAN, *output]) == 0
    return directory


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; returns its status and what it prints and says."""

    def run(main: Callable[[list[str]], int], *arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_progress_is_said_and_the_place_printed(
    target: str, tmp_path: Path, command: Command
) -> None:
    lines: list[str] = []
    place = tmp_path / "new" / "program"
    said = command(partial(compile_, say=lines.append), target, "--output", place)
    assert said == (0, f"{place}\n", "building\n")
    assert lines[0] == "Net is built; capturing it for zb-v, 2 ranks"
    assert "accumulate: adds gradients into their buffers" in lines
    assert lines[-1] == "saved"


def test_a_compiled_program_trains_with_eagers_bits(target: str, program: Path) -> None:
    model, pipe = load_example(target).model, zbcompile.load(program)
    zbcompile.load_weights(f"{program}.safetensors", pipe)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    loss = pipe.step(x, scale=2.0)
    losses = [model(part, scale=2.0) for part in x.chunk(4)]
    for item in losses:
        item.backward()
    assert torch.equal(loss, losses[0] + losses[1] + losses[2] + losses[3])
    assert_same_tensors(gradients_of(pipe), gradients_of(model), "gradient of")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.slow
def test_without_memory_the_program_is_the_same(
    target: str, tmp_path: Path, command: Command
) -> None:
    """For the same hardware: with fake tensors that is not taken to be the machine at hand. What has
    no values is filled by init=; a plain tensor cannot be."""
    for name, flags in (("whole", ()), ("fake", ("--fake",))):
        here = ("--hardware", "cpu-core", "--output", str(tmp_path / name))
        assert compile_([target, *PLAN, *flags, *here]) == 0
    assert files(tmp_path / "fake") == files(tmp_path / "whole")
    of, place = target.replace(":net", ":scaled"), tmp_path / "scaled"
    assert compile_([of, *PLAN, "--fake", "--output", str(place)]) == 0
    said = r"factor is a buffer .* Pass init=fn\(name, tensor\)"
    with pytest.raises(zbcompile.PipelineError, match=said):
        zbcompile.load(place)

    def init(name: str, tensor: torch.Tensor) -> None:
        if name == "factor":
            tensor.fill_(3.0)

    model, x = load_example(of).model, torch.ones(8, 8)
    loss = zbcompile.load(place, model.state_dict(), init=init).step(x)
    assert torch.equal(loss, sum((model(part) for part in x.chunk(4)), torch.zeros(())))
    of = target.replace(":net", ":plain")
    status, _, text = command(compile_, of, *PLAN, "--fake", "--output", tmp_path / "plain")
    assert status == 2
    assert "a plain attribute of a model that was built without memory" in text.splitlines()[-1]


def test_every_option_arrives(target: str, tmp_path: Path) -> None:
    plan = "--schedule interleaved-1f1b --recompute full --balance flops --seed 7 --ranks 1"
    more = "--optimizer-state 1 --chunks 2 --accumulate-dtype float64 --split args[0]=yes --memory"
    command = [target, *plan.split(), *more.split(), "1 MB", "--output", str(tmp_path)]
    assert compile_(command) == 0
    program = json.loads((tmp_path / "manifest.json").read_text())["program"]
    expected = {"recompute": "full", "balance": "flops", "memory": 1000000}
    expected |= {"optimizer_state": 1.0, "accumulate_dtype": "float64"}
    assert {key: program["choices"][key] for key in expected} == expected
    assert (program["step"]["seed"], program["step"]["split"]) == (7, {"args[0]": True})
    assert len(program["stages"]) == 2


def operations(text: str) -> list[str]:
    """The operators and shapes of a graph, or all of a report in JSON."""
    return re.findall(r"torch\.ops[\w.]+|\w\d+\[[^\"]*", text) or text.splitlines()


@pytest.mark.slow
def test_a_directory_is_inspected_as_its_model_is(
    target: str, program: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(target).parent)  # a program knows a source file's name, not its folder
    for request in (("--json",), ("--graph", "1.B")):
        of_model = command(inspect, target, *PLAN, *request)
        status, printed, said = command(inspect, program, *request)
        assert (status, said) == (0, "")
        assert operations(printed) == operations(of_model[1])  # it keeps no names of nodes
    picture = tmp_path / "step.svg"
    assert command(inspect, program, "--timeline", picture)[:2] == (0, f"{picture}\n")
    assert re.search(r"^model +Net$", command(inspect, program)[1], re.MULTILINE)
    assert command(inspect, program, "--graphs", tmp_path)[0] == 0


REFUSED: list[tuple[list[str], str]] = [
    *(
        (["inspect", "PROGRAM", *option], f"is a compiled program: {option[0]} needs its model")
        for option in (["--ranks", "4"], ["--compare", "1f1b"], ["--exact"])
    ),
    (["inspect", "TMP"], "is damaged or incomplete"),
    (["compile", "TARGET", "--output", "TMP/notes.txt"], "is a file; expected a directory"),
    (["compile", "TARGET", "--output", "TMP"], "holds other files (notes.txt)"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_done_is_known_at_once(
    arguments: list[str], message: str, target: str, program: Path, tmp_path: Path, command: Command
) -> None:
    """In one line; the model is not built."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "manifest.json").write_text((program / "manifest.json").read_text()[:-9])
    places = {"PROGRAM": str(program), "TARGET": target}
    name, *rest = (places.get(word, word.replace("TMP", str(tmp_path))) for word in arguments)
    status, printed, said = command({"inspect": inspect, "compile": compile_}[name], *rest)
    assert (status, printed, said.count("\n")) == (2, "", 1)
    assert message in said


def test_one_process_compiles_and_needs_a_place(
    target: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        compile_([target])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, said = command(compile_, target, "--output", tmp_path)
    remedy = "one process compiles for all ranks. Start zbcompile.compile without torchrun.\n"
    assert (status, said) == (2, f"zbcompile.compile: {remedy}")
