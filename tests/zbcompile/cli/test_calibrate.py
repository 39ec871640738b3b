"""`python -m zbcompile.calibrate`: what it measures here is a profile, and what it is told wrong is one line."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import zbcompile
from tests.support.error_lines import error_lines
from zbcompile.calibrate import main
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.machine.hardware import Product
from zbcompile.prediction import calibration
from zbcompile.prediction.calibration import KERNELS, Bench, run_seconds, spread_of
from zbcompile.prediction.predict import predicted_costs
from zbcompile.schedules import build


@pytest.mark.slow
def test_this_machine_is_measured_and_a_step_predicted_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine on which much else ran, which it says and writes down."""
    file = tmp_path / "machine.toml"
    monkeypatch.setattr(os, "getloadavg", lambda: (20.0, 20.0, 20.0))
    assert main(["--quick", "--output", str(file)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{file}: ")
    assert "the machine was busy: it had" in shown.err
    found = zbcompile.Hardware.find(str(file))
    assert "processes for each processor before" in found.sources["busy"]
    assert found.spread is None  # of one round
    assert found.launch > found.viewing > 0
    assert found.operations.keys() >= KERNELS.keys()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    example = zbcompile.Example(model, (torch.ones(8, 64),), {}, nn.MSELoss(), torch.ones(8, 1))
    program = compile_example(example, build("zb-h1", 2, 4), Choices(hardware=found)).program
    assert 1e-6 < min(predicted_costs(program).forward) < 1e-2


def test_the_spread_is_that_of_a_typical_sample_between_rounds() -> None:
    """Of three samples 0, 10 and 50 % apart."""
    rounds = [
        [{"launch": [1e-6]}, {"mul": [(8.0, 0.95 * scale)]}, {"product": [Product(1, 2, 2, 2, far)]}]
        for scale, far in ((1.0, 1.0), (1.1, 1.5), (1.05, 1.25))
    ]
    assert spread_of(rounds) == pytest.approx(0.05 / 1.05)


def test_a_clock_that_stands_still_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a thread's does once in some million times on a virtual machine whose processors are taken away."""
    readings = iter([0, 0, 0, 3, 3, 5, 5, 5, *range(5, 100, 2)])  # twice the beginning of a block is also its end
    monkeypatch.setattr(calibration, "clock_of", lambda accelerated: lambda: float(next(readings)))
    assert run_seconds(lambda: None, Bench(torch.device("cpu"), enough=0.0)) == 2


@pytest.mark.parametrize("output", ["machine.json", "nowhere/machine.toml"])
def test_a_file_that_cannot_be_is_one_line(output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / output)]) == 2
    (line,) = error_lines(capsys)
    assert output in line
