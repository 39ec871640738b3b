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
OTHER_TORCH = (
    f"\n- recorded from another program: torch 2.13.0+cpu there, {torch.__version__} here\n"
)
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
def inspect(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command in this process; returns what it prints."""

    def run(*arguments: object) -> str:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert (status, captured.err) == (0, ""), captured.err
        return captured.out

    return run


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, which must fail with one line; returns that line."""

    def run(*arguments: object) -> str:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        said = without_progress(captured.err)
        assert (status, captured.out, len(said)) == (2, "", 1), captured.err
        return f"{said[0]}\n"

    return run


@pytest.mark.slow
def test_summary(inspect: Callable[..., str], golden: Callable[[str, str], None]) -> None:
    text = inspect(f"{TARGETS}:gpt", "--ranks", 4)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert len(text.splitlines()) <= 60
    golden("inspect_gpt.txt", text)


def test_graph(inspect: Callable[..., str], tiny: Path) -> None:
    """As torch.fx prints it: every operation with its type, and the line of the model that it is
    from."""
    text = inspect(f"{tiny}:two", "--graph", "1.w", "--schedule", "zb-h1")
    assert text.startswith("# W of stage 1 of Net: ")
    assert "# in: " in text
    assert "torch.ops.aten.addmm_.default" in text
    assert re.search(r"# File: .*tiny\.py:\d+ in forward", text) or "torch/nn/modules" in text


@pytest.mark.slow
def test_comparison(inspect: Callable[..., str], golden: Callable[[str, str], None]) -> None:
    text = inspect(f"{TARGETS}:gpt", "--compare", "1f1b,ZBH1,zb-v,v-min,dualpipe")
    assert max(map(len, text.splitlines())) <= WIDTH
    golden("inspect_gpt_compare.txt", text)


def test_what_cannot_be_compared_stands_below_the_table(
    tiny: Path, inspect: Callable[..., str]
) -> None:
    table, note = inspect(f"{tiny}:two", "--compare", "1f1b,dualpipe", "--microbatches", 3).rsplit(
        "\n\n", 1
    )
    assert "1f1b" in table
    assert note.startswith("dualpipe: ")


@pytest.mark.slow
def test_causes(
    tiny: Path, inspect: Callable[..., str], golden: Callable[[str, str], None]
) -> None:
    """The critical path; with equal times, so for any torch."""
    costs = tiny.with_name("costs.json")
    costs.write_text(json.dumps(dict.fromkeys(("forward", "backward", "weight"), [1] * 4)))
    plan = ("--ranks", 4, "--microbatches", 4, "--schedule", "1f1b", "--costs", costs)
    text = inspect(f"{tiny}:two", *plan, "--critical-path")
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    golden("inspect_causes.txt", text)


@pytest.mark.slow
def test_a_recorded_step(inspect: Callable[..., str], golden: Callable[[str, str], None]) -> None:
    """A step of four processes (examples/record_step.py under torchrun), next to its prediction."""
    text = inspect(f"{TARGETS}:gpt", "--measured", RECORD)
    assert max(map(len, text.splitlines())) <= WIDTH
    golden("inspect_measured.txt", text.removesuffix(OTHER_TORCH))


@pytest.mark.slow
def test_a_program_directory(
    tmp_path: Path,
    inspect: Callable[..., str],
    golden: Callable[[str, str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same schedule as the recorded step's, whose waits are explained too."""
    plan = ("--schedule", "zb-h1", "--ranks", 4, "--microbatches", 8)
    assert (
        zbcompile.compile.main(
            [f"{TARGETS}:gpt", *map(str, plan), "--output", str(tmp_path / "program")]
        )
        == 0
    )
    capsys.readouterr()  # compile's own words
    shown = inspect(tmp_path / "program")
    assert max(map(len, shown.splitlines())) <= WIDTH
    golden("inspect_program.txt", shown)
    causes = inspect(tmp_path / "program", "--measured", RECORD, "--critical-path")
    golden("inspect_measured_causes.txt", causes.removesuffix(OTHER_TORCH))
    for ending in ("svg", "txt"):
        picture = tmp_path / f"both.{ending}"
        assert str(picture) in inspect(
            tmp_path / "program", "--measured", RECORD, "--timeline", picture
        )
    assert (tmp_path / "both.svg").read_text().count("<svg") == 3
    assert "overhead" in (tmp_path / "both.svg").read_text()


def test_the_passes_in_order(tiny: Path, inspect: Callable[..., str]) -> None:
    """Every pass is listed, also one that had nothing to do."""
    rows = json.loads(inspect(f"{tiny}:two", "--passes", "--json"))["passes"]
    assert [row["pass"] for row in rows] == [*PASSES]
    ran = [row for row in rows if row["runs"]]
    assert len(ran) == len(PASSES)
    assert all(row["seconds"] > 0 and row["operations"] > 0 for row in ran)
    text = inspect(f"{tiny}:two", "--passes")
    assert max(map(len, text.splitlines())) <= WIDTH
    assert [line.split()[0] for line in text.splitlines()[2 : 2 + len(rows)]] == [*PASSES]


def test_a_file_after_each_pass(
    tiny: Path, tmp_path: Path, inspect: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation turns the products of W into additions in place."""
    monkeypatch.setenv("ZBCOMPILE_DUMP", str(tmp_path / "dump"))
    inspect(f"{tiny}:two", "--schedule", "zb-h1")
    names = sorted(path.name for path in (tmp_path / "dump" / "rank0").iterdir())
    assert names[0] == "0000-export.txt"
    assert [name[5:-4] for name in names] == [*PASSES]
    before, after = (
        next(
            path
            for path in (tmp_path / "dump" / "rank0").iterdir()
            if path.name.endswith(f"-{name}.txt")
        )
        for name in ("extract", "accumulate")
    )
    assert "aten.addmm_.default" not in before.read_text()
    assert "aten.addmm_.default" in after.read_text()


@pytest.mark.slow
def test_all_graphs_are_written(tmp_path: Path, tiny: Path, inspect: Callable[..., str]) -> None:
    """As Python. The JSON of a graph holds every operation, and the line or the pass that each is
    from."""
    directory = tmp_path / "graphs" / "deep"
    files = inspect(f"{tiny}:two", "--graphs", directory).split()
    names = [f"stage{stage}_{name}.py" for stage in range(4) for name in ("F", "B", "W", "BW")]
    assert sorted(files) == sorted(f"{directory}/{name}" for name in names)
    for name in names:
        ast.parse((directory / name).read_text())
    for name in ("F", "B", "W"):
        operations = json.loads(inspect(f"{tiny}:two", "--graph", f"2.{name}", "--json"))[
            f"graph 2.{name}"
        ]
        assert all(op["line"] or op["made_by"] for op in operations)


@pytest.mark.slow
def test_fake_tensors_show_the_same(tiny: Path, inspect: Callable[..., str]) -> None:
    """For the same hardware: with fake tensors that is not taken to be the machine at hand."""
    requested = (f"{tiny}:two", "--hardware", "cpu-core")
    assert inspect(*requested, "--fake") == inspect(*requested)


def test_json_agrees_with_itself(inspect: Callable[..., str]) -> None:
    data = json.loads(
        inspect(f"{TARGETS}:unet", "--json", "--microbatches", 4, "--schedule", "zbh1")
    )
    model, stages = data["model"], data["stages"]
    assert data["schema"] == "zbcompile.inspect/4"
    assert (model["schedule"], model["ranks"], model["microbatches"], len(stages)) == (
        "zb-h1",
        2,
        4,
        2,
    )
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


@pytest.mark.slow
def test_a_sharded_output_layer_is_described(inspect: Callable[..., str]) -> None:
    data = json.loads(inspect(f"{TARGETS}:gpt", "--vocab", 1, "--schedule", "zb-h1", "--json"))
    assert any("words by rank: 128, 128" in note for note in data["notes"]["notes"])
    assert data["prediction"]["step"] > 0


def columns(data: Any) -> set[str]:
    """The names of all figures and tables."""
    rows = (
        row for table in data.values() for row in (table if isinstance(table, list) else [table])
    )
    return {*data, *(name for row in rows if isinstance(row, dict) for name in row)}


@pytest.mark.slow
def test_every_figure_is_explained(tiny: Path, inspect: Callable[..., str]) -> None:
    section = (
        (ROOT / "docs" / "inspect.md").read_text().partition("## `--json`")[2].partition("\n## ")[0]
    )
    words = set(re.findall(r"`([^`]+)`", section))
    options = (f"{tiny}:two", "--schedule", "1f1b", "--json")
    data = json.loads(inspect(*options))
    assert columns(data) - words == {"schema"}
    assert columns(json.loads(inspect(*options, "--compare", "1f1b", "--passes"))) <= {
        *words,
        "schema",
    }


@pytest.mark.slow
def test_costs_of_a_file_are_the_textbooks(tiny: Path, inspect: Callable[..., str]) -> None:
    options = (f"{tiny}:two", "--schedule", "1f1b", "--ranks", 2, "--microbatches", 4, "--json")
    costs = tiny.with_name("costs.json")
    costs.write_text('{"forward": [2, 2], "backward": [2, 2], "weight": [2, 2]}')
    assert json.loads(inspect(*options, "--costs", costs))["prediction"]["step"] == (4 + 2 - 1) * 6


@pytest.mark.mostly_slow(every=4, suite=1)
@pytest.mark.parametrize("ending", ["txt", "svg", "html", "json"])
def test_a_timeline_is_written(tiny: Path, ending: str, inspect: Callable[..., str]) -> None:
    file = tiny.with_name(f"step.{ending}")
    assert inspect(f"{tiny}:two", "--schedule", "1f1b", "--timeline", file).strip() == str(file)
    assert "F0.0" in file.read_text() or '"F"' in file.read_text()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "names no function; expected package.module:name or path/file.py:name"),
        ("no.such.module:f", "No module named 'no'"),
        ("no/such/file.py:f", "file no/such/file.py does not exist"),
        ("{tiny}:f", "has no f; it defines Net, Branching, two"),
        ("{tiny}:torch", "is a module; expected a function without arguments"),
        ("{tiny}:nothing", "returned a NoneType; expected (model, args)"),
        ("{tiny}:wide", "returned a tuple of 4"),
        ("{tiny}:listed", "args of an example is a list; expected a tuple"),
        ("{tiny}:broken", "ValueError: no such checkpoint"),
        ("{tiny}:stray", "target= but no loss="),
        ("{tiny}:branching", "forward or the loss reads a value that depends on its inputs"),
        (".", "is a directory"),
    ],
)
def test_a_wrong_target_is_one_line(
    target: str, message: str, tiny: Path, refuse: Callable[..., str]
) -> None:
    assert message in refuse(target.format(tiny=tiny))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--graph", "7.B", "stage 7 does not exist: zb-v on 2 ranks has stages 0 to 3"),
        ("--graph", "1.X", "expected STAGE.PASS such as 1.B"),
        ("--graphs", "{tiny}/graphs", "Not a directory"),
        ("--timeline", "{tiny}/step.svg", "Not a directory"),
        ("--timeline", "step.png", "expected a file that ends in .txt"),
        ("--schedule", "zb-x", "no schedule is called 'zb-x'"),
        ("--schedule", "missing.csv", "missing.csv: No such file"),
        ("--ranks", "64", "can be cut at 7 places"),
        ("--microbatches", "0", "microbatches=0"),
        ("--costs", "missing.json", "no such file"),
        ("--measured", "missing.json", "missing.json: No such file"),
        ("--measured", "{tiny}", "is not a step record"),
        ("--compare", "1f1b,zb-x", "no schedule is called 'zb-x'"),
    ],
)
def test_a_wrong_option_is_one_line(
    option: str, value: str, message: str, tiny: Path, refuse: Callable[..., str]
) -> None:
    assert message in refuse(f"{tiny}:two", option, value.format(tiny=tiny))


def test_what_the_target_prints_is_no_part_of_the_report(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{tiny}:example", "--ranks", "1", "--schedule", "1f1b", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"]["model"] == "Linear"
    assert captured.err == "building\n"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no.such.module:f", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


EXCHANGING = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

class Exchanging(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = all_reduce(layer(x), "sum", dist.group.WORLD)
        return x.square().mean()

def exchanging():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Exchanging(), (torch.ones(2, 8),)
"""


def test_exchanges_beside_the_pipeline(tmp_path: Path, inspect: Callable[..., str]) -> None:
    (path := tmp_path / "exchanging.py").write_text(EXCHANGING)
    text = inspect(f"{path}:exchanging", "--schedule", "zb-h1", "--ranks", "2")
    assert not torch.distributed.is_initialized()  # the group that the target made is gone
    assert "- 4 all_reduce along group0 per microbatch: 256 B, " in text


@pytest.mark.parametrize("name", ["two", "three", "example"])
def test_what_a_target_may_return(name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a file and from a module."""
    example = load_example(f"{tiny}:{name}")
    assert isinstance(example, zbcompile.Example)
    monkeypatch.syspath_prepend(tiny.parent)
    again = load_example(f"tiny:{name}")
    assert example.kwargs == again.kwargs == ({"scale": 2.0} if name == "three" else {})
    assert [x.shape for x in again.args] == [x.shape for x in example.args] == [(2, 8)]


@pytest.mark.slow
def test_a_schedule_from_a_file(tiny: Path, inspect: Callable[..., str]) -> None:
    file = tiny.with_name("mine.csv")
    zbcompile.schedules.save(zbcompile.schedules.build("zb-h1", ranks=3, microbatches=6), file)
    data = json.loads(inspect(f"{tiny}:two", "--schedule", file, "--json"))
    assert (data["model"]["ranks"], data["model"]["microbatches"], len(data["stages"])) == (3, 6, 3)
