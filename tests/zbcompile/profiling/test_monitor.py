"""`zbcompile.monitor`: what it shows while a run goes on, what it leaves alone, and the rank that it names."""

import time
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.training import Case, pipeline_of
from zbcompile.profiling.monitor_steps import UsualTimes
from zbcompile.runtime.stage_run import StageRun
from zbcompile.tables import to_data

CASE = Case("mlp", "zb-h1", 2, 4)
SLOW = 0.25  # seconds of a pass
Seen = tuple[list[zbcompile.Figures], list[int], list[str]]


def watched(every: int, steps: int) -> Seen:
    """The figures of a run, the steps that were recorded, and the warnings."""
    pipe, batch = pipeline_of(CASE), PROBLEMS[CASE.problem].batches(1, 8)[0]
    shown: list[zbcompile.Figures] = []
    recorded = []
    with warnings.catch_warnings(record=True) as warned, zbcompile.monitor(pipe, every, shown.append, slow=4):
        warnings.simplefilter("always")
        for _ in range(steps):
            pipe.step(*batch.args, target=batch.target)
            recorded += [pipe.step_index] if pipe.last_step is not None else []
    return shown, recorded, [str(each.message) for each in warned]


def watched_while_rank_1_slows_down() -> Seen:
    run_pass, slow = StageRun.run, dist.get_rank() == 1

    def late(run: StageRun, name: str, *given: Any) -> Any:
        if name == "F":
            time.sleep(SLOW if slow and late.steps >= 4 * 8 else 0.02)  # what a busy machine adds is less
            late.steps += 1
        return run_pass(run, name, *given)

    late.steps = 0  # type: ignore[attr-defined]
    with patch.object(StageRun, "run", late):
        return watched(every=2, steps=12)


@pytest.mark.slow
def test_the_rank_that_became_slow_is_named(pool: Pool) -> None:
    """Of two processes, one of which sleeps in its passes from the ninth step on: it is named at the second figures in
    which it is slow."""
    (shown, recorded, warned), (nothing, same, silent) = pool.run(watched_while_rank_1_slows_down)
    assert recorded == same == [2, 4, 6, 8, 10, 12]
    assert (nothing, silent) == ([], [])
    assert [figures.step for figures in shown] == recorded
    assert [sorted(figures.slow) for figures in shown] == [[], [], [], [], [], ["rank 1"]]
    assert [text.partition(":")[2].partition(":")[0] for text in warned] == [" rank 1 became slow"]
    last = shown[-1]
    assert "slowest rank 1" in str(last)
    assert last.busy["rank 1"] > 4 * SLOW > last.busy["rank 0"]
    assert last.seconds > 4 * SLOW
    assert min(last.memory.values()) > 2**20
    assert last.bubble < 0.5


def test_figures_of_ranks_in_one_process() -> None:
    shown, recorded, _ = watched(every=3, steps=7)
    assert recorded == [3, 6]
    assert [figures.step for figures in shown] == [3, 6]
    assert list(shown[0].busy) == ["rank 0", "rank 1"]
    assert list(shown[0].memory) == ["this process"]
    assert shown[0].rate == pytest.approx(8 / shown[0].seconds)
    assert 0 <= shown[0].bubble < 1
    assert str(shown[0]).startswith("step 3, time ")
    assert "samples per second" in str(shown[0])
    data = to_data(shown[0].tables())
    assert data["monitor"]["bubble"] == shown[0].bubble
    assert data["units"]["monitor"]["time"] == "s per step"
    assert [row["busy"] for row in data["ranks"]] == list(shown[0].busy.values())


def test_others_become_slow_as_well() -> None:
    """A machine that slows down, or longer batches, is no rank's fault; one slow step is not usual from then on."""
    usual = UsualTimes(1.5)
    for _ in range(3):
        assert usual.slow({"a": 1.0, "b": 2.0, "c": 2.0}) == {}
    assert usual.slow({"a": 3.0, "b": 6.0, "c": 6.0}) == {}
    assert usual.slow({"a": 3.0, "b": 2.0, "c": 2.0}) == {}
    assert usual.slow({"a": 3.0, "b": 2.0, "c": 2.0}) == usual.new == {"a": 3.0}
    assert usual.slow({"a": 3.0, "b": 2.0, "c": 2.0}) == {"a": 3.0}
    assert usual.new == {}
    assert usual.slow({"a": 1.0, "b": 2.0, "c": 2.0}) == {}


@pytest.mark.parametrize("every", [0, "10", 2.5])
def test_not_a_number_of_steps(every: Any) -> None:
    with (
        pytest.raises(zbcompile.PipelineError, match=r"ranks ask for \[.*expected one whole number"),
        zbcompile.monitor(pipeline_of(CASE), every),
    ):
        pass
