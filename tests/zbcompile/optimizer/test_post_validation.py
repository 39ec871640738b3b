"""Updates that do not wait for the norm of all gradients, and are corrected afterwards: every bit is the barrier's."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

import zbcompile
from tests.support.oracle import PROBLEMS, Batch
from tests.support.pool import Pool
from tests.support.replicated import REPLICAS, mesh_of_replicas
from tests.support.training import ROWS, Case, assert_same_tensors, compiled_once, pipeline_of, pipelined

MICROBATCHES, STEPS, CLIP = 4, 40, 1.0
CLIPPED, INFINITE, NOT_A_NUMBER = {4: 8.0, 5: 1e3, 20: 10.0}, (7, 8), 30
History = tuple[list[Tensor], list[float], dict[str, Any], list[str]]


def disturbed(batch: Batch, step: int) -> Batch:
    """A batch whose gradients are large, infinite or no numbers in some steps."""
    x, target = batch.args[0].clone(), batch.target * CLIPPED.get(step, 1.0)
    if step in INFINITE:
        target[0] = torch.inf
    if step == NOT_A_NUMBER:
        x[-1] = torch.nan
    return Batch((x,), {}, target)


def trained(pipe: zbcompile.Pipeline, batches: list[Batch], scaled: bool, **options: Any) -> History:
    """The losses, the norms, the state dict, and what happened to the updates that were validated."""
    optimizer = pipe.optimizer(AdamW, lr=1e-3, clip=CLIP, **options)
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    scaler = zbcompile.GradScaler(pipe, init_scale=4.0, growth_interval=10) if scaled else None
    losses, norms, seen = [], [], []
    for batch in batches:
        losses.append(pipe.step(*batch.args, target=batch.target))
        if optimizer._unsettled is not None:
            seen.append(optimizer._unsettled)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        rate.step()
        norms.append(optimizer.norm if len(norms) % 2 else None)  # reading it settles the update
    corrected = ["undone" if each.kept else "held" for each in seen if not stood(each)]
    return losses, norms, pipe.state_dict(full=True), corrected  # type: ignore[return-value]


def stood(validation: Any) -> bool:
    return bool(validation.settle()[1])


def assert_bitwise(found: History, expected: History) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert (mine is None) is (theirs is None)
        assert mine is None or torch.equal(mine, theirs)  # type: ignore[arg-type]
    assert_same_tensors(found[2], expected[2], "state dict:")


@pytest.mark.parametrize("schedule", ["zb-h2", "zb-2p", "zb-v"])
def test_every_bit_is_that_of_the_barrier(schedule: str) -> None:
    """Over 40 steps with a scaler, three that clip, two with infinities, one with a NaN."""
    case = Case("mlp", schedule, 2, MICROBATCHES)
    plain = PROBLEMS["mlp"].batches(STEPS, MICROBATCHES * ROWS)
    batches = [disturbed(batch, step) for step, batch in enumerate(plain)]
    with compiled_once("mlp", exact=True):
        late, after = (trained(pipeline_of(case), batches, True, validate=when) for when in ("before", "after"))
    assert_bitwise(after, late)
    assert all(value.isfinite().all() for value in after[2].values())
    assert len(after[3]) >= len((*CLIPPED, *INFINITE, NOT_A_NUMBER))
    assert "undone" in after[3] or schedule != "zb-v"  # otherwise the second rank, which comes first here, knows it
    assert STEPS - len(after[3]) > STEPS / 2


def test_half_precision_is_corrected_as_well() -> None:
    """Masters are rounded again, and the options are those of the step that is corrected."""
    batches = [disturbed(b, s) for s, b in enumerate(PROBLEMS["mlp"].batches(8, MICROBATCHES * ROWS))]
    halves = [Batch(tuple(x.bfloat16() for x in b.args), {}, b.target.bfloat16()) for b in batches]
    found = []
    for when in ("before", "after"):
        pipe = pipeline_of(Case("mlp", "zb-v", 2, MICROBATCHES))
        pipe._model.bfloat16()
        found.append(trained(pipe, halves, scaled=True, validate=when))
    assert_bitwise(found[1], found[0])
    assert "undone" in found[1][3]


def test_gradients_that_a_correction_needs_must_not_be_written() -> None:
    pipe = pipeline_of(Case("mlp", "zb-v", 2, MICROBATCHES))
    optimizer = pipe.optimizer(AdamW, clip=1e-3, validate="after")
    batch = PROBLEMS["mlp"].batches(1, MICROBATCHES * ROWS)[0]
    pipe.step(*batch.args, target=batch.target)
    optimizer.step()
    pipe._model.zero_grad(set_to_none=False)
    with pytest.raises(zbcompile.PipelineError, match=r"was written before the norm of all gradients was known"):
        pipe.step(*batch.args, target=batch.target)
    with pytest.raises(zbcompile.PipelineError, match=r"before their updates were corrected"):
        pipe.step(*batch.args, target=batch.target)


def beside_replicas(schedule: str, scaled: bool) -> list[History]:
    torch.set_num_threads(1)
    mesh = mesh_of_replicas()
    problem = PROBLEMS["short-mlp"]
    found = []
    with compiled_once("short-mlp", exact=True):
        for options in ({"zero": 0}, *({"zero": zero, "validate": "after"} for zero in (0, 1, 2))):
            pipe = zbcompile.pipeline(
                problem.model(), schedule=schedule, microbatches=MICROBATCHES, loss=problem.loss, mesh=mesh, exact=True
            )
            plain = problem.batches(12, REPLICAS * MICROBATCHES * ROWS)
            own = [list(batch.parts(REPLICAS))[mesh["dp"].get_local_rank()] for batch in plain]
            steps = range(12) if scaled else (0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13)
            given = [disturbed(batch, step) for batch, step in zip(own, steps, strict=True)]
            found.append(trained(pipe, given, scaled, **options))
            pipe.close()
    return found


@pytest.mark.parametrize(
    ("schedule", "scaled"), [("zb-v", True), pytest.param("zb-h2", False, marks=pytest.mark.slow)], ids=str
)
def test_every_bit_is_the_same_beside_replicas(schedule: str, scaled: bool, pool: Pool) -> None:
    """Whole, and divided among replicas; the norms of the ranks before come as messages."""
    pool.rehearse(pipelined, Case("short-mlp", schedule, 2, MICROBATCHES, steps=1))
    for late, *after in pool.run(beside_replicas, schedule, scaled, ranks=4):
        for found in after:
            assert_bitwise(found, late)
            assert found[3]
