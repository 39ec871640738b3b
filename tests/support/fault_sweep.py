"""Break everything that can break in a job of several processes, and look at how each of them ends.

    python -m tests.support.fault_sweep FILE [--ranks 2 4] [--nodes 1 2] [--only TEXT] [--timeout 5] [--part 1/2]
    python -m tests.support.fault_sweep FILE --count

from the repository's root. FILE gets a line of JSON for each cell. A cell that has one is not run
again, so a sweep can be interrupted, and several that run other parts can share FILE. A cell is
good if every process that still runs says what was broken, and ends, within `timeout` + 5 seconds
of the fault. `queued` are the seconds for which a process had no processor: on a loaded machine
they make it late. --bad runs the cells again that were not good.

Two nodes are network namespaces; without the right to make them, their cells are skipped, with the
reason.
"""

import argparse
import gc
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.fault_cells import FAULTS, LIMIT, Cell
from tests.support.faulty import Faulty
from tests.support.namespaces import Machines

BAD = ("silent", "wrong", "late to speak", "late to end", "no fault")


def cells(options: argparse.Namespace, machines: Machines | None) -> Iterator[Cell]:
    """The cells of this part that have no result, in an order whose beginning has some of
    everything."""
    faults = random.Random(1).sample(FAULTS, len(FAULTS))
    wanted = itertools.product(faults, options.nodes, options.ranks)
    made = (
        Cell(fault, ranks, options.timeout, machines if nodes == 2 else None)
        for fault, nodes, ranks in wanted
    )
    legal = [
        each
        for each in made
        if (each.machines or each.fault.what != "link cut") and options.only in each.name
    ]
    bad = BAD if options.bad else ()
    done = {
        each["cell"] for each in results(options.results) if not any(each.get(what) for what in bad)
    }
    first, parts = map(int, options.part.split("/"))
    return (each for each in legal[first - 1 :: parts] if each.name not in done)


def results(path: Path) -> list[dict[str, Any]]:
    """The last result of every cell."""
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return list({line["cell"]: line for line in lines}.values())


def count(path: Path, limit: float) -> None:
    """What docs/faults.md says of a sweep."""
    found = [each | {"late even so": late_without_queueing(each, limit)} for each in results(path)]
    for group in (
        "2 ranks, one node",
        "2 ranks, two nodes",
        "4 ranks, one node",
        "4 ranks, two nodes",
    ):
        print(f"{group}: {sum(group in each['cell'] for each in found)} cells")
    for what in (*BAD, "late even so"):
        bad = [each for each in found if each.get(what)]
        print(f"{what}: {len(bad)} of {len(found)}")
        for each in bad:
            print(f"  {each['cell']} | {each[what]} | queued {each.get('queued')}")


def late_without_queueing(result: dict[str, Any], limit: float) -> dict[str, float]:
    """The processes that were late to end although they hardly waited for a processor."""
    waited = {
        rank: took - result["queued"][rank] for rank, took in result.get("late to end", {}).items()
    }
    return {rank: round(took, 1) for rank, took in waited.items() if took > limit}


def main() -> Callable[[], None] | None:
    """Run all cells. In a process of a job: what it is to do."""
    parser = argparse.ArgumentParser(
        description="Break everything that can break in a job, and look at every process."
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--part", default="1/1", help="I/N: every Nth cell, from the Ith one")
    parser.add_argument("--bad", action="store_true", help="also the cells that were not good")
    parser.add_argument("--count", action="store_true", help="only say what the results are")
    options = parser.parse_args()
    if options.count:
        count(options.results, options.timeout + LIMIT)
        return None
    Faulty()  # imports what it needs
    gc.freeze()  # spares every process at its end 0.8 s of processor time for what was imported
    machines = Machines() if 2 in options.nodes else None
    if machines is not None and machines.reason:
        print(f"two nodes: skipped, {machines.reason}")
        options.nodes, machines = [1], None
    for cell in cells(options, machines):
        if (job := cell.start()) is not None:
            return job
        write(options.results, outcome(cell))
    if machines is not None:
        machines.close()
    return None


def outcome(cell: Cell) -> dict[str, Any]:
    try:
        cell.finish()
    except TimeoutError as error:
        cell.close()
        return {"cell": cell.name, "no fault": str(error)}
    return cell.result()


def write(path: Path, result: dict[str, Any]) -> None:
    """Append a line, in one call, since other parts append theirs; and say it."""
    bad = {what: result[what] for what in BAD if result.get(what)}
    print(
        f"{result['cell']} | {result.get('spoke')} s | {result.get('ended')} s | {bad or 'good'}",
        flush=True,
    )
    with open(path, "ab", buffering=0) as file:
        file.write((json.dumps(result | {"load": round(os.getloadavg()[0], 1)}) + "\n").encode())


if __name__ == "__main__":
    job = main()
    if job is not None:
        job()
