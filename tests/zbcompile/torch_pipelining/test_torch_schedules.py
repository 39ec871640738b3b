"""torch's own schedules, read from torch: checked, compared with ours, and ours loaded by torch's
CSV loader.

torch computes an order from a few numbers of its stages, so plain stand-ins for these are enough:
nothing is run here.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from zbcompile.schedules import (
    Costs,
    Schedule,
    ScheduleError,
    build,
    check,
    from_csv,
    lower,
    names,
    save,
    simulate,
    to_csv,
)

RANKS = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
MULTI = (  # class, stages per rank
    ("ScheduleInterleaved1F1B", 2),
    ("ScheduleInterleavedZeroBubble", 1),
    ("ScheduleInterleavedZeroBubble", 2),
    ("ScheduleInterleavedZeroBubble", 4),
    ("ScheduleZBVZeroBubble", 2),
    ("ScheduleDualPipeV", 2),
)


def _stages(ranks: int, chunks: int) -> list[SimpleNamespace]:
    """Returns what the constructors of torch's schedules read of the stages of rank 0."""
    count = {"num_stages": ranks * chunks, "group_size": ranks, "group_rank": 0}
    return [
        SimpleNamespace(**count, submod=None, stage_index=chunk * ranks, is_last=False)
        for chunk in range(chunks)
    ]


def _order_of(schedule, ranks: int) -> Schedule:
    """The order that torch holds, read through the text of its actions as it stands in torch's CSV
    files."""
    rows = [schedule.pipeline_order[rank] for rank in range(ranks)]
    text = "\n".join(
        ",".join("" if action is None else str(action) for action in row) for row in rows
    )
    program = from_csv(text, name=type(schedule).__name__)
    assert isinstance(program, Schedule)
    return program


def _multi(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule | None:
    """Torch's order, or None where torch refuses the counts."""
    try:
        theirs = getattr(torch_schedules, name)(_stages(ranks, chunks), microbatches)
    except ValueError:
        return None
    return _order_of(theirs, ranks)


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize(("name", "chunks"), MULTI)
def test_torch_is_right_and_never_shorter_than_ours(name: str, chunks: int) -> None:
    """Accepted by `check`; at equal times and no more memory ours is as short, in cost and in
    makespan."""
    compared = 0
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            theirs = _multi(name, ranks, microbatches, chunks)
            if theirs is None:
                continue
            check(theirs)
            ours = build(name, ranks, microbatches, chunks=chunks)
            _assert_no_longer(ours, theirs)
            compared += 1
    assert compared >= 15


def _assert_no_longer(ours: Schedule, theirs: Schedule) -> None:
    costs = Costs.uniform(ours.stages)
    our, their = simulate(ours, costs), simulate(theirs, costs)
    assert our.cost <= their.cost
    assert our.makespan <= their.makespan
    assert max(our.peak_memory) <= max(their.peak_memory)


@pytest.mark.parametrize(("name", "chunks"), MULTI)
def test_same_rule_same_order(name: str, chunks: int) -> None:
    """From m = 2p on, where ours follow the published rules, they are torch's orders action by
    action."""
    for ranks in RANKS:
        theirs = _multi(name, ranks, 3 * ranks, chunks)
        assert theirs is not None
        assert build(name, ranks, 3 * ranks, chunks=chunks).orders == theirs.orders


# Stages per rank, microbatches and ranks: of torch's own list those that the tables above do not
# reach.
PLANS = ((4, 16, 16), (4, 32, 32), (3, 2, 2), (3, 8, 2), (3, 12, 4), (4, 6, 3), (4, 10, 5))


@pytest.mark.parametrize(
    "name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS"]
)
def test_plans_of_torchs_own_tests(name: str) -> None:
    """torch's looped BFS runs its backwards from the last microbatch on, which takes as long."""
    for chunks, microbatches, ranks in PLANS:
        theirs = _multi(name, ranks, microbatches, chunks)
        assert theirs is not None
        ours = build(name, ranks, microbatches, chunks=chunks)
        check(ours)
        if name != "ScheduleLoopedBFS":
            assert ours.orders == theirs.orders
            continue
        check(theirs, weight_order="any")
        _assert_no_longer(ours, theirs)
        with pytest.raises(
            ScheduleError,
            match=r"weight gradients of stage \d+ run microbatch .* expected ascending",
        ):
            check(theirs)


LOADABLE = [name for name in names() if name != "dualpipe"]  # torch knows no second copy of a stage


def _loaded(path: Path, schedule: Schedule, form: str):
    stages = _stages(schedule.ranks, schedule.placement.chunks)
    runtime = torch_schedules._PipelineScheduleRuntime(stages, schedule.microbatches)
    runtime._load_csv(str(path), format=form)  # pyright: ignore[reportArgumentType]
    return runtime


@pytest.mark.parametrize("name", LOADABLE)
def test_torch_loads_our_csv(name: str, tmp_path: Path) -> None:
    """As "compute_only": torch's validation accepts it and keeps every action in its place."""
    schedule = build(name, ranks=4, microbatches=8)
    save(schedule, tmp_path / "schedule.csv")
    runtime = _loaded(tmp_path / "schedule.csv", schedule, "compute_only")
    assert _order_of(runtime, 4).orders == schedule.orders
    assert runtime.stage_index_to_group_rank == {
        s: schedule.placement.rank(s) for s in range(schedule.stages)
    }


@pytest.mark.parametrize("name", LOADABLE)
def test_torch_loads_our_lowered_csv(name: str, tmp_path: Path) -> None:
    """As "compute_comms": the SEND and RECV actions are ours, and of what torch writes again we
    read the same order."""
    schedule = build(name, ranks=4, microbatches=8)
    lowered = lower(schedule)
    (tmp_path / "lowered.csv").write_text(to_csv(lowered))
    runtime = _loaded(tmp_path / "lowered.csv", schedule, "compute_comms")
    runtime._dump_csv(str(tmp_path / "again.csv"), format="compute_comms")
    assert from_csv((tmp_path / "again.csv").read_text(), name) == schedule
