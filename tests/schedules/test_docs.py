"""docs/schedules.md and the docstrings' examples say what the code says."""

import doctest
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

from zbcompile import schedules
from zbcompile.schedules import Costs, build, lower, names, simulate
from zbcompile.schedules.ir.actions import SEND_B, SEND_F

DOCS = Path(__file__).parents[2] / "docs" / "schedules.md"
WALKED = pkgutil.walk_packages(schedules.__path__, "zbcompile.schedules.")
MODULES = [module.name for module in WALKED if not module.name.endswith("__main__")]


def test_comparison_table_is_recomputed() -> None:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and line.count("%") == 3]
    assert rows == [_row(name) for name in names()]


def _row(name: str, ranks: int = 8, microbatches: int = 32) -> str:
    schedule = build(name, ranks, microbatches)
    unit = 2 / schedule.placement.chunks
    times = schedule.stages, unit, unit, unit
    plain = simulate(schedule, Costs.uniform(*times, activation=unit / 2))
    hops = simulate(schedule, Costs.uniform(*times, comm=0.2))
    steps = [step for program in lower(schedule).orders for step in program]
    messages = sum(step[0] in (SEND_F, SEND_B) for step in steps) // microbatches
    bubbles = (f"{100 * b:.1f}%" for b in (plain.cost_bubble, plain.bubble, hops.bubble))
    return f"| {name} | {' | '.join(bubbles)} | {max(plain.peak_memory):g} | {messages} |"


@pytest.mark.parametrize("module", ["zbcompile.schedules", *MODULES])
def test_examples(module: str) -> None:
    assert doctest.testmod(import_module(module)).failed == 0
