"""Pairs whose passes a backend has compiled: the halves in turn, or each on a stream of its own."""

import pytest

from tests.support.training import Case, assert_bitwise, interpreted, pipeline_of, reference, train


@pytest.mark.parametrize("name", ["dualpipe-v", "1f1b-overlap"])
def test_halves_in_turn(name: str) -> None:
    case = Case("small-tied", name, 2, 8)
    assert_bitwise(train(pipeline_of(case, backend=interpreted), case), reference(case))


@pytest.mark.parametrize("name", ["dualpipe-v", "1f1b-overlap"])
def test_halves_on_two_streams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with the CPU's streams, which are there for code like this and order nothing."""
    monkeypatch.setenv("ZBCOMPILE_PAIR_STREAMS", "1")
    case = Case("small-tied", name, 2, 8)
    pipe = pipeline_of(case, backend=interpreted)
    assert_bitwise(train(pipe, case), reference(case))
    runs = [run for plan in pipe._compiled.first().plans for run in plan.merged.values()]
    assert all("on_two_streams" in run.__qualname__ for run in runs)  # type: ignore[attr-defined]
