"""A stage that updates as soon as its gradients are summed, inside of the step, changes no bit;
what contradicts it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Muon

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.training import ROWS, Case, assert_same_tensors, pipeline_of

MICROBATCHES = 4


def pipeline(problem: str = "short-mlp", schedule: str = "zb-v") -> tuple[Any, list[Any]]:
    pipe = pipeline_of(Case(problem, schedule, 2, MICROBATCHES))
    return pipe, PROBLEMS[problem].batches(3, MICROBATCHES * ROWS)


def state_of(pipe: zbcompile.Pipeline) -> dict[str, Any]:
    return {name: value.clone() for name, value in pipe.state_dict(full=True).items()}


def trained(overlap: bool, dtype: torch.dtype, *arguments: str) -> dict[str, Any]:
    """Groups, a scheduler, two optimizers; the second step inside no_sync."""
    pipe, batches = pipeline(*arguments)
    pipe.model.to(dtype)
    groups = [{"params": lambda _, p: p.ndim < 2, "weight_decay": 0.0}]
    matrix = lambda name, p: p.ndim == 2 and "embed" not in name  # noqa: E731
    options: dict[str, Any] = {"lr": 1e-2, "overlap": overlap}
    matrices = pipe.optimizer(Muon, params=matrix, **options)
    rest = pipe.optimizer(AdamW, params=lambda *a: not matrix(*a), groups=groups, **options)
    rate = torch.optim.lr_scheduler.ExponentialLR(rest, 0.5)
    for number, batch in enumerate(batches):
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (*batch.args, batch.target))
        if number == 1:
            with pipe.no_sync():
                pipe.step(x, target=y)
            continue
        pipe.step(x, target=y)
        for item in (matrices, rest, rate):
            item.step()
        matrices.zero_grad()
        rest.zero_grad()
    return state_of(pipe)


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        (torch.float32, ("short-mlp", "zb-v")),
        (torch.float32, ("small-tied", "zb-v")),
        (torch.bfloat16, ("mlp", "zb-h1")),
        (torch.float32, ("mlp", "dualpipe")),
    ],
)
def test_every_bit_is_that_of_an_update_after_the_step(dtype: torch.dtype, given: Any) -> None:
    assert_same_tensors(trained(True, dtype, *given), trained(False, dtype, *given), "state dict:")


def test_the_step_is_the_update() -> None:
    """Gradients are None afterwards, `optimizer.step()` does nothing, and a rate that changes
    between the two counts for the next step. A stage updates while others still work."""
    pipe, (batch, *_) = pipeline()
    optimizer = pipe.optimizer(SGD, lr=0.1, overlap=True)
    pipe.record = True
    pipe.step(*batch.args, target=batch.target)
    actions = [span.action for span in pipe.last_step.spans[0]]
    assert actions.index("OPT3.0") < actions.index("W0.3") < actions.index("OPT0.0")
    assert all(parameter.grad is None for parameter in pipe.parameters())
    after = state_of(pipe)
    optimizer.param_groups[0]["lr"] = 1.0
    assert optimizer.step(lambda: "closure") == "closure"
    assert_same_tensors(pipe.state_dict(full=True), after, "state dict:")
    with pytest.raises(zbcompile.PipelineError, match=r"clip_grad_norm_ needs gradients after a"):
        pipe.clip_grad_norm_(1.0)


class Counting(SGD):
    """Keeps a count of steps where the updates of all stages would raise it."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        counts = self.param_groups[0].setdefault("list", {})
        counts["count"] = counts.get("count", 0) + 1
        super().step()


class Decay(SGD):
    """Its printed value stays 1.0000, and the attribute's name is private."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._factor = torch.ones(2)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._factor.mul_(1 - 1e-6)
        super().step()


class Holding(SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.all = [parameter for group in self.param_groups for parameter in group["params"]]


def test_an_optimizer_that_counts_steps_for_all_parameters_is_refused() -> None:
    """Each stage's update would count. It is noticed in the first step."""
    pipe, (batch, *_) = pipeline()
    pipe.optimizer(Holding, lr=0.1, overlap=True)
    pipe.step(*batch.args, target=batch.target)  # parameters belong to no other stage
    for kind in (Counting, Decay):
        pipe, (batch, *_) = pipeline()
        pipe.optimizer(kind, lr=0.1, overlap=True)
        says = rf"{kind.__name__}.step\(\) wrote a value that belongs to all"
        with pytest.raises(zbcompile.PipelineError, match=says):
            pipe.step(*batch.args, target=batch.target)


def test_after_a_step_that_failed_half_way_only_a_checkpoint_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, (batch, *_) = pipeline()
    optimizer = pipe.optimizer(SGD, lr=0.1, overlap=True)
    pipe.step(*batch.args, target=batch.target)
    zbcompile.save_checkpoint(tmp_path, pipe, optimizer)
    before, plain = state_of(pipe), type(optimizer).update

    def failing(self: Any, stage: int) -> None:
        if stage == 0:
            raise RuntimeError("the power is out")
        plain(self, stage)

    monkeypatch.setattr(type(optimizer), "update", failing)
    with pytest.raises(RuntimeError, match="the power is out"):
        pipe.step(*batch.args, target=batch.target)
    monkeypatch.undo()
    with pytest.raises(zbcompile.PipelineError, match="the model is of two steps"):
        pipe.step(*batch.args, target=batch.target)
    zbcompile.load_checkpoint(tmp_path, pipe, optimizer)
    assert_same_tensors(pipe.state_dict(full=True), before, "state dict:")
    pipe.step(*batch.args, target=batch.target)
