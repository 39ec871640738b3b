"""The command line, run as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zbcompile.schedules import Costs, build, lower, names
from zbcompile.schedules.__main__ import main
from zbcompile.schedules.ir.files import save


def command(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "zbcompile.schedules", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_list_names_every_schedule() -> None:
    code, output, _ = command("list")
    assert code == 0
    assert [line.split()[0] for line in output.partition("\n\n")[0].splitlines()[2:]] == list(
        names()
    )
    assert "interlaced" in output


def test_show_prints_the_grid_the_figures_and_every_rank() -> None:
    code, output, _ = command("show", "ZB_H1", "--ranks", "2", "--microbatches", "3", "--lowered")
    assert code == 0
    assert "rank 1  RECV_F1.0" in output
    assert "zb-h1, 2 ranks, 3 microbatches: makespan 10 (bubble 10.0%)" in output
    assert "receive buffers" in output


def test_compare_sorts_and_says_what_it_leaves_out() -> None:
    code, output, _ = command("compare", "--ranks", "4", "--microbatches", "9", "--sort", "cost")
    assert code == 0
    rows = [line.split() for line in output.splitlines()[2:] if not line.startswith("left out")]
    costs = [float(row[3]) for row in rows]
    assert costs == sorted(costs)
    assert "left out: dualpipe: 9 microbatches on 4 ranks" in output


def test_compare_runs_one_model_on_every_number_of_chunks(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(Costs.uniform(8, forward=2, backward=3, weight=1, activation=5).to_json())
    code, output, _ = command(
        "compare", "1f1b", "zb-v", "interleaved-zb", "--costs", str(file), "--microbatches", "8"
    )
    assert code == 0
    rows = {row[0]: row for row in (line.split() for line in output.splitlines()[2:])}
    assert float(rows["1f1b"][1]) == (8 + 3) * 12
    assert {rows[name][6] for name in ("1f1b", "interleaved-zb")} == {"40"}


def test_show_writes_pictures_and_reads_schedules_back(tmp_path: Path) -> None:
    save(build("zb-v", ranks=3, microbatches=6), tmp_path / "mine.csv")
    pictures = [str(tmp_path / f"step{ending}") for ending in (".svg", ".html", ".json", ".txt")]
    flags = [flag for picture in pictures for flag in ("--picture", picture)]
    code, output, error = command(
        "show", str(tmp_path / "mine.csv"), "--time", *flags, "--save", str(tmp_path / "s.json")
    )
    assert code == 0, error
    assert all(f"wrote {picture}" in output for picture in pictures)
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert (tmp_path / "s.json").exists()


@pytest.mark.slow
def test_errors_go_to_stderr_with_their_exit_code(tmp_path: Path) -> None:
    for arguments, code, text in (
        (("show", "zbw"), 1, "did you mean"),
        (("show", "dualpipe", "--ranks", "3"), 1, "even ranks"),
        (("show", "1f1b", "--costs", str(tmp_path / "none.json")), 1, "No such file"),
        (("show", "1f1b", "--picture", "step.png"), 1, "rsvg-convert step.svg -o step.png"),
        (("show", "1f1b", "--ranks", "0"), 2, "at least 1"),
        (("show", "1f1b", "--times", "1,2"), 2, "expected three"),
        (("draw",), 2, "invalid choice"),
        ((), 2, "required"),
    ):
        got, output, error = command(*arguments)
        assert (got, text in error) == (code, True), (arguments, error)
        assert output == "" or "picture" in str(arguments)


def test_the_interlaced_pipeline_is_compared_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "1f1b", "interlaced", "--barriers", "1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1f1b", "interlaced"]
    assert float(rows[0][6]) < float(rows[1][6])


def test_show_says_what_is_wrong_with_an_order_and_how_weights_accumulate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0I0,0W0\n1F0,1W0,1I0\n")
    assert main(["show", str(tmp_path / "bad.csv")]) == 1
    error = capsys.readouterr().err
    assert "rank 1 runs W1.0 before B1.0" in error
    assert "deadlock" not in error
    assert main(["show", "zb-h1-lazy", "--weight-order"]) == 0
    assert "    3  3 4 5 6 0 1 2 7\n" in capsys.readouterr().out


def test_check_proves_files_and_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, messages, wrong = (
        tmp_path / name for name in ("right.csv", "messages.json", "wrong.csv")
    )
    schedule = build("zb-h1", ranks=2, microbatches=3)
    save(schedule, right)
    save(lower(schedule), messages)
    assert main(["check", str(right), str(messages)]) == 0
    text = (
        "complete, legal and free of deadlock: 2 ranks, 3 microbatches, linear placement, peak"
        " memory 2, at most 2"
    )
    assert capsys.readouterr().out.count(text) == 2
    wrong.write_text(right.read_text().replace("0I0,0W0", "0W0,0I0"))
    for arguments, why in (([right, "--memory-limit", "1"], "memory"), ([right, wrong], "W0.0")):
        assert main(["check", *map(str, arguments)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {arguments[-1] if arguments[-1] == wrong else right}: ")
        assert why in error


def test_help_has_examples() -> None:
    code, output, _ = command("--help")
    assert code == 0
    assert "python -m zbcompile.schedules compare" in output


def test_the_command_imports_neither_torch_nor_sympy() -> None:
    program = (
        "import sys; from zbcompile.schedules.__main__ import main; code = main(['compare', '1f1b',"
        " 'zb-v']);heavy = {'torch', 'sympy'} & set(sys.modules); sys.exit(str(heavy) if heavy else"
        " code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
