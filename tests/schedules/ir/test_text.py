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
        ("RECV_B2.1", "2RECV_B1", Action("RECV_B", 2, 1)),
        ("(F0.3|BW3.1)", "(0F3;3B1)OVERLAP_F_B", Pair(Action("F", 0, 3), Action("BW", 3, 1))),
    ],
)
def test_both_letters_both_ways(papers: str, torch: str, step: Action | Pair) -> None:
    assert (format_step(step), format_step(step, "torch")) == (papers, torch)
    assert parse_step(papers) == parse_step(torch) == step


NONSENSE = ("X0.0", "F0", "0F", "F0.0.0", "0BW0", "I0.0", "(F0.0)", "(F0.0|BW0.0", "F-1.0", "")
ROW = build("1f1b", ranks=2, microbatches=2)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        *((lambda t=t: parse_step(t), r"is not an action such as F0\.3") for t in NONSENSE),
        (lambda: format_step(Action("S", 1, 2), "torch"), "S1.2: torch has no letter for S"),
        (lambda: to_csv(build("dualpipe", 2, 4)), "supports one copy of a stage; use dualpipe-v"),
        (lambda: from_csv("0F0,0X0\n"), "CSV row 1, cell 2: '0X0' is not an action"),
        (lambda: from_csv(""), "holds no actions; expected one row of actions per rank"),
        (lambda: from_csv("0F0\n3F0\n"), r"rank 0: 0; rank 1: 3\) match no placement"),
        (lambda: from_json("{"), "invalid JSON"),
        (lambda: from_json('{"version": 2}'), "JSON that describes no schedule: KeyError"),
        (lambda: from_json("[]"), "JSON that describes no"),
        (lambda: from_json('{"version": 3}'), "JSON version 3; this release reads version 2"),
        (lambda: save(ROW, "schedule.yaml"), r"ending '.yaml'; expected .csv or .json"),
    ],
)
def test_broken_text_is_refused(ask, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        ask()


@pytest.mark.parametrize("name", names())
def test_every_form_round_trips(name: str, tmp_path) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    for program in (schedule, lower(schedule)):
        assert from_json(to_json(program)) == program
        if name != "dualpipe":
            assert from_csv(to_csv(program), name) == schedule
        if name == "zb-v":
            for ending, expected in (("csv", schedule), ("json", program)):
                save(program, tmp_path / f"zb-v.{ending}")
                assert load(tmp_path / f"zb-v.{ending}") == expected
    for order in schedule.orders:
        assert parse_order(format_order(order)) == order


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


PLACEMENTS = (("linear", 4, 1), ("looped", 4, 2), ("looped", 3, 4), ("v", 4, 2), ("v", 3, 3))


@pytest.mark.parametrize(
    "placement", [*(Placement.named(*p) for p in PLACEMENTS), Placement.of_ranks((0, 0, 1, 1, 0))]
)
def test_placement_is_read_off_the_rows(placement: Placement) -> None:
    stages = map(placement.stages_of, range(placement.ranks))
    rows = (",".join(f"F{stage}.0" for stage in of_rank) for of_rank in stages)
    assert from_csv("\n".join(rows)).placement == placement
