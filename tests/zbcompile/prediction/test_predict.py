"""Tests of what inspect predicts against what a step does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from zbcompile.cli.target import load_example
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.prediction.predict import load_costs, predicted_costs
from zbcompile.schedules import build, parse_step, simulate
from zbcompile.schedules.ir.actions import COMPUTE

TARGETS = Path(__file__).parents[3] / "examples" / "targets.py"
RARE = pytest.mark.beyond_sample


def repeated(value: Any) -> Any:
    return torch.cat([value] * 4) if isinstance(value, torch.Tensor) else value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("unet", "zb-v"),
        pytest.param("gpt", "1f1b", marks=RARE),
        pytest.param("llama", "zb-h1", marks=RARE),
        pytest.param("gpt", "zb-v", marks=RARE),
    ],
)
def test_what_is_predicted_happens(name: str, schedule: str) -> None:
    example = load_example(f"{TARGETS}:{name}")
    options = {"schedule": schedule, "microbatches": 4, "ranks": 2, "loss": example.loss}
    pipe = zbcompile.pipeline(example.model, **options)
    pipe.record = True
    target = {} if example.loss is None else {"target": repeated(example.target)}
    kwargs = {key: repeated(value) for key, value in example.kwargs.items()}
    pipe.step(*map(repeated, example.args), **kwargs, **target)
    timeline = simulate(pipe.program.schedule, predicted_costs(pipe.program))
    assert pipe.last_step is not None
    for rank, spans in pipe.last_step.spans.items():
        measured = [span.action for span in spans if parse_step(span.action)[0] in COMPUTE]
        assert [str(span.step) for span in timeline.spans_of(rank)] == measured
    peaks = pipe.last_step.peak_activation_bytes
    assert timeline.peak_memory == tuple(peaks[rank] for rank in range(2))  # to the byte


def test_an_empty_pass_takes_no_time() -> None:
    """The first stage is one layer, which has nothing to do in B; the second is frozen and has
    nothing to do in W."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[1:].requires_grad_(False)
    x, options = torch.ones(2, 8), CompileOptions(balance=("1",))
    example = zbcompile.Example(model, (x,), loss=nn.MSELoss(), target=x)
    program = compile_example(example, build("zb-h1", 2, 4), options).program
    costs = load_costs(program, "flops").costs
    assert costs.backward[0] == costs.weight[1] == 0
    assert min(*costs.forward, costs.backward[1], costs.weight[0]) > 0
