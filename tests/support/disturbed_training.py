"""Training with batches whose gradients are too large, infinite or no numbers in some steps, by an optimizer that
waits for the norm of all gradients, or does not."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

import zbcompile
from tests.support.oracle import Batch
from tests.support.training import assert_same_tensors

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
