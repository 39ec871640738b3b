"""A stage that updates as soon as its gradients are summed, inside of the step, changes no bit;
what contradicts it is refused."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW, Muon

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.training import ROWS, Case, assert_same_tensors, pipeline_of

MICROBATCHES = 4


def pipeline(problem: str = "mlp", schedule: str = "zb-v") -> tuple[zbcompile.Pipeline, list[Any]]:
    pipe = pipeline_of(Case(problem, schedule, 2, MICROBATCHES))
    return pipe, PROBLEMS[problem].batches(3, MICROBATCHES * ROWS)


def trained(overlap: bool, dtype: torch.dtype, *arguments: str) -> dict[str, Any]:
    """Groups, a scheduler, two optimizers; the second step inside no_sync."""
    pipe, batches = pipeline(*arguments)
    pipe._model.to(dtype)
    options: dict[str, Any] = {
        "groups": [{"params": lambda _, p: p.ndim < 2, "weight_decay": 0.0}],
        "overlap": overlap,
    }
    matrices = pipe.optimizer(
        Muon, params=lambda name, p: p.ndim == 2 and "embed" not in name, lr=1e-2, overlap=overlap
    )
    rest = pipe.optimizer(
        AdamW, params=lambda name, p: p.ndim != 2 or "embed" in name, lr=1e-2, **options
    )
    rate = torch.optim.lr_scheduler.ExponentialLR(rest, 0.5)
    for number, batch in enumerate(batches):
        cast = [x.to(dtype) if x.is_floating_point() else x for x in (*batch.args, batch.target)]
        if number == 1:
            with pipe.no_sync():
                pipe.step(*cast[:-1], target=cast[-1])
            continue
        pipe.step(*cast[:-1], target=cast[-1])
        for item in (matrices, rest):
            item.step()
            item.zero_grad()
        rate.step()
    return pipe.state_dict(full=True)


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        (torch.float32, ("small-tied", "zb-v")),
        (torch.bfloat16, ("mlp", "zb-h1")),
        (torch.float32, ("mlp", "dualpipe")),
    ],
    ids=lambda item: str(item),
)
def test_every_bit_is_that_of_an_update_after_the_step(
    dtype: torch.dtype, given: tuple[str, str]
) -> None:
    assert_same_tensors(trained(True, dtype, *given), trained(False, dtype, *given), "state dict:")


def test_the_step_is_the_update() -> None:
    """Gradients are None afterwards, `optimizer.step()` does nothing, and a rate that changes
    between the two counts for the next step. A stage updates while others still work."""
    pipe, (batch, *_) = pipeline()
    optimizer = pipe.optimizer(SGD, lr=0.1, overlap=True)
    pipe.record = True
    pipe.step(*batch.args, target=batch.target)
    assert pipe.last_step is not None
    actions = [span.action for span in pipe.last_step.spans[0]]
    assert actions.index("OPT3.0") < actions.index("W0.3") < actions.index("OPT0.0")
    assert all(parameter.grad is None for parameter in pipe.parameters())
    after = {name: value.clone() for name, value in pipe.state_dict(full=True).items()}
    optimizer.param_groups[0]["lr"] = 1.0
    assert optimizer.step(lambda: "closure") == "closure"
    assert_same_tensors(pipe.state_dict(full=True), after, "state dict:")
    with pytest.raises(zbcompile.PipelineError, match=r"clip_grad_norm_ needs gradients after a"):
        pipe.clip_grad_norm_(1.0)


class Counting(SGD):
    """Keeps a count of steps where the updates of all stages would raise it."""

    where = "group"

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            counts = vars(self) if self.where == "attribute" else group
            if self.where == "list":
                counts = group.setdefault("list", {})
            counts["count"] = counts.get("count", 0) + 1
        super().step()


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("group", r"param_groups\[0\]\['count'\]"),
        ("attribute", "count"),
        ("list", r"param_groups\[0\]\['list'\]"),
    ],
)
def test_an_optimizer_that_counts_steps_for_all_parameters_is_refused(
    where: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage's update would count. It is noticed in the first step."""
    monkeypatch.setattr(Counting, "where", where)
    pipe, (batch, *_) = pipeline()
    pipe.optimizer(Counting, lr=0.1, overlap=True)
    with pytest.raises(
        zbcompile.PipelineError, match=rf"Counting.step\(\) wrote its {named}, which belongs to all"
    ):
        pipe.step(*batch.args, target=batch.target)


def test_after_a_step_that_failed_half_way_only_a_checkpoint_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, (batch, *_) = pipeline()
    optimizer = pipe.optimizer(SGD, lr=0.1, overlap=True)
    pipe.step(*batch.args, target=batch.target)
    optimizer.step()
    optimizer.zero_grad()
    zbcompile.save_checkpoint(tmp_path, pipe, optimizer)
    before = {name: value.clone() for name, value in pipe.state_dict(full=True).items()}
    plain = type(optimizer).update

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
    optimizer.step()


class PatientSGD(SGD):
    """Its update on the second rank waits until the first rank has gone on to its next step."""

    sign: Path | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        end = time.monotonic() + 20
        while self.sign is not None and dist.get_rank() == 1 and not self.sign.exists():
            assert time.monotonic() < end, "the first rank has waited for this one"
            time.sleep(0.01)
        super().step(closure)


def ahead(folder: str, options: dict[str, Any]) -> tuple[list[float], list[str], dict[str, Any]]:
    pipe, batches = pipeline("mlp", "1f1b")
    optimizer = pipe.optimizer(PatientSGD, lr=0.1, **options)
    losses = []
    for number, batch in enumerate(batches):
        PatientSGD.sign = Path(folder, str(number)) if optimizer.config.overlaps_step else None
        losses.append(pipe.step(*batch.args, target=batch.target))
        if dist.get_rank() == 0:
            Path(folder, str(number)).touch()
        optimizer.step()
        optimizer.zero_grad()
    return (
        [float(item) for item in losses],
        [type(item).__name__ for item in losses],
        pipe.state_dict(full=True),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        pytest.param({"validate": "after", "clip": 1e6}, marks=pytest.mark.beyond_sample),
    ],
    ids=str,
)
def test_a_step_returns_before_other_ranks_have_updated(
    options: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    """Its loss is read later. An optimizer that is not early waits for all ranks."""
    usual, folder = (
        {key: value for key, value in options.items() if key == "clip"},
        tmp_path / "overlap",
    )
    folder.mkdir()
    results = [
        pool.run(ahead, str(where), arguments, ranks=2)
        for where, arguments in ((tmp_path, usual), (folder, options))
    ]
    for late, early in zip(*results, strict=True):
        assert early[0] == late[0]
        assert (late[1][0], early[1][0]) == ("Tensor", "PendingLoss")
        assert_same_tensors(early[2], late[2], "state dict:")
