"""`step(return_outputs=True)`: what the model returned, and what the loss function measured, next to
the loss."""

from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from tests.support.oracle import PROBLEMS, eager_step
from tests.support.pool import Pool

PROBLEM = PROBLEMS["gpt"]
(EIGHT,) = PROBLEM.batches(1, 8)


def made(schedule: str = "zb-h1", **options: object) -> zbcompile.Pipeline:
    options = {"loss": PROBLEM.loss, "ranks": 2, "microbatches": 4, "exact": True, **options}
    return zbcompile.pipeline(PROBLEM.model(), schedule=schedule, **options)  # type: ignore[call-overload]


def with_accuracy(
    logits: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    right = (logits.argmax(-1) == target).float()
    metrics = {
        "accuracy": right.mean(),
        "right": right.sum().long(),
        "of rows": right.mean(1),
        "name": "bytes",
    }
    return PROBLEM.loss(logits, target), metrics


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe"])
def test_outputs_and_metrics(schedule: str) -> None:
    pipe, model = made(schedule, loss=with_accuracy), PROBLEM.model()
    loss, (logits, metrics) = pipe.step(*EIGHT.args, target=EIGHT.target, return_outputs=True)
    expected = [model(x).detach() for x in EIGHT.args[0].split(2)]
    assert torch.equal(loss, eager_step(model, PROBLEM.loss, EIGHT, 4, 0))
    assert torch.equal(logits, torch.cat(expected))
    assert not logits.requires_grad
    pairs = zip(expected, EIGHT.target.split(2), strict=True)  # type: ignore[union-attr]
    local = [with_accuracy(item, target)[1] for item, target in pairs]
    assert torch.equal(metrics["accuracy"], sum(item["accuracy"] / 4 for item in local))
    assert torch.equal(metrics["of rows"], torch.cat([item["of rows"] for item in local]))
    assert [int(item) for item in metrics["right"]] == [int(item["right"]) for item in local]
    assert metrics["name"] == "bytes"
    gradients = dict(model.named_parameters())
    assert all(torch.equal(p.grad, gradients[name].grad) for name, p in pipe.named_parameters())  # type: ignore[arg-type]


@pytest.mark.slow
def test_metrics_are_weighed_as_the_loss() -> None:
    """Added up where the loss is; the mean of the microbatches' values otherwise."""
    results = []
    for reduction in ("mean", "sum"):
        pipe = made(loss=with_accuracy, loss_reduction=reduction)
        results.append(
            pipe.step(*EIGHT.args, target=EIGHT.target, return_outputs=True)[1][1]["accuracy"]
        )
    torch.testing.assert_close(results[1], 4 * results[0])


def metrics_on_each_rank(schedule: str) -> tuple[torch.Tensor, dict[str, Any]]:
    pipe = made(schedule, ranks=None, loss=with_accuracy)
    return pipe.step(*EIGHT.args, target=EIGHT.target, return_metrics=True)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_every_rank_gets_the_metrics(pool: Pool) -> None:
    model = PROBLEM.model()
    loss = eager_step(model, PROBLEM.loss, EIGHT, 4, 0)
    right = torch.cat([model(x) for x in EIGHT.args[0].split(2)]).argmax(-1) == EIGHT.target
    for ours, metrics in pool.run(metrics_on_each_rank, "zb-h1", ranks=2):
        assert torch.equal(ours, loss)
        assert torch.equal(metrics["of rows"], right.float().mean(1))
        assert int(sum(metrics["right"])) == int(right.sum())


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        early = self.first(x)
        late = self.second(torch.relu(early))
        return {"loss": late.square().mean(), "early": early, "late": late, "steps": None}


def test_outputs_of_earlier_stages_beside_a_loss_of_the_models_own() -> None:
    torch.manual_seed(0)
    model, x = Own(), torch.randn(8, 4)
    expected = model(x)
    pipe = zbcompile.pipeline(model, schedule="1f1b", ranks=2, microbatches=4, balance=("second",))
    loss, outputs = pipe.step(x, return_outputs=True)
    assert torch.equal(outputs["loss"], loss)
    assert outputs["steps"] is None
    torch.testing.assert_close(outputs["early"], expected["early"].detach())
    torch.testing.assert_close(outputs["late"], expected["late"].detach())


def test_metrics_that_cannot_be_returned() -> None:
    both = {"target": EIGHT.target, "return_metrics": True}
    with pytest.raises(
        zbcompile.PipelineError, match=r"already come with the metrics, as \(outputs, metrics\)"
    ):
        made(loss=with_accuracy).step(*EIGHT.args, return_outputs=True, **both)
    with pytest.raises(
        zbcompile.PipelineError, match="return_metrics='all'; expected True or False"
    ):
        made(loss=with_accuracy).step(*EIGHT.args, target=EIGHT.target, return_metrics="all")  # type: ignore[arg-type]
    with pytest.raises(zbcompile.PipelineError, match="return_outputs='first'; expected one of"):
        made(loss=with_accuracy).step(*EIGHT.args, target=EIGHT.target, return_outputs="first")
    no_metrics = "return_metrics=True, but no loss function returned metrics"
    with pytest.raises(zbcompile.CaptureError, match=no_metrics):
        made().step(*EIGHT.args, **both)
    with pytest.raises(zbcompile.CaptureError, match=no_metrics):
        zbcompile.pipeline(Own(), schedule="1f1b", ranks=2, microbatches=4).step(
            torch.randn(8, 4), return_metrics=True
        )


def on_each_rank(where: bool | str) -> tuple[bool, Any]:
    pipe = made("dualpipe-v" if where == "last" else "zb-h1", ranks=None, loss=with_accuracy)
    _, results = pipe.step(*EIGHT.args, target=EIGHT.target, return_outputs=where)
    return results is not None, None if results is None else (results[0], results[1]["right"])


@pytest.mark.slow
@pytest.mark.parametrize("where", [pytest.param(True, marks=pytest.mark.beyond_sample), "last"])
def test_every_rank_or_the_last_one_gets_them(where: bool | str, pool: Pool) -> None:
    results = pool.run(on_each_rank, where, ranks=2)
    # the last stage of a V is on the first rank
    last = [True, True] if where is True else [True, False]
    assert [has for has, _ in results] == last
    model = PROBLEM.model()
    for _, (logits, right) in (item for item in results if item[0]):
        assert torch.equal(logits, torch.cat([model(x) for x in EIGHT.args[0].split(2)]))
        assert len(right) == 4


def later_on_each_replica(requested: tuple[bool | str, bool | str]) -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    pipe = made("1f1b", ranks=None, mesh=mesh)
    for where in (*requested, requested[dist.get_rank()]):
        try:
            pipe.step(*EIGHT.args, target=EIGHT.target, return_outputs=where)
        except zbcompile.PipelineError as error:
            return str(error)
    return ""


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_replicas_ask_alike_in_later_steps(pool: Pool) -> None:
    for results in pool.run(later_on_each_replica, (True, False), ranks=2):
        assert "rank 0 runs 4 microbatches with return_outputs=True, of args" in results
        assert "rank 1 runs 4 microbatches with return_outputs=False, of args" in results


@pytest.mark.parametrize("vocab", [1, 2])
def test_a_sharded_output_layer_makes_no_outputs(vocab: int) -> None:
    pipe = made(vocab=vocab, exact=False)
    with pytest.raises(
        zbcompile.PipelineError, match="needs whole outputs, and the output layer is sharded"
    ):
        pipe.step(*EIGHT.args, target=EIGHT.target, return_outputs=True)
