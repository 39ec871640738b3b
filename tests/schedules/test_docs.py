"""docs/schedules.md says what the code says."""

from pathlib import Path

from zbcompile.schedules import Costs, build, lower, names, simulate
from zbcompile.schedules.ir.actions import SEND_B, SEND_F

DOCS = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_comparison_table_is_recomputed() -> None:
    rows = [
        line
        for line in DOCS.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and line.count("%") == 3
    ]
    assert rows == [_row(name) for name in names()]


def _row(name: str, ranks: int = 8, microbatches: int = 32) -> str:
    schedule = build(name, ranks, microbatches)
    unit = 2 / schedule.placement.chunks
    plain = simulate(
        schedule, Costs.uniform(schedule.stages, unit, unit, unit, activation=unit / 2)
    )
    hops = simulate(schedule, Costs.uniform(schedule.stages, unit, unit, unit, comm=0.2))
    messages = sum(
        step[0] in (SEND_F, SEND_B) for program in lower(schedule).orders for step in program
    )
    bubbles = " | ".join(
        f"{100 * bubble:.1f}%" for bubble in (plain.cost_bubble, plain.bubble, hops.bubble)
    )
    return f"| {name} | {bubbles} | {max(plain.peak_memory):g} | {messages // microbatches} |"
