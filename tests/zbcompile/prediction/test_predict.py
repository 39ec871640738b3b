"""What inspect predicts against what a step does."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zbcompile
from zbcompile.cli.target import load_example
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.stage_cost import stage_cost
from zbcompile.prediction import predict
from zbcompile.prediction.predict import load_costs, predicted_costs, stage_costs
from zbcompile.schedules import build, parse_step, simulate
from zbcompile.schedules.ir.actions import COMPUTE

TARGETS = Path(__file__).parents[3] / "examples" / "targets.py"
MICROBATCHES = 4


def _repeated(value: Any) -> Any:
    return torch.cat([value] * MICROBATCHES) if isinstance(value, torch.Tensor) else value


def _recorded(name: str, schedule: str) -> zbcompile.Pipeline:
    """A pipeline in this process after one recorded step."""
    example = load_example(f"{TARGETS}:{name}")
    options = {"schedule": schedule, "microbatches": MICROBATCHES, "ranks": 2, "loss": example.loss}
    pipe = zbcompile.pipeline(example.model, **options)
    pipe.record = True
    kwargs = {key: _repeated(value) for key, value in example.kwargs.items()}
    if example.loss is not None:
        kwargs["target"] = _repeated(example.target)
    pipe.step(*map(_repeated, example.args), **kwargs)
    return pipe


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("name", "schedule"), [("gpt", "zb-v"), ("gpt", "1f1b"), ("llama", "zb-h1"), ("unet", "zb-v")]
)
def test_what_is_predicted_happens(name: str, schedule: str) -> None:
    pipe = _recorded(name, schedule)
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
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    model[1:].requires_grad_(False)
    example = zbcompile.Example(
        model, (torch.ones(2, 8),), loss=torch.nn.MSELoss(), target=torch.ones(2, 8)
    )
    program = compile_example(example, build("zb-h1", 2, 4), CompileOptions(balance=("1",))).program
    costs = load_costs(program, "flops").costs
    assert costs.backward[0] == costs.weight[1] == 0
    assert min(*costs.forward, costs.backward[1], costs.weight[0]) > 0


def test_equal_stages_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some get their values from a stage on their own rank: of these only the running
    bytes differ."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
    example = zbcompile.Example(
        model, (torch.ones(2, 8),), loss=torch.nn.MSELoss(), target=torch.ones(2, 8)
    )
    program = compile_example(example, build("zb-v", 4, 8), CompileOptions()).program
    priced: list[int] = []
    monkeypatch.setattr(
        predict,
        "stage_cost",
        lambda stage, *how: priced.append(stage.stage) or stage_cost(stage, *how),
    )
    costs = stage_costs(program)
    assert len(priced) == len({stage.original for stage in program.stages}) < 8
    assert costs[1] == costs[2]
    assert costs[3].seconds == costs[1].seconds
