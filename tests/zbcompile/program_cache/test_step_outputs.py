"""`step(return_outputs=True)`: what the model returned, and what the loss function measured, next to
the loss."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import Batch, eager_step
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors, gradients_of

EIGHT = Batch((torch.linspace(-1, 1, 96).view(8, 3, 4),), {}, torch.arange(24).view(8, 3) % 5)


def classes() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 5))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def made(schedule: str = "zb-h1", **options: Any) -> zbcompile.Pipeline:
    options = {"loss": with_accuracy, "ranks": 2, "microbatches": 4, "exact": True, **options}
    return zbcompile.pipeline(classes(), schedule=schedule, **options)


def step(pipe: zbcompile.Pipeline, **options: Any) -> Any:
    return pipe.step(*EIGHT.args, target=EIGHT.target, **options)


def with_accuracy(logits: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    right = (logits.argmax(-1) == target).float()
    metrics = {"accuracy": right.mean(), "right": right.sum().long(), "of rows": right.mean(1)}
    return loss_of(logits, target), {**metrics, "name": "bytes"}


def assert_metrics(metrics: dict[str, Any], model: nn.Module) -> None:
    pairs = zip(EIGHT.args[0].split(2), EIGHT.target.split(2), strict=True)  # type: ignore[union-attr]
    local = [with_accuracy(model(x), target)[1] for x, target in pairs]
    assert torch.equal(metrics["accuracy"], sum(item["accuracy"] / 4 for item in local))
    assert torch.equal(metrics["of rows"], torch.cat([item["of rows"] for item in local]))
    assert [int(item) for item in metrics["right"]] == [int(item["right"]) for item in local]
    assert metrics["name"] == "bytes"


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe"])
def test_outputs_and_metrics(schedule: str) -> None:
    pipe, model = made(schedule), classes()
    loss, (logits, metrics) = step(pipe, return_outputs=True)
    assert torch.equal(loss, eager_step(model, loss_of, EIGHT, 4, 0))
    assert torch.equal(logits, torch.cat([model(x) for x in EIGHT.args[0].split(2)]))
    assert not logits.requires_grad
    assert_metrics(metrics, model)
    assert_same_tensors(gradients_of(pipe), gradients_of(model), "gradient of")


@pytest.mark.slow
def test_metrics_are_weighed_as_the_loss() -> None:
    """Added up where the loss is; the mean of the microbatches' values otherwise."""
    metrics = step(made(loss_reduction="sum"), return_metrics=True)[1]
    torch.testing.assert_close(metrics["accuracy"], 4 * metrics["of rows"].mean())


def on_each_rank() -> Any:
    pipe = made("zb-v", ranks=None)
    return [step(pipe, return_outputs=where)[1] for where in (True, "last")]


@pytest.mark.slow
def test_every_rank_or_the_last_one_gets_them(pool: Pool) -> None:
    model, results = classes(), pool.run(on_each_rank)
    expected = torch.cat([model(x) for x in EIGHT.args[0].split(2)])
    for (logits, metrics), _ in results:
        assert_metrics(metrics, model)
        assert torch.equal(logits, expected)
    assert torch.equal(results[0][1][0], expected)  # the last stage of a V is on the first rank
    assert results[1][1] is None


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = self.first(x)
        late = self.second(torch.relu(early))
        return {"loss": late.square().mean(), "early": early, "late": late, "steps": None}


def own() -> zbcompile.Pipeline:
    options = {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "balance": ("second",)}
    return zbcompile.pipeline(Own(), **options)


def test_outputs_of_earlier_stages_beside_a_loss_of_the_models_own() -> None:
    pipe, x = own(), torch.randn(8, 4)
    expected = pipe.model(x)
    loss, outputs = pipe.step(x, return_outputs=True)
    assert torch.equal(outputs["loss"], loss)
    assert outputs["steps"] is None
    for name in ("early", "late"):
        torch.testing.assert_close(outputs[name], expected[name].detach())


def test_what_cannot_be_returned() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"return_outputs": True, "return_metrics": True}, "already come with the metrics, as"),
        ({"return_metrics": "all"}, "return_metrics='all'; expected True or False"),
        ({"return_outputs": "first"}, "return_outputs='first'; expected one of"),
    ]
    pipe = made()
    for options, reason in wrong:
        with pytest.raises(zbcompile.PipelineError, match=reason):
            step(pipe, **options)
    with pytest.raises(zbcompile.PipelineError, match="needs whole outputs, and the output layer"):
        step(made(vocab=1, exact=False, loss=loss_of), return_outputs=True)
    no_metrics = "return_metrics=True, but no loss function returned metrics"
    with pytest.raises(zbcompile.CaptureError, match=no_metrics):
        step(made(loss=loss_of), return_metrics=True)
    with pytest.raises(zbcompile.CaptureError, match=no_metrics):
        own().step(torch.randn(8, 4), return_metrics=True)
