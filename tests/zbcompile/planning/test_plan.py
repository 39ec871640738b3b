"""`python -m zbcompile.plan`: the table of all ways to divide ranks."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from tests.support.error_lines import error_lines
from tests.support.oracle import PROBLEMS
from zbcompile import Example, Hardware
from zbcompile.cli.calibrate_command import to_toml
from zbcompile.cli.target import load_object
from zbcompile.compiler.compile_example import compile_example, one_microbatch
from zbcompile.compiler.compile_model import lay_out_step
from zbcompile.inspection.inspect_command import main as inspect_main
from zbcompile.inspection.plan_command import main, plan_table
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.machine.hardware import Connection
from zbcompile.planning.factorisations import CapturedStep, PlanQuestion, PlanRow, factorisations, on_mesh, ranked
from zbcompile.prediction.predict import predicted_costs
from zbcompile.program.choice import Choice, Layout
from zbcompile.schedules import build, save, simulate
from zbcompile.tables import to_text

TARGET, TARGETS = "examples/targets.py:gpt", "tests.support.mesh_targets"


@pytest.mark.slow
def test_table_picture_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    asked = (
        "--ranks",
        "2",
        "--global-batch",
        "16",
        "--search-seconds",
        "1",
        "--balance",
        "flops",
        "--boundary-bytes",
        "1MB",
        "--svg",
        str(picture),
        "--rows",
        "1",
    )
    assert main([TARGET, *asked]) == 0
    shown = capsys.readouterr().out
    table = [line.split() for line in shown.splitlines() if line.startswith("*")]
    rates, peaks = [float(line[-4].replace(",", "")) for line in table], [float(line[-2]) for line in table]
    assert {tuple(line[1:4]) for line in table} <= {("1", "1", "2"), ("2", "1", "1")}
    assert rates == sorted(rates, reverse=True)
    assert peaks == sorted(peaks, reverse=True)
    divided = {tuple(re.findall(r"\d+", line)[:3]) for line in shown.splitlines()}
    assert {("1", "1", "2"), ("2", "1", "1")} <= divided
    assert re.search(f"zbcompile.compile {TARGET} --ranks . --schedule auto.* --balance flops --boundary-bytes", shown)
    laid_out = ElementTree.parse(picture)
    assert len(laid_out.findall(".//{*}circle")) >= len(table)
    texts = [each.text or "" for each in laid_out.findall(".//{*}text")]
    assert all(any(text.startswith(f"{number}  ") for text in texts) for number in range(1, len(table) + 1))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((), "--ranks is missing"),
        (("--ranks", "2", "--memory", "1kB"), "no plan for 2 ranks: pp=1: .* rank 0 .* more than memory=1000"),
        (("--ranks", "2", "--global-batch", "7"), "a batch of 7 rows is not"),
    ],
)
def test_what_cannot_be_planned(asked: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TARGET, *asked]) == 2
    (line,) = error_lines(capsys)
    assert re.search(says, line)


def test_what_a_plan_does_not_depend_on_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([TARGET, "--ranks", "2", "--loss-reduction=sum"])
    assert "unrecognized arguments: --loss-reduction=sum" in capsys.readouterr().err


def test_a_file_is_no_schedule_of_all_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(build("1f1b", 2, 4), tmp_path / "mine.csv")
    assert main([TARGET, "--ranks", "2", "--schedule", str(tmp_path / "mine.csv")]) == 2
    assert "--schedule: expected a name" in capsys.readouterr().err


def rows_of(capsys: pytest.CaptureFixture[str], *asked: str) -> list[dict[str, Any]]:
    assert main([*asked, "--json"]) == 0
    return list(json.loads(capsys.readouterr().out)["plan"])


@pytest.mark.slow
def test_a_named_schedule_with_microbatches_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row has them, at what its graphs are predicted to take; fused kernels take less."""
    asked = TARGET, "--ranks", "2", "--mesh", "dp,pp", "--fake", "--schedule", "1f1b", "--microbatches", "4"
    rows = rows_of(capsys, *asked)
    assert {(row["pp"], row["placement"], row["m"]) for row in rows} == {(1, "linear", 4), (2, "linear", 4)}
    example, hardware = load_object(TARGET)(), Hardware.find("h100-sxm")
    program = compile_example(example, build("1f1b", 2, 4), Choices(hardware=hardware)).program
    expected = simulate(program.schedule, predicted_costs(program)).makespan
    assert [row["step"] for row in rows if row["pp"] == 2] == pytest.approx([expected], rel=1e-9)
    fused = rows_of(capsys, *asked, "--fused")
    assert all(0 < one["step"] < other["step"] for one, other in zip(fused, rows, strict=True))


@pytest.mark.slow
def test_rows_say_how_far_measured_times_spread(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(to_toml(replace(Hardware.find("cpu-core"), spread=0.04)))
    asked = TARGET, "--ranks", "2", "--mesh", "pp", "--schedule", "1f1b", "--hardware", str(tmp_path / "mine.toml")
    rows = rows_of(capsys, *asked)
    assert [row["+-"] for row in rows] == [pytest.approx(0.04 * row["step"]) for row in rows]
    assert inspect_main([TARGET, "--ranks", "2", "--hardware", asked[-1], "--quick", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["prediction"]
    assert step["+-"] == pytest.approx(0.04 * step["step"])
    assert "(+- 4.0%)" in step["predicted"]


@pytest.mark.slow
def test_microbatches_that_are_given_share_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Half as many, each with twice the rows, take as much memory for twice as many."""
    asked = TARGET, "--ranks", "2", "--mesh", "pp", "--fake", "--schedule", "zb-h1", "--global-batch", "16"
    (four,), (two,) = (rows_of(capsys, *asked, "--microbatches", count) for count in "42")
    assert (four["m"], two["m"]) == (4, 2)
    assert two["peak memory"] > 1.2 * four["peak memory"]
    assert main([*asked, "--microbatches", "3"]) == 2
    assert "a batch of 16 rows is not 1 x a multiple of 3 microbatches" in capsys.readouterr().err


@pytest.mark.slow
def test_a_named_schedule_that_does_not_fit_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--ranks", "2", "--mesh", "pp", "--fake", "--schedule", "gpipe", "--microbatches", "64", "--memory", "3MB"
    assert main([TARGET, *asked]) == 2
    assert re.search(r"gpipe: [\d,]+ bytes wait between passes on rank 0, [\d,]+ more", capsys.readouterr().err)


def test_dimensions_of_the_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--ranks", "2", "--global-batch", "16", "--search-seconds", "1"
    assert main([TARGET, *asked, "--mesh", "dp,tp"]) == 0
    shown = capsys.readouterr().out
    assert {tuple(line.split()[1:4]) for line in shown.splitlines() if line.startswith("*")} == {("2", "1", "1")}
    assert "takes no argument mesh, and GPT brings no tensor-parallel plan" in " ".join(shown.split())
    assert shown.rstrip().endswith("# then torchrun --nproc-per-node 2 -m zbcompile.run program --replicas 2")
    with pytest.raises(SystemExit):
        main([TARGET, *asked, "--mesh", "dp,cp"])
    assert "'dp,cp'; expected some of dp,tp,pp" in capsys.readouterr().err


@pytest.mark.slow
def test_an_embedding_and_a_head_without_values_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--ranks", "2", "--search-seconds", "1", "--fake", "--mesh", "tp"
    assert main(["examples/targets.py:byte_llama", *asked]) == 0
    assert re.findall(r"(\d) (\d) (\d) linear", " ".join(capsys.readouterr().out.split()))[0] == ("1", "2", "1")


@pytest.mark.slow
def test_ranks_that_share_every_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows for two ranks, which hold half of the weights; why four cannot; a command line with the mesh."""
    asked = "--ranks", "4", "--global-batch", "8", "--search-seconds", "9", "--fake", "--mesh", "dp,tp"
    assert main([f"{TARGETS}:layers", *asked]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert {("4", "1", "1"), ("2", "2", "1")} <= set(re.findall(r"(\d) (\d) (\d) linear", shown))
    assert f"tp=4: calling {TARGETS}:layers with a mesh failed: ValueError: at most 2 ranks" in shown


@pytest.mark.slow
def test_the_command_states_the_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    """What one rank cannot hold, two can."""
    asked = "--ranks", "2", "--memory", "220kB", "--search-seconds", "1", "--fake", "--mesh", "dp,tp"
    assert main([f"{TARGETS}:layers", *asked]) == 0
    shown = capsys.readouterr().out.splitlines()[-1]
    assert re.search(rf"torchrun --nproc-per-node 2 -m zbcompile.run {TARGETS}:layers --replicas 1 --tensor 2 ", shown)
    assert shown.endswith("# a mesh with dp=1, tp=2, pp=1")


@pytest.mark.parametrize(
    ("target", "asked", "says"),
    [
        ("whole", ("--fake",), "tp=2: .* returns as many parameters with a mesh as without"),
        ("layers", ("--channels", "tp=1e-5:10GB"), "tp>1: --channels counts for compiled steps"),
        ("layers", ("--balance", "measured"), "tp>1: --balance measured runs the operations"),
    ],
)
def test_why_no_ranks_share_matrices(
    target: str, asked: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{TARGETS}:{target}", "--ranks", "2", "--search-seconds", "1", "--mesh", "dp,tp", *asked]) == 0
    assert re.search(says, " ".join(capsys.readouterr().out.split()))


@pytest.mark.slow
def test_exchanges_of_ranks_that_share_every_matrix_hide_behind_weight_gradients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As they do in a run with pairs; every exchange still takes its time if nothing hides it."""
    flags = "--ranks 4 --mesh tp,pp --fake --schedule zb-h1 --microbatches 8"
    asked = f"{TARGETS}:layers", *flags.split()
    steps = {
        pairs: {(row["tp"], row["pp"]): row["step"] for row in rows_of(capsys, *asked, "--pairs", pairs)}
        for pairs in ("auto", "given")
    }
    assert steps["auto"].keys() == steps["given"].keys() == {(1, 4), (2, 2)}
    assert steps["auto"][1, 4] == steps["given"][1, 4]
    assert steps["auto"][2, 2] < 0.99 * steps["given"][2, 2]


def test_links_of_ranks_that_share_every_matrix() -> None:
    """Within a node of 8, and beyond it."""
    hardware = Hardware.find("h100-sxm")
    for tensor, exchange, message in (
        (1, None, hardware.within),
        (4, hardware.within, hardware.within),
        (8, hardware.within, hardware.between),
        (16, hardware.between, hardware.between),
    ):
        found = on_mesh(Choices(hardware=hardware), tensor).hardware
        assert found is not None
        assert (found.exchange, found.within) == (exchange, message)


def test_collectives_have_latency_and_links_of_their_own() -> None:
    """Not those of messages, whose latency was fitted with the synchronisation around them, and which take one link."""
    fitted, paired = Hardware.find("a100-80g"), Hardware.find("mi300x")
    assert fitted.between is not None
    assert paired.within is not None
    for tensor, expected in ((8, fitted.exchange), (16, Connection(2e-5, fitted.between.bandwidth))):
        found = on_mesh(Choices(hardware=fitted), tensor).hardware
        assert found is not None
        assert found.exchange == expected
    assert fitted.collective(64, apart=8) == Connection(2e-5, fitted.between.bandwidth)
    assert [paired.collective(n) for n in (2, 4, 8)] == [
        Connection(paired.within.latency, links * paired.within.bandwidth) for links in (1, 3, 7)
    ]
    assert paired.collective(2, apart=8) == paired.between
    assert paired.exchange_seconds(1e9, "all_reduce") == pytest.approx(2e-5 + 2e9 / 3.36e11)


def row(seconds: float, peak: float, ranks: int = 1) -> PlanRow:
    order = build("1f1b", 1, 4)
    return PlanRow(
        Choice(Layout("linear", ranks, 4), order, "1f1b", seconds, seconds, (0.0,), (peak,), 0.0, "costs"), 1
    )


def test_rows_that_nobody_means_are_left_out() -> None:
    """Though one is the fastest of its division."""
    rows = ranked([row(1, 5), row(2, 3, 2), row(3.5, 1, 4), row(9, 1, 8)])
    few, every = (" ".join(to_text([plan_table(rows, 12, every=each)]).split()) for each in (False, True))
    assert few.endswith("2 rows take more than 3 times as long as the fastest and are left out; --all shows every row.")
    assert [text.count(" linear ") for text in (few, every)] == [2, 4]
    assert "left out" not in every


def test_what_is_slow_for_nothing_is_no_best_row() -> None:
    """Memory decides between times that differ by rounding."""
    rows = [row(3, 3), row(2 - 1e-15, 4), row(2, 3), row(1, 5), row(9, 1)]
    assert [(round(r.seconds, 9), r.peak, r.best) for r in ranked(rows)] == [
        (1, 5, True),
        (2, 3, True),
        (2, 4, False),
        (3, 3, False),
        (9, 1, False),
    ]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("name", ["h100-sxm", "a100-80g"])
def test_replicas_sum_their_gradients(name: str) -> None:
    problem, hardware = PROBLEMS["gpt"], Hardware.find(name)
    (batch,), model, choices = problem.batches(1, 2), problem.model(), Choices(hardware=hardware)
    example = Example(model, batch.args, loss=problem.loss, target=batch.target)
    laid_out = lay_out_step(model, one_microbatch(example), problem.loss, choices)
    question = PlanQuestion(choices, 16, ("dp",))
    rows, *_ = factorisations(CapturedStep(laid_out, 2), question, 2, 0.1, lambda text: None)
    link = hardware.exchange or hardware.within
    assert link is not None
    size = sum(parameter.nbytes for parameter in model.parameters())
    expected = 2 * (link.latency + size / 2 / link.bandwidth)
    assert [row.exchange for row in rows] == pytest.approx([expected] * len(rows))
    assert all(row.seconds == row.choice.seconds + row.exchange for row in rows)


@pytest.mark.slow
def test_replicas_divide() -> None:
    """What they divide takes less memory, and gathers take time; the limit counts what is divided."""
    model, x = nn.Sequential(*(nn.Linear(768, 768) for _ in range(4))), torch.ones(2, 768)
    size = sum(parameter.nbytes for parameter in model.parameters())
    example, choices = Example(model, (x,), loss=nn.MSELoss(), target=x), Choices(hardware=Hardware.find("h100-sxm"))
    captured = CapturedStep(lay_out_step(model, one_microbatch(example), example.loss, choices), 2)

    def planned(zero: int, memory: float | None = None) -> tuple[list[PlanRow], list[str]]:
        question = PlanQuestion(replace(choices, memory=memory), 16, ("dp",), zero=zero)
        return factorisations(captured, question, 2, 0.1, lambda text: None)[:2]

    found = [planned(zero)[0][0] for zero in (0, 2, 3)]
    assert [row.peak / size for row in found] == pytest.approx([4, 3, 3], rel=0.02)  # of one stage, all is gathered
    assert found[0].exchange == found[1].exchange < found[2].exchange
    assert planned(2, 3.5 * size)[0]
    assert "no layout fits" in planned(0, 3.5 * size)[1][0]
    assert "no layout fits" in planned(3, 2.5 * size)[1][0]
