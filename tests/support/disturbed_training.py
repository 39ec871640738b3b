"""Training with batches whose gradients are too large in some steps and infinite in the last one,
by an optimizer that waits for the norm of all gradients, or does not."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

import zbcompile
from tests.support.oracle import Batch
from tests.support.training import assert_same_tensors

MICROBATCHES, STEPS, CLIP = 4, 40, 1.0
# what is infinite stays in the parameters
CLIPPED, INFINITE = ({4: 8.0, 5: 1e3, 20: 10.0}, STEPS - 1)
History = tuple[list[Tensor], list[float], dict[str, Any], list[str]]


def disturbed(batch: Batch, step: int) -> Batch:
    """A batch whose gradients are large in some steps, and infinite in the last one."""
    target = batch.target * CLIPPED.get(step, 1.0)
    if step == INFINITE:
        target[0] = torch.inf
    return Batch(batch.args, {}, target)


def trained(pipe: zbcompile.Pipeline, batches: list[Batch], **options: Any) -> History:
    """The losses, the norms, the state dict, and what happened to the updates that were
    validated."""
    optimizer = pipe.optimizer(AdamW, lr=1e-3, clip=CLIP, **options)
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    losses, norms, seen = [], [], []
    for batch in batches:
        losses.append(pipe.step(*batch.args, target=batch.target))
        if optimizer._pending_validation is not None:
            seen.append(optimizer._pending_validation)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        norms.append(optimizer.norm if len(norms) % 2 else None)  # reading it settles the update
    corrected = ["undone" if item.snapshots else "held" for item in seen if not stood(item)]
    return losses, norms, pipe.state_dict(full=True), corrected  # type: ignore[return-value]


def stood(validation: Any) -> bool:
    return bool(validation.settle())


def assert_bitwise(result: History, expected: History) -> None:
    for local, theirs in zip((*result[0], *result[1]), (*expected[0], *expected[1]), strict=True):
        assert (local is None) is (theirs is None)
        assert local is None or torch.equal(_numbers(local), _numbers(theirs))  # type: ignore[arg-type]
    ours, rest = (
        {name: _numbers(value) for name, value in item[2].items()} for item in (result, expected)
    )
    assert_same_tensors(ours, rest, "state dict:")


def _numbers(tensor: Tensor) -> Tensor:
    """The tensor with a number in place of each NaN, which equals nothing."""
    return tensor.nan_to_num(7.0)
