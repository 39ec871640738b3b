"""A recorded step: as a file, in the simulator's terms, and next to its prediction."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.training import Case, pipeline_of
from zbcompile.inspection.idle_report import time_by_kind
from zbcompile.inspection.measured_report import COLUMNS, compare_step
from zbcompile.prediction.predict import CostSource, load_costs
from zbcompile.program.step_record import RecordedSpan, StepRecord, read_record, record_to_text
from zbcompile.schedules import Costs, build, critical_path, simulate
from zbcompile.tables import WIDTH, Figure, to_text

SCHEDULE = build("zb-h1", ranks=2, microbatches=2)
MANIFEST = {"exact": False, "cuts": ["add_3"], "graphs": ["a"]}


def simulated_record(costs: Costs, host: float = 0.0, late: float = 0.0) -> StepRecord:
    """Returns what the simulator says, as if it had been measured: `host` seconds pass before
    every pass that waits for nothing, and rank 1's clock started `late`."""
    timeline = simulate(SCHEDULE, costs)
    spans: dict[int, list[RecordedSpan]] = {0: [], 1: []}
    for rank in (0, 1):
        for index, span in enumerate(timeline.spans_of(rank)):
            shift = late + host * index
            spans[rank].append(RecordedSpan(str(span.step), span.start + shift, span.end + shift))
    return StepRecord(
        spans, {0: [10, 20], 1: [15]}, {0: 1, 1: 2}, 40.0, 5.0, False, SCHEDULE, MANIFEST
    )


def test_what_was_simulated_is_found_again() -> None:
    """Costs, timeline and causes come back from spans alone."""
    costs = Costs((2, 3), (2, 2), (1, 1), comm=0.5)
    record, timeline = simulated_record(costs, late=7.0), simulate(SCHEDULE, costs)
    found = record.costs
    assert (found.forward, found.backward, found.weight) == ((2, 3), (2, 2), (1, 1))
    assert found.comm == pytest.approx(0.5)
    assert record.timeline.finish == pytest.approx(timeline.finish)
    for rank in (0, 1):
        expected = {**timeline.idle_by_cause[rank], "overhead": 0}
        assert record.idle[rank] == pytest.approx(expected)


def test_time_in_which_nothing_was_missing_is_overhead() -> None:
    record = simulated_record(Costs((2, 2), (2, 2), (1, 1)), host=0.25)
    full = record.timeline.finish
    for rank in (0, 1):
        busy = sum(end - start for _, start, end in record.spans[rank])
        assert sum(record.idle[rank].values()) == pytest.approx(full - busy)
    later = record.spans[0][1:]  # of which forwards and weight gradients wait for nothing
    free = sum(span.action[0] in "FW" for span in later)
    assert record.idle[0]["overhead"] == pytest.approx(0.25 * free)
    path = critical_path(record.timeline)
    legs = sum(leg.end - leg.start + leg.travel + leg.overhead for leg in path)
    assert legs == pytest.approx(full)
    assert time_by_kind(path)["overhead"] > 0
    gaps = [gap for gap in record.timeline.idle if gap.cause == "overhead"]
    assert all(gap.needed is None for gap in gaps)
    assert "its inputs were ready" in str(gaps[0])


def test_the_difference_is_attributed_without_a_rest() -> None:
    costs = Costs((2, 2), (2, 2), (1, 1), comm=0.1)
    predicted = simulate(SCHEDULE, costs)
    slower = simulated_record(Costs((3, 2), (2, 4), (1, 1), comm=0.7), host=0.125)
    result = compare_step(slower, predicted, CostSource(costs, "by hand"), MANIFEST)
    ranks, passes = map(values_of, (result.ranks, result.passes))
    for row, step in zip(ranks, [result.measured, predicted] * 2, strict=True):
        parts = row["compute"] + sum(row[column] for column in COLUMNS)
        assert parts == pytest.approx(step.finish)
    assert [row["step"] for row in ranks] == ["measured", "predicted"] * 2
    assert ranks[0]["compute"] - ranks[1]["compute"] == pytest.approx(2)  # two longer forwards
    assert (ranks[0]["overhead"] > 0, ranks[1]["overhead"]) == (True, 0)
    assert [row["peak activations"] for row in ranks[::2]] == [20, 15]
    assert (passes[1]["stage"], passes[1]["B"]) == (1, pytest.approx(4))
    assert result.notes == ()
    assert max(map(len, to_text(result.tables()).splitlines())) <= WIDTH


def values_of(rows: Sequence[Sequence[Figure]]) -> list[dict[str, Any]]:
    return [{figure.name: figure.value for figure in row} for row in rows]


def test_another_program_is_said_to_be_one() -> None:
    record = simulated_record(Costs.uniform(2))
    basis, predicted = CostSource(Costs.uniform(2), ""), simulate(SCHEDULE)
    exact = compare_step(record, predicted, basis, {**MANIFEST, "exact": True})
    assert exact.notes == ("recorded from another program: exact False there, True here",)
    graphs = compare_step(record, predicted, basis, {**MANIFEST, "graphs": ["b"]})
    assert graphs.notes == ("recorded from another program: its graphs differ",)
    said = "zb-h1 on 2 ranks with 2 microbatches; here it is 1f1b"
    with pytest.raises(zbcompile.PipelineError, match=said):
        compare_step(record, simulate(build("1f1b", 2, 2)), basis, MANIFEST)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{", "F0.0", "is not a step record"),
        ('"zbcompile step"', '"a novel"', "is not a step record"),
        ('"version": 2', '"version": 9', "has format version 9"),
        ('["F1.1", ', '["F1.7", ', "the record has no F1.1 of rank 1"),
        ('"step_time"', '"time"', "damaged or incomplete"),
    ],
)
def test_a_file_that_is_no_record(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = record_to_text(simulated_record(Costs.uniform(2)))
    (file := tmp_path / "step.json").write_text(text.replace(old, new, 1))
    with pytest.raises(zbcompile.PipelineError, match=message):
        read_record(file)


@pytest.mark.slow
def test_a_record_of_one_process_is_a_file_and_a_set_of_costs(tmp_path: Path) -> None:
    """Under 1F1B backward and weight gradients were measured together; their FLOPs divide them. A
    notebook shows pictures of a schedule, its timeline and a record."""
    pipe = pipeline_of(Case("short-mlp", "1f1b", 2, 4))
    batch = PROBLEMS["short-mlp"].batches(1, 8)[0]
    pipe.record = True
    pipe.step(*batch.args, target=batch.target)
    record, file = pipe.last_step, tmp_path / "step.json"
    assert record is not None
    record.save(file)
    read = read_record(file)
    program = json.loads(json.dumps(record.program))
    assert (read.schedule, read.program) == (record.schedule, program)
    assert {rank: list(counts) for rank, counts in read.held_bytes.items()} == record.held_bytes
    for rank, spans in record.spans.items():
        assert [s.action for s in read.spans[rank]] == [s.action for s in spans]
        starts = [span.start for span in spans]
        assert [span.start for span in read.spans[rank]] == pytest.approx(starts, abs=1e-9)
    costs = load_costs(pipe.program, str(file)).costs
    for stage in (0, 1):
        together = costs.backward[stage] + costs.weight[stage]
        assert together == pytest.approx(record.costs.backward[stage], abs=1e-8)
        flops = pipe.program.stages[stage].flops
        assert costs.weight[stage] * flops["B"] == pytest.approx(costs.backward[stage] * flops["W"])
    assert costs.activation[0] == pipe.program.stages[0].crossing.kept
    program, costs = pipe.program, load_costs(pipe.program, "measured").costs
    assert min(*costs.forward, *costs.backward, *costs.weight) > 0
    assert max(costs.forward) < 10
    timeline = simulate(program.lowered, load_costs(program, "flops").costs)
    for printed in (program.schedule, program.lowered, timeline, pipe.last_step):
        assert printed._repr_html_().count("<svg") == 1
    assert "s (bubble" in timeline._repr_html_()
