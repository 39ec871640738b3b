"""`python -m zbcompile.inspect`: what it prints for three models, and one clear line for whatever
it cannot do."""

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zbcompile
import zbcompile.compile
from tests.support.error_lines import without_progress
from zbcompile.cli.target import load_example
from zbcompile.inspect import main
from zbcompile.passes.compile_step import PASSES
from zbcompile.tables import WIDTH

ROOT = Path(__file__).parents[3]
TARGETS = "examples/targets.py"
GOLDEN = ROOT / "tests/golden"
RECORD = "tests/golden/recorded_gpt.json"
OTHER_TORCH = "\n- recorded from another program: torch 2.13.0+cpu there, "
OTHER_TORCH += f"{torch.__version__} here\n"
Inspect, Golden = Callable[..., str], Callable[[str, str], None]
TINY = """
import torch
from torch import nn
import zbcompile

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    def forward(self, x, scale=1.0):
        return (self.layers(x) * scale).square().mean()

class Branching(Net):
    def forward(self, x):
        out = super().forward(x)
        return out if out.sum() > 0 else -out

@torch.library.custom_op("numbers::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2)

class Twice(Net):
    def forward(self, x):
        return super().forward(twice(x))

def custom(): return Twice(), (torch.ones(2, 8),)
def half(): return Net().to(torch.bfloat16), (torch.ones(2, 8, dtype=torch.bfloat16),)
def two(): return Net(), (torch.ones(2, 8),)
def three(): return Net(), (torch.ones(2, 8),), {"scale": 2.0}
def example():
    print("building")
    return zbcompile.Example(nn.Linear(8, 8), (torch.ones(2, 8),), loss=nn.MSELoss(), target=torch.ones(2, 8))
def branching(): return Branching(), (torch.ones(2, 8),)
def nothing(): return None
def wide(): return Net(), (), {}, 1
def listed(): return Net(), [torch.ones(2, 8)]
def broken(): raise ValueError("no such checkpoint")
def stray(): return zbcompile.Example(Net(), (torch.ones(2, 8),), target=torch.ones(2))
"""


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are printed relative to the working directory."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return path


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    """Run the command in this process; returns what it prints."""

    def run(*arguments: object) -> str:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert (status, captured.err) == (0, ""), captured.err
        return captured.out

    return run


@pytest.mark.slow
def test_comparison_and_causes(tiny: Path, inspect: Inspect, golden: Golden) -> None:
    """With equal times, so for any torch. What cannot be compared stands below the table."""
    costs = tiny.with_name("costs.json")
    costs.write_text(json.dumps(dict.fromkeys(("forward", "backward", "weight"), [1] * 4)))
    plan = (f"{tiny}:two", "--ranks", 4, "--microbatches", 4, "--schedule", "1f1b")
    text = inspect(*plan, "--costs", costs, "--critical-path")
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    golden("inspect_causes.txt", text)  # the (4 + 4 - 1) * 3 s of the textbook
    plan = (f"{tiny}:two", "--microbatches", 3, "--hardware", "cpu-core")
    text = inspect(*plan, "--compare", "1f1b,ZBH1,zb-v,dualpipe")
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.rsplit("\n\n", 1)[1].startswith("dualpipe: ")
    golden("inspect_compare.txt", text)


@pytest.mark.slow
def test_a_program_directory(tmp_path: Path, inspect: Inspect, golden: Golden, capsys: Any) -> None:
    """With a step of four processes (examples/record_step.py under torchrun), next to its prediction,
    whose waits are explained too."""
    plan = ("--schedule", "zb-h1", "--ranks", "4", "--microbatches", "8")
    program = str(tmp_path / "program")
    assert zbcompile.compile.main([f"{TARGETS}:gpt", *plan, "--output", program]) == 0
    capsys.readouterr()  # compile's own words
    shown = inspect(program)
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert len(shown.splitlines()) <= 60
    golden("inspect_program.txt", shown)
    picture = tmp_path / "both.svg"
    text = inspect(program, "--measured", RECORD, "--critical-path", "--timeline", picture)
    text = text.removesuffix(OTHER_TORCH).replace(f"{picture}\n\n", "")
    assert max(map(len, text.splitlines())) <= WIDTH
    golden("inspect_measured_causes.txt", text)
    assert picture.read_text().count("<svg") == 3
    assert "overhead" in picture.read_text()


@pytest.mark.slow
def test_all_graphs_and_a_file_after_each_pass_are_written(
    tmp_path: Path, tiny: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python. Accumulation turns the products of W into additions in place. The JSON of a graph
    holds every operation, and the line or the pass that each is from."""
    monkeypatch.setenv("ZBCOMPILE_DUMP", str(tmp_path / "dump"))
    directory = tmp_path / "graphs" / "deep"
    text = inspect(f"{tiny}:two", "--graphs", directory, "--graph", "2.B", "--json")
    assert all(op["line"] or op["made_by"] for op in json.loads(text)["graph 2.B"])
    names = {f"stage{stage}_{name}.py" for stage in range(4) for name in ("F", "B", "W", "BW")}
    assert {path.name for path in directory.iterdir()} == names
    for name in names:
        ast.parse((directory / name).read_text())
    files = sorted((tmp_path / "dump" / "rank0").iterdir())
    assert files[0].name == "0000-export.txt"
    assert [path.name[5:-4] for path in files] == [*PASSES]
    before, after = (files[[*PASSES].index(name)].read_text() for name in ("extract", "accumulate"))
    assert ["aten.addmm_.default" in text for text in (before, after)] == [False, True]


def test_json_agrees_with_itself(inspect: Inspect) -> None:
    plan = ("--microbatches", 4, "--schedule", "zbh1", "--json")
    data = json.loads(inspect(f"{TARGETS}:unet", *plan))
    model, stages = data["model"], data["stages"]
    assert data["schema"] == "zbcompile.inspect/4"
    assert (model["schedule"], model["ranks"], model["microbatches"]) == ("zb-h1", 2, 4)
    assert [stage["rank"] for stage in stages] == [[0], [1]]
    assert (stages[0]["sends"] > 0, stages[1]["sends"]) == (True, 0)
    assert stages[1]["cut after"] == "(the loss)"
    assert data["notes"]["notes"][0].startswith("- image: returned besides the loss")
    assert data["units"]["stages"]["sends"] == "B per microbatch"
    assert sum(rank["parameters"] for rank in data["ranks"]) >= 4 * model["parameters"]
    for rank, stage in zip(data["ranks"], stages, strict=True):
        assert rank["busy"] == pytest.approx(4 * sum(stage[op] for op in "FBW"))
        assert rank["activations"] >= stage["keeps"]
        assert 0 < rank["optimizer"] <= 2 * rank["parameters"]  # which count buffers, too
    assert data["prediction"]["messages"] == 8
    assert data["prediction"]["peak"] == max(rank["peak"] for rank in data["ranks"])


def columns(data: Any) -> set[str]:
    """The names of all figures and tables."""
    tables = (table if isinstance(table, list) else [table] for table in data.values())
    rows = (row for table in tables for row in table if isinstance(row, dict))
    return {*data, *(name for row in rows for name in row)} - {"schema"}


@pytest.mark.slow
def test_every_figure_is_explained(tiny: Path, inspect: Inspect) -> None:
    """Every pass is listed, also one that had nothing to do."""
    text = (ROOT / "docs" / "inspect.md").read_text().partition("## `--json`")[2]
    words = set(re.findall(r"`([^`]+)`", text.partition("\n## ")[0]))
    options = (f"{tiny}:two", "--schedule", "1f1b", "--json")
    assert columns(json.loads(inspect(*options))) <= words
    data = json.loads(inspect(*options, "--compare", "1f1b", "--passes"))
    assert columns(data) <= words
    assert [row["pass"] for row in data["passes"]] == [*PASSES]
    ran = [row for row in data["passes"] if row["runs"]]
    assert all(row["seconds"] > 0 and row["operations"] > 0 for row in ran)


@pytest.mark.slow
def test_numbers_that_were_once_wrong(tiny: Path, inspect: Inspect) -> None:
    """An operation of unknown cost is named; a fake model runs on a GPU, not on a CPU core; the busiest
    of two unequal ranks has no bubble, and the other one stands still."""
    note = json.loads(inspect(f"{tiny}:custom", "--ranks", 1, "--json"))["notes"]["notes"][0]
    assert "FLOPs unknown, so timed by the bytes that they move: numbers.twice." in note
    result = json.loads(inspect(f"{tiny}:half", "--schedule", "zb-h1", "--fake", "--json"))
    assert "NVIDIA H100" in result["model"]["predicted"]
    assert result["prediction"]["step"] < 0.01
    times = {name: [2, 1] for name in ("forward", "backward", "weight")}
    (costs := tiny.with_name("costs.json")).write_text(json.dumps({**times, "comm": 0}))
    text = inspect(f"{tiny}:two", "--schedule", "1f1b", "--ranks", 2, "--costs", costs)
    text = " ".join(text.split())
    parts = (re.findall(part, text) for part in (r"bubble (\S+)%", r"Ranks are idle (\S+)%"))
    (share, *_), (idle, *_) = parts
    assert float(share) < float(idle)


def test_timelines_and_schedules_are_files(tiny: Path, inspect: Inspect) -> None:
    file, picture = tiny.with_name("mine.csv"), tiny.with_name("step.svg")
    zbcompile.schedules.save(zbcompile.schedules.build("zb-h1", ranks=3, microbatches=6), file)
    shown = inspect(f"{tiny}:two", "--schedule", file, "--timeline", picture)
    assert shown.strip() == str(picture)
    assert ["F2.5" in picture.read_text(), "F3.0" in picture.read_text()] == [True, False]


REFUSED = [
    ("nothing", "names no function; expected package.module:name or path/file.py:name"),
    ("no.such.module:f", "No module named 'no'"),
    ("no/such/file.py:f", "file no/such/file.py does not exist"),
    ("{tiny}:f", "has no f; it defines Net, Branching, Twice"),
    ("{tiny}:torch", "is a module; expected a function without arguments"),
    ("{tiny}:nothing", "returned a NoneType; expected (model, args)"),
    ("{tiny}:wide", "returned a tuple of 4"),
    ("{tiny}:listed", "args of an example is a list; expected a tuple"),
    ("{tiny}:broken", "ValueError: no such checkpoint"),
    ("{tiny}:stray", "target= but no loss="),
    ("{tiny}:branching", "forward or the loss reads a value that depends on its inputs"),
    (".", "is a directory"),
    ("{tiny}:two --graph 7.B", "stage 7 does not exist: zb-v on 2 ranks has stages 0 to 3"),
    ("{tiny}:two --graph 1.X", "expected STAGE.PASS such as 1.B"),
    ("{tiny}:two --graphs {tiny}/graphs", "Not a directory"),
    ("{tiny}:two --timeline {tiny}/step.svg", "Not a directory"),
    ("{tiny}:two --timeline step.png", "expected a file that ends in .txt"),
    ("{tiny}:two --schedule zb-x", "no schedule is called 'zb-x'"),
    ("{tiny}:two --schedule missing.csv", "missing.csv: No such file"),
    ("{tiny}:two --schedule 1f1b --ranks 9", "can be cut at 7 places"),
    ("{tiny}:two --microbatches 0", "microbatches=0"),
    ("{tiny}:two --costs missing.json", "no such file"),
    ("{tiny}:two --measured missing.json", "missing.json: No such file"),
    ("{tiny}:two --measured {tiny}", "is not a step record"),
    ("{tiny}:two --compare 1f1b,zb-x", "no schedule is called 'zb-x'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_is_wrong_is_one_line(arguments: str, message: str, tiny: Path, capsys: Any) -> None:
    assert main(arguments.format(tiny=tiny).split()) == 2
    captured = capsys.readouterr()
    (line,) = without_progress(captured.err)
    assert message in f"{line}\n"
    assert captured.out == ""


def test_what_stands_on_standard_error(tiny: Path, capsys: Any) -> None:
    """What the target prints; under --debug the traceback."""
    assert main([f"{tiny}:example", "--ranks", "1", "--schedule", "1f1b", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"]["model"] == "Linear"
    assert captured.err == "building\n"
    assert main(["no.such.module:f", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["two", "three", "example"])
def test_what_a_target_may_return(name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a file and from a module."""
    example = load_example(f"{tiny}:{name}")
    assert isinstance(example, zbcompile.Example)
    monkeypatch.syspath_prepend(tiny.parent)
    again = load_example(f"tiny:{name}")
    assert example.kwargs == again.kwargs == ({"scale": 2.0} if name == "three" else {})
    assert [x.shape for x in again.args] == [x.shape for x in example.args] == [(2, 8)]
