"""Write the table of docs/faults.md anew: break everything there is to break and look at every
rank.

python -m tests.support.fault_table [NAME ...]   (only the rows of these names)
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.faulty import SCENARIOS, Scenario
from tests.support.pool import Outcome, Pool, open_pool

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def main(names: list[str]) -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {
        s.name: [line for line in table.splitlines() if line.startswith(f"| {s.name} |")]
        for s in SCENARIOS
    }
    chosen = [s for s in SCENARIOS if s.name in names or not names]
    rows |= {s.name: [] for s in chosen}
    with open_pool() as pool:
        for scenario in chosen:
            rows[scenario.name] += rows_of(scenario, pool)
    head = [
        "| injected | on rank | rank | what it said | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines = [*head, *(line for found in rows.values() for line in found)]
    DOCUMENT.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


def rows_of(scenario: Scenario, pool: Pool) -> Iterator[str]:
    """One row for what all ranks say alike, or one per rank."""
    outcomes = pool.outcomes(scenario.run, *scenario.args, ranks=scenario.ranks)
    pool.group = None
    said = [_said(outcome) for outcome in outcomes]
    seconds = [_seconds(outcome) for outcome in outcomes]
    if len(set(said)) == 1:
        yield f"| {scenario.name} | {scenario.rank} | all | {said[0]} | {', '.join(seconds)} |"
        return
    for rank, (text, time) in enumerate(zip(said, seconds, strict=True)):
        yield f"| {scenario.name} | {scenario.rank} | {rank} | {text} | {time} |"


def _said(outcome: Outcome) -> str:
    if outcome.error:
        return f"({outcome.text})"
    if outcome.value is None:
        return "(nothing: it was not there)"
    text = re.sub(r"\[/\S*gloo\S*\] ", "", f"{outcome.value.error}: {outcome.value.message}")
    return text.replace("|", "\\|")


def _seconds(outcome: Outcome) -> str:
    return f"{outcome.value.seconds:.1f}" if outcome.value else ""


if __name__ == "__main__":
    main(sys.argv[1:])
