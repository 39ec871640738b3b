"""The record of a step and its trace: every action of every rank once, in order, with times that fit,
on every rank; and the NaN check beside collectives."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor

from tests.support.oracle import PROBLEMS, WIDTH
from tests.support.pool import Pool
from tests.support.training import Case, pipeline_of
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import make_fx
from zbcompile.profiling.pass_checks import checked
from zbcompile.program.step_record import StepRecord, read_record
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import COMPUTE, flatten
from zbcompile.schedules.ir.schedule import parse_step

CASE = Case("short-mlp", "zb-h1", 2, 4)
BOUNDARY = 2 * WIDTH * 4  # a microbatch of two rows of floats


def recorded(case: Case, trace: Path | None = None) -> tuple[StepRecord, Schedule]:
    """The record of a step after one that was not recorded."""
    pipe, batch = pipeline_of(case), PROBLEMS[case.problem].batches(1, 2 * case.microbatches)[0]
    pipe.step(*batch.args, target=batch.target)
    assert pipe.last_step is None
    pipe.record = True
    pipe.step(*batch.args, target=batch.target)
    assert pipe.last_step is not None
    if trace and pipe.is_first:
        pipe.last_step.chrome_trace(trace)
    return pipe.last_step, pipe.program.lowered


def gathered_late() -> torch.Tensor:
    """Returns what a rank gathers whose neighbour comes late, in memory that is NaN before."""
    x, slots = torch.full((4,), float(dist.get_rank())), map(Slot, ("activation",) * 2, "xy")
    module = make_fx(lambda x: (all_gather_tensor(x, 0, dist.group.WORLD) + 0.0,))(x)
    check = checked(0, PassGraph(0, "F", module, *((slot,) for slot in slots)))
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        time.sleep(0.3 * dist.get_rank())
        return check([x])[0]
    finally:
        torch.use_deterministic_algorithms(False)


def observed(trace: Path) -> tuple[StepRecord, Schedule, torch.Tensor]:
    return *recorded(CASE, trace), gathered_late()


def assert_complete(record: StepRecord, plain: Schedule) -> None:
    assert set(record.spans) == set(range(plain.ranks))
    for rank, spans in record.spans.items():
        actions = [str(action) for action in flatten(plain.orders[rank])]
        assert [span.action for span in spans] == actions
        times = [time for span in spans for time in (span.start, span.end)]
        assert times == sorted(times)
        assert times[0] >= 0
        assert record.peak_activation_bytes[rank] > 0


@pytest.mark.slow
def test_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    """Peak memory is counted by storage, so it does not depend on time or processes."""
    (first, plain, gathered), (second, _, _) = pool.run(observed, tmp_path / "step.json")
    assert gathered.tolist() == [0.0] * 4 + [1.0] * 4  # looked at once it has arrived
    assert first == second
    assert not first.in_process
    assert_complete(first, plain)
    assert first.peak_activation_bytes == recorded(CASE)[0].peak_activation_bytes
    assert first.bytes_sent == {0: 4 * BOUNDARY, 1: 4 * BOUNDARY}
    spans = [span for spans in first.spans.values() for span in spans]
    compute = [span for span in spans if parse_step(span.action)[0] in COMPUTE]
    complete = max(s.end for s in compute) - min(s.start for s in compute)
    for rank, causes in first.idle.items():
        busy = sum(s.end - s.start for s in compute if s in first.spans[rank])
        assert sum(causes.values()) == pytest.approx(complete - busy, abs=1e-6)
    assert first.idle[1]["warm-up"] > 0
    first.save(tmp_path / "record.json")
    assert read_record(tmp_path / "record.json").bytes_sent == first.bytes_sent
    ends, starts = {s.action: s.end for s in spans}, {s.action: s.start for s in spans}
    for i in range(4):  # on one clock no stage begins before what it needs has ended
        assert starts[f"F1.{i}"] > ends[f"F0.{i}"] - 0.001
        assert starts[f"B0.{i}"] > ends[f"B1.{i}"] - 0.001
    assert_trace(json.loads((tmp_path / "step.json").read_text())["traceEvents"], len(compute))


def assert_trace(events: list[dict[str, Any]], count: int) -> None:
    """Each message begins in the pass that makes it and ends in one on the other rank."""
    actions = [event for event in events if event["ph"] == "X" and event["cat"] != "idle"]
    assert len(actions) == count
    assert {event["tid"] for event in actions} == {0, 1}
    ends = [event for event in events if event["ph"] in "sf"]
    assert len(ends) == 2 * 8
    for end in ends:
        passes = [a for a in actions if a["tid"] == end["tid"]]
        around = [a["name"] for a in passes if 0 <= end["ts"] - a["ts"] <= a["dur"]]
        assert around
        assert (end["name"] in around) == (end["ph"] == "s")


def test_what_pairs_send_is_counted() -> None:
    """A pair's forward is sent in the middle of the pair."""
    record, lowered = recorded(Case("short-mlp", "dualpipe-v", 2, 8))
    for rank, program in enumerate(lowered.orders):
        sends = [str(step) for step in program if step[0] in ("SEND_F", "SEND_B")]
        assert record.bytes_sent[rank] == len(sends) * BOUNDARY
        actions = {str(action) for action in flatten(program)}
        assert {span.action for span in record.spans[rank]} == actions
