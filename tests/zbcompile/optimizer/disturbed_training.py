"""Training with batches whose gradients are too large in some steps and infinite in the last one,
by an optimizer that waits for the norm of all gradients, or does not."""

from typing import Any

from torch import Tensor, inf
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR

import zbcompile
from tests.support.oracle import Batch
from tests.support.training import assert_same_tensors

MICROBATCHES, STEPS, CLIP = 4, 40, 1.0
CLIPPED, INFINITE = {4: 8.0, 5: 1e3, 20: 10.0}, STEPS - 1  # the last: it stays in the parameters
History = tuple[list[Tensor], list[Any], dict[str, Any], list[str]]


def disturbed(batch: Batch, step: int) -> Batch:
    """A batch whose gradients are large in some steps, and infinite in the last one."""
    target = batch.target * CLIPPED.get(step, 1.0)  # type: ignore[operator]
    if step == INFINITE:
        target[0] = inf
    return Batch(batch.args, {}, target)


def trained(pipe: zbcompile.Pipeline, batches: list[Batch], **options: Any) -> History:
    """The losses, the norms, the state dict, and what happened to the updates that did not stand."""
    optimizer = pipe.optimizer(AdamW, lr=1e-3, clip=CLIP, **options)
    rate, losses, norms, seen = ExponentialLR(optimizer, 0.99), [], [], []
    for batch in batches:
        losses.append(pipe.step(*batch.args, target=batch.target))
        if optimizer._pending_validation is not None:
            seen.append(optimizer._pending_validation)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        norms.append(optimizer.norm if len(norms) % 2 else None)  # reading it settles the update
    corrected = ["undone" if item.snapshots else "held" for item in seen if not item.settle()]
    return losses, norms, dict(pipe.state_dict(full=True)), corrected


def assert_bitwise(result: History, expected: History) -> None:
    """A number in place of each NaN, which equals nothing."""
    ours, theirs = (
        {
            name: None if value is None else value.nan_to_num(7.0)
            for name, value in (*enumerate((*item[0], *item[1])), *item[2].items())
        }
        for item in (result, expected)
    )
    assert_same_tensors(ours, theirs, "losses, norms, state dict:")
