"""`--passes`: the passes of the compiler in order, with the operations before and after each and the time it took."""

import json
from dataclasses import asdict

from tabulate import tabulate

from zbcompile.compiler.pass_history import PassCost, PassHistory
from zbcompile.inspection.summary import SCHEMA

HEADERS = ("pass", "runs", "before", "after", "seconds", "what it does")


def pass_table(history: PassHistory, as_json: bool) -> str:
    """Every pass as a row, also one that had nothing to do; operations and seconds are sums over its runs."""
    costs = history.costs()
    if as_json:
        return json.dumps({"schema": SCHEMA, "passes": [asdict(cost) for cost in costs]}, indent=1) + "\n"
    rows = [_row(cost) for cost in costs]
    seconds = sum(cost.seconds for cost in costs)
    return (
        tabulate(rows, HEADERS, disable_numparse=True, colalign=("left", *("right",) * 4, "left"))
        + f"\n\nOperations of all runs of a pass; {seconds:.2f} seconds in passes. Stages that do the same work as "
        "another\ngo only through `deduplicate`. A pass without runs had nothing to do.\n"
    )


def _row(cost: PassCost) -> tuple[str, ...]:
    if not cost.runs:
        return cost.name, "-", "", "", "", cost.does
    before = "" if cost.before is None else f"{cost.before:,}"
    return cost.name, str(cost.runs), before, f"{cost.after:,}", f"{cost.seconds:.3f}", cost.does
