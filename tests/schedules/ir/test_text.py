"""Schedules as text and files: what is written is read back, in the papers' letters and in
torch's."""

import pytest

from zbcompile.schedules import (
    Action,
    Pair,
    Placement,
    ScheduleError,
    build,
    format_order,
    format_schedule,
    format_step,
    from_csv,
    from_json,
    load,
    lower,
    names,
    parse_order,
    parse_step,
    save,
    to_csv,
    to_json,
)


@pytest.mark.parametrize(
    ("papers", "torch", "step"),
    [
        ("F0.3", "0F3", Action("F", 0, 3)),
        ("B12.3", "12I3", Action("B", 12, 3)),
        ("W1.10", "1W10", Action("W", 1, 10)),
        ("BW1.0", "1B0", Action("BW", 1, 0)),
        ("SEND_F0.3", "0SEND_F3", Action("SEND_F", 0, 3)),
        ("RECV_B2.1", "2RECV_B1", Action("RECV_B", 2, 1)),
        ("(F0.3|BW3.1)", "(0F3;3B1)OVERLAP_F_B", Pair(Action("F", 0, 3), Action("BW", 3, 1))),
    ],
)
def test_both_letters_both_ways(papers: str, torch: str, step: Action | Pair) -> None:
    assert (format_step(step), format_step(step, "torch")) == (papers, torch)
    assert parse_step(papers) == parse_step(torch) == step


def test_vocabulary_passes_have_no_torch_letter() -> None:
    assert parse_step("S1.2") == Action("S", 1, 2)
    with pytest.raises(ScheduleError, match=r"S1.2: torch has no letter for S"):
        format_step(Action("S", 1, 2), "torch")


@pytest.mark.parametrize(
    "text", ["X0.0", "F0", "0F", "F0.0.0", "0BW0", "I0.0", "(F0.0)", "(F0.0|BW0.0", "F-1.0", ""]
)
def test_nonsense_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"is not an action such as F0\.3"):
        parse_step(text)


@pytest.mark.parametrize("name", names())
def test_every_form_round_trips(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    for program in (schedule, lower(schedule)):
        assert from_json(to_json(program)) == program
        if name != "dualpipe":
            assert from_csv(to_csv(program), name) == schedule
    for order in schedule.orders:
        assert parse_order(format_order(order)) == order


def test_torch_csv_has_no_second_copy() -> None:
    with pytest.raises(
        ScheduleError, match="dualpipe: torch supports one copy of a stage; use dualpipe-v"
    ):
        to_csv(build("dualpipe", ranks=2, microbatches=4))


@pytest.mark.parametrize(
    "text",
    [
        # what torch's `_dump_csv` writes where a rank waits, and FSDP's actions between the others
        "0UNSHARD,0F0,0F1,,,0B0,0B1,0REDUCE_GRAD,0RESHARD\n,1F0,1B0,1F1,1B1\n",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1\n",
    ],
)
def test_bubbles_messages_and_parameter_actions_of_torch_are_left_out(text: str) -> None:
    orders = [format_order(order) for order in from_csv(text).orders]
    assert orders == ["F0.0 F0.1 BW0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "CSV row 1, cell 2: '0X0' is not an action"),
        ("", "holds no actions; expected one row of actions per rank"),
        ("0F0\n3F0\n", r"rank 0: 0; rank 1: 3\) match no placement"),
    ],
)
def test_broken_csv(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "invalid JSON"),
        ('{"version": 2}', "JSON that describes no schedule: KeyError"),
        ("[]", "JSON that describes no"),
        ('{"version": 3}', "JSON version 3; this release reads version 2"),
    ],
)
def test_broken_json(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_json(text)


@pytest.mark.parametrize("name", names())
def test_golden_grid(name: str, golden) -> None:
    """4 ranks, 8 microbatches, as a person would look at it."""
    schedule = build(name, ranks=4, microbatches=8)
    grid = format_schedule(schedule, width=120)
    golden(f"schedules/{name}.txt", grid + "\n")


def test_grid_fits_the_terminal() -> None:
    grid = format_schedule(build("zb-v", ranks=4, microbatches=8), width=80)
    assert max(map(len, grid.splitlines())) <= 80
    assert grid.splitlines()[1].startswith("rank 0  F0.0  F0.1")


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_files_round_trip(tmp_path, ending: str) -> None:
    schedule = build("zb-v", ranks=4, microbatches=8)
    path = tmp_path / f"zb-v.{ending}"
    for program in (schedule, lower(schedule)):
        save(program, path)
        assert load(path) == (program if ending == "json" else schedule)


def test_unknown_ending(tmp_path) -> None:
    with pytest.raises(ScheduleError, match=r"ending '.yaml'; expected .csv or .json"):
        save(build("1f1b", ranks=2, microbatches=2), tmp_path / "schedule.yaml")


@pytest.mark.parametrize(
    "placement",
    [
        Placement.named("linear", 4),
        Placement.named("looped", 4, 2),
        Placement.named("looped", 3, 4),
        Placement.named("v", 4, 2),
        Placement.named("v", 2, 4),
        Placement.named("v", 3, 3),
        Placement.of_ranks((0, 0, 1, 1, 0)),
    ],
)
def test_placement_is_read_off_the_rows(placement: Placement) -> None:
    stages = map(placement.stages_of, range(placement.ranks))
    rows = (",".join(f"F{stage}.0" for stage in of_rank) for of_rank in stages)
    assert from_csv("\n".join(rows)).placement == placement
