"""torch's own schedules, read from torch: checked, compared with ours, and ours loaded by torch's
CSV loader.

torch computes an order from a few numbers of its stages, so plain stand-ins for these are enough:
nothing is run here.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from zbcompile import schedules

RANKS, MICROBATCHES = (1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
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
    fields = {**count, "submod": None, "is_last": False}
    return [SimpleNamespace(**fields, stage_index=chunk * ranks) for chunk in range(chunks)]


def _order_of(schedule: Any, ranks: int) -> schedules.Schedule:
    """The order that torch holds, read through the text of its actions in torch's CSV files."""
    rows = [schedule.pipeline_order[rank] for rank in range(ranks)]
    text = "\n".join(",".join(str(action or "") for action in row) for row in rows)
    program = schedules.from_csv(text, name=type(schedule).__name__)
    assert isinstance(program, schedules.Schedule)
    return program


def _multi(name: str, ranks: int, microbatches: int, chunks: int) -> schedules.Schedule | None:
    """Torch's order, or None where torch refuses the counts."""
    try:
        theirs = getattr(torch_schedules, name)(_stages(ranks, chunks), microbatches)
    except ValueError:
        return None
    return _order_of(theirs, ranks)


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(("name", "chunks"), MULTI)
def test_torch_is_right_and_never_shorter_than_ours(name: str, chunks: int) -> None:
    """Accepted by `check`; at equal times and no more memory ours is as short, in cost and in
    makespan. From m = 2p on, where ours follow the published rules, they are the same orders."""
    for ranks, microbatches in ((r, m) for r in RANKS for m in {*MICROBATCHES, 3 * r}):
        theirs = _multi(name, ranks, microbatches, chunks)
        assert theirs is not None or microbatches != 3 * ranks
        if theirs is None:
            continue
        schedules.check(theirs)
        ours = schedules.build(name, ranks, microbatches, chunks=chunks)
        our, their = (
            schedules.simulate(item, schedules.Costs.uniform(ours.stages))
            for item in (ours, theirs)
        )
        assert our.cost <= their.cost
        assert our.makespan <= their.makespan
        assert max(our.peak_memory) <= max(their.peak_memory)
        if microbatches == 3 * ranks:
            assert ours.orders == theirs.orders


def _loaded(path: Path, schedule: schedules.Schedule, form: str) -> Any:
    stages: Any = _stages(schedule.ranks, schedule.placement.chunks)
    runtime = torch_schedules._PipelineScheduleRuntime(stages, schedule.microbatches)
    runtime._load_csv(str(path), format=form)  # type: ignore[arg-type]
    return runtime


# torch knows no second copy of a stage
@pytest.mark.parametrize("name", [name for name in schedules.names() if name != "dualpipe"])
def test_torch_loads_our_csv(name: str, tmp_path: Path) -> None:
    """As "compute_only": torch's validation accepts it and keeps every action in its place. As
    "compute_comms": the SEND and RECV actions are ours, and of what torch writes again we read the
    same order."""
    schedule = schedules.build(name, ranks=4, microbatches=8)
    schedules.save(schedule, tmp_path / "schedule.csv")
    runtime = _loaded(tmp_path / "schedule.csv", schedule, "compute_only")
    assert _order_of(runtime, 4).orders == schedule.orders
    ranks = {s: schedule.placement.rank(s) for s in range(schedule.stages)}
    assert runtime.stage_index_to_group_rank == ranks
    (tmp_path / "lowered.csv").write_text(schedules.to_csv(schedules.lower(schedule)))
    runtime = _loaded(tmp_path / "lowered.csv", schedule, "compute_comms")
    runtime._dump_csv(str(tmp_path / "again.csv"), format="compute_comms")
    assert schedules.from_csv((tmp_path / "again.csv").read_text(), name) == schedule
