"""Breaks everything that can break in a job of several processes, and looks at how each of them ends.

    python -m tests.support.fault_sweep FILE [--ranks 2 4] [--only TEXT] [--timeout 5]

from the repository's root. FILE gets a line of JSON for each cell; a cell that has one is not run
again, so that a sweep can be interrupted. A cell is good if every process that still runs names what
was broken, and ends, within `timeout` + 5 seconds of the fault. `queued` are the seconds for which a
process had no processor: on a loaded machine they make it late.
"""

import argparse
import gc
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

from tests.support.fault_cells import FAULTS, Cell
from tests.support.faulty import Faulty

BAD = ("silent", "wrong", "late to speak", "late to end", "no fault")


def main() -> Callable[[], None] | None:
    """Runs all cells. In a process of a job, returns the work of that process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    options = parser.parse_args()
    Faulty()  # imports what it needs
    gc.freeze()  # spares every process at its end 0.8 s of processor time for what was imported
    faults = random.Random(1).sample(FAULTS, len(FAULTS))
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {json.loads(line)["cell"] for line in lines}
    for fault, ranks in itertools.product(faults, options.ranks):
        cell = Cell(fault, ranks, options.timeout)
        if options.only not in cell.name or cell.name in done:
            continue
        if (job := cell.start()) is not None:
            return job
        try:
            cell.finish()
            result = cell.result()
        except TimeoutError as error:
            cell.close()
            result = {"cell": cell.name, "no fault": str(error)}
        bad = {what: result[what] for what in BAD if result.get(what)}
        print(f"{cell.name} | {result.get('ended')} s | {bad or 'good'}", flush=True)
        with options.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return None


if __name__ == "__main__":
    job = main()
    if job is not None:
        job()
