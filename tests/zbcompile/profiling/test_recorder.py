"""The record of a step: every action of every rank once, in order, with times that fit, on every
rank."""

import pytest

from tests.support.oracle import PROBLEMS, WIDTH
from tests.support.pool import Pool
from tests.support.training import Case, pipeline_of
from zbcompile.program.step_record import StepRecord
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import flatten


def recorded(case: Case) -> tuple[StepRecord | None, StepRecord | None, Schedule]:
    """The records of a step that was not and of one that was recorded."""
    pipe = pipeline_of(case)
    batch = PROBLEMS[case.problem].batches(1, 2 * case.microbatches)[0]
    pipe.step(*batch.args, target=batch.target)
    before = pipe.last_step
    pipe.record = True
    pipe.step(*batch.args, target=batch.target)
    return before, pipe.last_step, pipe.program.lowered


def assert_complete(record: StepRecord | None, plain: Schedule) -> None:
    assert record is not None
    assert set(record.spans) == set(range(plain.ranks))
    for rank, spans in record.spans.items():
        assert [span.action for span in spans] == [
            str(action) for action in flatten(plain.orders[rank])
        ]
        times = [time for span in spans for time in (span.start, span.end)]
        assert times == sorted(times)
        assert times[0] >= 0
        assert record.peak_activation_bytes[rank] > 0


CASE = Case("mlp", "zb-v", 2, 4)


def test_on_every_rank(pool: Pool) -> None:
    result = pool.run(recorded, CASE)
    for before, record, lowered in result:
        assert before is None
        assert_complete(record, lowered)
    assert result[0][1].spans == result[1][1].spans
    assert not result[0][1].in_process


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_peak_memory_is_the_same_in_processes(schedule: str, pool: Pool) -> None:
    """Counted by storage, so the number does not depend on time."""
    case = Case("mlp", schedule, 2, 6)
    record = recorded(case)[1]
    assert record is not None
    for _, second, _ in pool.run(recorded, case):
        assert second.peak_activation_bytes == record.peak_activation_bytes


def test_what_pairs_send_is_counted() -> None:
    """A pair's forward is sent in the middle of the pair."""
    record, lowered = recorded(Case("mlp", "dualpipe-v", 2, 8))[1:]
    assert record is not None
    boundary = 2 * WIDTH * 4  # a microbatch of two rows of floats
    for rank, program in enumerate(lowered.orders):
        sends = [str(step) for step in program if step[0] in ("SEND_F", "SEND_B")]
        assert record.bytes_sent[rank] == len(sends) * boundary
        actions = set(map(str, flatten(program)))
        assert {span.action for span in record.spans[rank]} == actions
        assert set(sends) <= {span.action for span in record.spans[rank]}
