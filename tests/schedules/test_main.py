"""The command line."""

import json
from pathlib import Path

import pytest

from zbcompile.schedules import Costs, build, lower, names
from zbcompile.schedules.__main__ import main
from zbcompile.schedules.ir.files import save

Capture = pytest.CaptureFixture[str]


def test_list_names_every_schedule(capsys: Capture) -> None:
    assert main(["list"]) == 0
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    assert [line.split()[0] for line in table.splitlines()[2:]] == list(names())
    assert "interlaced" in rest


def test_show_prints_the_grid_writes_pictures_and_reads_schedules_back(
    tmp_path: Path, capsys: Capture
) -> None:
    assert main(["show", "ZB_H1", "--ranks", "2", "--microbatches", "3", "--lowered"]) == 0
    output = capsys.readouterr().out
    assert "rank 1  RECV_F1.0" in output
    assert "zb-h1, 2 ranks, 3 microbatches: makespan 10 (bubble 10.0%)" in output
    save(build("zb-v", ranks=3, microbatches=6), tmp_path / "mine.csv")
    pictures = [str(tmp_path / f"step{ending}") for ending in (".svg", ".html", ".json", ".txt")]
    flags = [flag for picture in pictures for flag in ("--picture", picture)]
    assert main(["show", str(tmp_path / "mine.csv"), *flags, "--save", f"{tmp_path}/s.json"]) == 0
    output = capsys.readouterr().out
    assert all(f"wrote {picture}" in output for picture in pictures)
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert (tmp_path / "s.json").exists()


def test_compare_runs_one_model_on_every_number_of_chunks(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "costs.json"
    file.write_text(Costs.uniform(8, forward=2, backward=3, weight=1, activation=5).to_json())
    arguments = ["1f1b", "zb-v", "interleaved-zb", "--costs", str(file), "--microbatches", "8"]
    assert main(["compare", *arguments]) == 0
    rows = {row[0]: row for row in map(str.split, capsys.readouterr().out.splitlines()[2:])}
    assert float(rows["1f1b"][1]) == (8 + 3) * 12
    assert {rows[name][6] for name in ("1f1b", "interleaved-zb")} == {"40"}
    assert main(["compare", "--ranks", "4", "--microbatches", "9"]) == 0
    assert "left out: dualpipe: 9 microbatches on 4 ranks" in capsys.readouterr().out
    assert main(["compare", "1f1b", "interlaced", "--barriers", "1"]) == 0
    one, other = (line.split() for line in capsys.readouterr().out.splitlines()[2:])
    assert (one[0], other[0]) == ("1f1b", "interlaced")
    assert float(one[6]) < float(other[6])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("show zbw", 1, "did you mean"),
        ("show dualpipe --ranks 3", 1, "even ranks"),
        ("show 1f1b --costs none.json", 1, "No such file"),
        ("show 1f1b --picture step.png", 1, "rsvg-convert step.svg -o step.png"),
        ("show 1f1b --ranks 0", 1, "at least 1"),
        ("show 1f1b --times 1,2", 2, "expected three"),
        ("draw", 2, "invalid choice"),
        ("", 2, "required"),
    ],
)
def test_errors_go_to_stderr(arguments: str, code: int, text: str, capsys: Capture) -> None:
    try:
        assert main(arguments.split()) == code == 1
    except SystemExit as error:
        assert error.code == code == 2  # noqa: PT017
    assert text in capsys.readouterr().err


def test_check_proves_files_and_names_what_is_wrong(tmp_path: Path, capsys: Capture) -> None:
    right, messages, wrong = (tmp_path / n for n in ("right.csv", "messages.json", "wrong.csv"))
    schedule = build("zb-h1", ranks=2, microbatches=3)
    save(schedule, right)
    save(lower(schedule), messages)
    assert main(["check", str(right), str(messages)]) == 0
    size = "2 ranks, 3 microbatches, linear placement, peak memory 2"
    assert capsys.readouterr().out.count(f"complete, legal and free of deadlock: {size}") == 2
    wrong.write_text(right.read_text().replace("0I0,0W0", "0W0,0I0"))
    cases = (([right, "--memory-limit", "1"], right, "memory"), ([right, wrong], wrong, "W0.0"))
    for arguments, culprit, why in cases:
        assert main(["check", *map(str, arguments)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"zbcompile.schedules: {culprit}: ")
        assert why in error
    assert main(["show", str(wrong)]) == 1
    assert "rank 0 runs W0.0 before B0.0" in capsys.readouterr().err
