"""Numbers that were once wrong or misleading, each made by hand small enough to say what it must
be.

What is held while messages travel is counted in tests/zbcompile/prediction/test_rank_memory.py;
FLOPs of experts in tests/passes/cost/test_node_cost.py.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.amounts import format_bytes, format_share
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.prediction.predict import predicted_costs
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.program.program import Program
from zbcompile.schedules import Costs, build, simulate
from zbcompile.schedules.visualization.step_tables import rank_table
from zbcompile.schedules.visualization.text import summary
from zbcompile.tables import format_figure


class Layer(nn.Module):
    """As in a transformer of 2020: a product, and many passes over its values."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.softmax(self.product(x), -1), 0.1)


@cache
def layers(recompute: str = "off") -> Program:
    model, x = nn.Sequential(*(Layer() for _ in range(2))), torch.ones(64, 256)
    example = zbcompile.Example(model, (x,), {}, nn.MSELoss(), x)
    choices = CompileOptions(recompute=recompute, hardware=Hardware.find("a100-80g"))
    return compile_example(example, build("zb-h1", 2, 4), choices).program


@pytest.mark.slow
def test_what_is_alive_while_b_rebuilds_counts() -> None:
    """Full recomputation keeps little, and needs what it rebuilds."""
    waits, alive = list[float](), list[float]()
    for program in (layers(), layers("full")):
        costs = predicted_costs(program)
        waits.append(max(simulate(program.schedule, costs).peak_memory))
        alive.append(max(memory.activations for memory in rank_memories(program, costs, {})))
    assert waits[1] < alive[1] <= alive[0]
    assert alive[1] / alive[0] > waits[1] / waits[0]


@pytest.mark.slow
def test_a_split_costs_something() -> None:
    """Whatever B and W both compute."""
    costs = predicted_costs(layers())
    fused = simulate(build("1f1b", 2, 4), costs).busy[0]
    split = simulate(build("zb-h1", 2, 4), costs).busy[0]
    assert fused == pytest.approx(split - 4 * costs.saved[0])


def test_numbers_have_units_and_no_sign_of_nothing() -> None:
    assert format_share(-1e-16) == "0.0%"
    assert format_bytes(1.578e5) == "154.1 KiB"
    costs = Costs.uniform(2, 1e-3, 1e-3, 1e-3, activation=1.578e5)
    costs = replace(costs, time_unit="s", memory_unit="B")
    printed = simulate(build("1f1b", 2, 4), costs)
    assert "makespan 15 ms" in summary(printed)
    assert summary(printed).endswith(" KiB")
    first = [format_figure(figure) for figure in rank_table(printed).rows[0]]
    assert (first[0], first[1], first[-1]) == ("0", "12 ms", "308.2 KiB")
