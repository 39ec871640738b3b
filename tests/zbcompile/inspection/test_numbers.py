"""Numbers that were once wrong or misleading, each made by hand small enough to say what it must
be.

What is held while messages travel is counted in tests/zbcompile/prediction/test_rank_memory.py;
FLOPs of experts in tests/passes/cost/test_node_cost.py.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.amounts import format_bytes, format_share
from zbcompile.compiler.compile_example import compile_example
from zbcompile.inspect import main
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.prediction.predict import predicted_costs
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.program.program import Program
from zbcompile.schedules import Costs, build, simulate
from zbcompile.schedules.visualization.step_tables import rank_table
from zbcompile.schedules.visualization.text import summary
from zbcompile.tables import format_figure

TARGET = """
import torch
from torch import nn

@torch.library.custom_op("numbers::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = twice(torch.relu(layer(x)))
        return x.square().mean()

def net(): return Net(), (torch.ones(8, 64),)
def half(): return Net().to(torch.bfloat16), (torch.ones(8, 64, dtype=torch.bfloat16),)
"""


@pytest.fixture
def inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The JSON that the command prints of a function of TARGET."""
    (tmp_path / "numbers_net.py").write_text(TARGET)

    def run(name: str, *options: str) -> Any:
        assert (
            main([f"{tmp_path / 'numbers_net.py'}:{name}", "--ranks", "2", "--json", *options]) == 0
        )
        return json.loads(capsys.readouterr().out)

    return run


class Layer(nn.Module):
    """As in a transformer of 2020: a product, and many passes over its values."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.softmax(self.product(x), -1), 0.1)


@cache
def layers(recompute: str = "off") -> Program:
    model = nn.Sequential(*(Layer() for _ in range(4)))
    example = zbcompile.Example(
        model, (torch.ones(64, 256),), {}, nn.MSELoss(), torch.ones(64, 256)
    )
    choices = CompileOptions(recompute=recompute, hardware=Hardware.find("a100-80g"))
    return compile_example(example, build("zb-h1", 2, 4), choices).program


@pytest.mark.slow
def test_an_operation_of_unknown_cost_is_named_and_takes_its_bytes(
    inspect: Callable[..., Any],
) -> None:
    result = inspect("net", "--schedule", "zb-h1")
    assert (
        "FLOPs unknown, so timed by the bytes that they move: numbers.twice."
        in result["notes"]["notes"][0]
    )


def test_one_schedule_named_twice_is_one_number(inspect: Callable[..., Any]) -> None:
    one, second = inspect("net", "--compare", "zb-h1,zb-h1", "--costs", "measured")["compared"]
    assert one == second


@pytest.mark.slow
def test_what_is_alive_while_b_rebuilds_counts() -> None:
    """Full recomputation keeps little, and needs what it rebuilds."""
    complete, rebuilt = layers(), layers("full")
    waits, alive = ([], [])  # type: tuple[list[float], list[float]]
    for program in (complete, rebuilt):
        costs = predicted_costs(program)
        waits.append(max(simulate(program.schedule, costs).peak_memory))
        alive.append(max(memory.activations for memory in rank_memories(program, costs, {})))
    assert waits[1] < alive[1] <= alive[0]
    assert alive[1] / alive[0] > waits[1] / waits[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("net", marks=pytest.mark.beyond_sample), "half"])
def test_fake_models_run_on_a_gpu(name: str, inspect: Callable[..., Any]) -> None:
    """Not on a CPU core, where a step takes a quarter of an hour; of half precision too."""
    result = inspect(name, "--schedule", "zb-h1", "--fake")
    assert "NVIDIA H100" in result["model"]["predicted"]
    assert result["prediction"]["step"] < 0.01


def test_a_split_costs_something() -> None:
    """Whatever B and W both compute."""
    costs = predicted_costs(layers())
    fused = simulate(build("1f1b", 2, 4), costs).busy[0]
    split = simulate(build("zb-h1", 2, 4), costs).busy[0]
    assert fused == pytest.approx(split - 4 * costs.saved[0])


def test_numbers_have_units_and_no_sign_of_nothing() -> None:
    assert format_share(-1e-16) == "0.0%"
    assert format_bytes(1.578e5) == "154.1 KiB"
    costs = replace(
        Costs.uniform(2, 1e-3, 1e-3, 1e-3, activation=1.578e5), time_unit="s", memory_unit="B"
    )
    printed = simulate(build("1f1b", 2, 4), costs)
    assert "makespan 15 ms" in summary(printed)
    assert summary(printed).endswith(" KiB")
    first = [format_figure(figure) for figure in rank_table(printed).rows[0]]
    assert (first[0], first[1], first[-1]) == ("0", "12 ms", "308.2 KiB")


@pytest.mark.slow
def test_a_bubble_beside_idle_ranks_says_whose_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The busiest of two unequal ranks has none, and the other one stands still."""
    (tmp_path / "numbers_net.py").write_text(TARGET)
    costs = tmp_path / "costs.json"
    costs.write_text(
        json.dumps({"forward": [2, 1], "backward": [2, 1], "weight": [2, 1], "comm": 0})
    )
    options = ("--ranks", "2", "--schedule", "1f1b", "--costs", str(costs))
    assert main([f"{tmp_path / 'numbers_net.py'}:net", *options]) == 0
    text = " ".join(capsys.readouterr().out.split())
    share, idle = (
        re.search(pattern, text) for pattern in (r"bubble (\S+)%", r"Ranks are idle (\S+)%")
    )
    assert share is not None
    assert idle is not None
    assert float(share[1]) < float(idle[1])
