"""What a new kind of action costs: one entry in the table. Tried on a copy of the package with an entry more."""

import shutil
import subprocess
import sys
from pathlib import Path

from zbcompile import field_check, schedules, untrusted_text
from zbcompile.schedules.ir.kinds import KINDS

TABLE = "ir/kinds.py"
BEFORE = '    _message("RECV", "F"),\n'
COMPRESSION = '    Kind("PACK", "compression", after=("B",), time=("vocab_s",), frees=("vocab_state",)),\n'

COMMON = """
from dataclasses import replace
from zbcompile.schedules import *
from zbcompile.schedules.ir.actions import flatten

plain = build(name, 4, 8)
costs = replace(Costs.uniform(plain.stages), optimizer=(3,) * plain.stages, vocab_s=(2,) * plain.stages)

def refused(orders, text):
    try:
        check(replace(plain, orders=tuple(map(tuple, orders))))
    except ScheduleError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"not caught: {text}")

def passes_through_everything(schedule, op, count):
    check(schedule)
    lowered = lower(schedule)
    check(lowered)
    for program in (schedule, lowered):
        assert parse_schedule(str(program)) == program
        assert from_json(to_json(program)).program == program
        assert from_csv(to_csv(program, "papers"), name) == program
    for t in (simulate(schedule, costs), simulate(lowered, costs)):
        times = [span.end - span.start for span in t.spans if span.step[0] == op]
        assert times == [costs.time(op, 0)] * count, times
        assert sum(i.end - i.start for i in t.idle) + sum(t.busy) == t.finish * t.schedule.ranks
    assert f'fill="url(#{op})"' in to_svg(simulate(schedule, costs))
"""

EVERY_MICROBATCH = """
def packed(order):
    return [s for step in order for s in (step, *(Action("PACK", a.stage, a.microbatch)
                                                  for a in flatten((step,)) if a.op in ("B", "BW")))]

orders = [packed(order) for order in plain.orders]
schedule = replace(plain, orders=tuple(map(tuple, orders)))
passes_through_everything(schedule, "PACK", sum(step[0] == "PACK" for order in orders for step in order))
assert peak_memory(schedule, replace(costs, vocab_state=(1,) * plain.stages)) <= peak_memory(plain, costs)

first = next(s for s in orders[2] if s[0] == "PACK")
without = [s for s in orders[2] if s != first]
refused([*orders[:2], without, orders[3]], "rank 2 never runs PACK of stage")
refused([*orders[:2], [*orders[2], first], orders[3]], f"{first} appears a second time")
refused([*orders[:2], [first, *without], orders[3]], f"{first} comes before B")
try:
    simulate(replace(plain, orders=(*map(tuple, orders[:2]), (first, *without), tuple(orders[3]))))
except ScheduleError as error:
    assert f"rank 2 runs {first} before an action on the same rank that it depends on" in str(error), error
else:
    raise AssertionError("a pass in front of what it needs was simulated")
"""


def test_one_entry_adds_a_kind_of_action(tmp_path: Path) -> None:
    """Text, files, checks, simulation, memory, lowering and pictures know it from the table alone."""
    package = tmp_path / "zbcompile"
    shutil.copytree(Path(schedules.__file__).parent, package / "schedules")
    (package / "__init__.py").write_text("", encoding="utf-8")
    shutil.copy(field_check.__file__, package)
    shutil.copy(untrusted_text.__file__, package)
    table = (package / "schedules" / TABLE).read_text(encoding="utf-8")
    assert table.count(BEFORE) == 1
    (package / "schedules" / TABLE).write_text(table.replace(BEFORE, COMPRESSION + BEFORE), encoding="utf-8")
    runs = f"for name in ('zb-v', '1f1b', 'dualpipe'): exec({COMMON + EVERY_MICROBATCH!r}, {{'name': name}})"
    command = [sys.executable, "-c", runs]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_kind_is_reached_by_its_letters_in_one_way() -> None:
    """Nothing is written twice: torch's letters are distinct, and what a kind refers to is in the table."""
    torch = [kind.torch for kind in KINDS.values() if kind.torch]
    assert len(torch) == len(set(torch))
    for kind in KINDS.values():
        assert {*kind.does, *kind.after, *kind.before, *([kind.takes] if kind.takes else [])} <= KINDS.keys()
