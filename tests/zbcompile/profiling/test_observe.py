"""What a user can see of a running pipeline: labels in the profiler, records, traces, and the
source of a NaN."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zbcompile
from tests.support.oracle import PROBLEMS, WIDTH
from tests.support.pool import Pool
from tests.support.training import Case, pipeline_of
from zbcompile.profiling.observation import offset_to_first
from zbcompile.program.step_record import StepRecord, read_record
from zbcompile.schedules.ir.actions import COMMUNICATION, COMPUTE, flatten
from zbcompile.schedules.ir.schedule import format_step, parse_step

CASE = Case("mlp", "zb-h1", 2, 4)


def profiled() -> set[str]:
    pipe = pipeline_of(CASE)
    batch = PROBLEMS[CASE.problem].batches(1, 8)[0]
    pipe.step(*batch.args, target=batch.target)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        pipe.step(*batch.args, target=batch.target)
    return {event.key for event in seen.key_averages() if event.key.startswith("PP:")}


def test_profiler_labels_are_those_of_torch() -> None:
    program = pipeline_of(CASE)._compiled.schedule
    target_value = {
        f"PP:{format_step(step, 'torch')}" for order in program.orders for step in flatten(order)
    }
    result = profiled()
    assert target_value <= result
    assert {"PP:0F3", "PP:1I2", "PP:0W0"} <= result
    rest = {parse_step(label.removeprefix("PP:"))[0] for label in result - target_value}
    assert rest <= COMMUNICATION


def observed(folder: str) -> tuple[StepRecord, float]:
    pipe = pipeline_of(CASE)
    batch = PROBLEMS[CASE.problem].batches(1, 8)[0]
    pipe.step(*batch.args, target=batch.target)
    pipe.record = True
    pipe.step(*batch.args, target=batch.target)
    assert pipe.last_step is not None
    if pipe.is_first:
        pipe.last_step.chrome_trace(f"{folder}/step.json")
    return pipe.last_step, offset_to_first(dist.group.WORLD, torch.device("cpu"))


def test_record_and_trace_of_two_processes(pool: Pool, tmp_path: Path) -> None:
    (first, _), (second, ahead) = pool.run(observed, str(tmp_path))
    assert first == second
    assert abs(ahead) < 0.01  # both processes read the clock of one machine
    boundary = 2 * WIDTH * 4  # a microbatch of two rows of floats
    assert first.bytes_sent == {0: 4 * boundary, 1: 4 * boundary}
    passes = {
        rank: [s for s in spans if parse_step(s.action)[0] in COMPUTE]
        for rank, spans in first.spans.items()
    }
    compute = [s for spans in passes.values() for s in spans]
    for rank, causes in first.idle.items():
        busy = sum(s.end - s.start for s in passes[rank])
        complete = max(s.end for s in compute) - min(s.start for s in compute)
        assert sum(causes.values()) == pytest.approx(complete - busy, abs=1e-6)
    assert first.idle[1]["warm-up"] > 0
    first.save(tmp_path / "record.json")
    assert read_record(tmp_path / "record.json").bytes_sent == first.bytes_sent
    assert_ordered(first)
    assert_trace(json.loads((tmp_path / "step.json").read_text())["traceEvents"], first)


def assert_ordered(record: StepRecord) -> None:
    """On one clock no stage begins before what it needs has ended."""
    ends = {s.action: s.end for spans in record.spans.values() for s in spans}
    starts = {s.action: s.start for spans in record.spans.values() for s in spans}
    for i in range(4):
        assert starts[f"F1.{i}"] > ends[f"F0.{i}"] - 0.001
        assert starts[f"B0.{i}"] > ends[f"B1.{i}"] - 0.001


def assert_trace(events: list[dict[str, Any]], record: StepRecord) -> None:
    actions = [event for event in events if event["ph"] == "X" and event["cat"] != "idle"]
    assert len(actions) == sum(
        parse_step(s.action)[0] in COMPUTE for spans in record.spans.values() for s in spans
    )
    assert {event["tid"] for event in actions} == {0, 1}
    assert all(e["ts"] >= 0 for e in actions)
    assert_bound([event for event in events if event["ph"] in "sf"], actions)


def assert_bound(ends: list[dict[str, Any]], actions: list[dict[str, Any]]) -> None:
    """Each message begins in the pass that makes it and ends in one on the other rank."""
    assert len(ends) == 2 * 8
    for end in ends:
        around = [
            a["name"]
            for a in actions
            if a["tid"] == end["tid"] and a["ts"] <= end["ts"] <= a["ts"] + a["dur"]
        ]
        assert (end["name"] in around) == (end["ph"] == "s")
        assert around


class Masked(nn.Module):
    """A mask of -inf, which is meant, and a division that goes wrong for a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().sum(1, keepdim=True)
        for layer in self.layers:
            x = layer(x)
        x = F.softmax(x.masked_fill(x < 0, float("-inf")), 1)
        return x / size


@pytest.mark.slow
def test_the_source_of_a_nan() -> None:
    pipe = zbcompile.pipeline(
        Masked(), schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss, debug_nan=True
    )
    x = torch.linspace(0.1, 1, 8 * WIDTH).view(8, WIDTH)
    pipe.step(x, target=x)
    bad = x.clone()
    bad[5] = 0
    message = (
        r"rank 1 failed at F1\.2 of step 1: FloatingPointError: a NaN first appears in F of stage"
        r" 1, in aten.div"
    )
    with pytest.raises(zbcompile.FaultError, match=message) as caught:
        pipe.step(bad, target=x)
    assert "test_observe.py" in str(caught.value)
    assert "return x / size" in str(caught.value)
    message = (
        r"rank 1 failed at F1\.2 of eval: FloatingPointError: a NaN first appears in F of stage 1,"
        r" in aten.div"
    )
    with pytest.raises(zbcompile.FaultError, match=message):
        pipe.eval(bad)


def test_a_nan_that_was_there_before() -> None:
    """In the batch or in a parameter no operation makes it."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss, debug_nan=True
    )
    x = torch.ones(8, WIDTH)
    pipe.step(x, target=x)
    bad = x.clone()
    bad[4, 3] = torch.nan
    for call, action in (
        (lambda: pipe.step(bad, target=x), r"F0\.2 of step 1"),
        (lambda: pipe.eval(bad), r"F0\.2 of eval"),
    ):
        with pytest.raises(
            zbcompile.FaultError,
            match=rf"{action}: .*F of stage 0 receives a NaN in batch args\[0\]",
        ):
            call()
    with pytest.raises(zbcompile.FaultError, match=r"F of stage 1 receives a NaN in batch target"):
        pipe.step(x, target=bad)
    with torch.no_grad():
        model[3].bias[0] = torch.nan  # type: ignore[index]
    with pytest.raises(
        zbcompile.FaultError, match=r"F of stage 1 receives a NaN in parameter 3\.bias"
    ):
        pipe.step(x, target=x)


def test_the_pass_that_makes_a_nan() -> None:
    pipe = pipeline_of(Case("mlp", "1f1b", 2, 2), debug_nan=True)
    nan = torch.full((4, WIDTH), torch.nan)
    with pytest.raises(
        zbcompile.FaultError,
        match=r"FloatingPointError: a NaN first appears in BW of stage 1, in aten\.mm",
    ):
        pipe.step(torch.ones(4, WIDTH) * 1e30, target=nan.nan_to_num(torch.inf))
