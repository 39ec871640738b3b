"""A loss that ranks still exchange is a tensor like any other: only its value has to be waited for,
once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zbcompile.engine.executable import Losses


def reduced(loss: Tensor) -> Tensor:
    """Collectives come past `__torch_function__`."""
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1).allreduce([loss]).wait()
    return loss


USES: dict[str, Callable[[Tensor], Any]] = {
    "float": float,
    "collective": reduced,
    "item": Tensor.item,
    "tolist": Tensor.tolist,
    "numpy": lambda loss: loss.numpy(),
    "format": lambda loss: float(f"{loss:.4f}"),
    "text": lambda loss: float(str(loss)[len("tensor(") : -1]),
    "sum": lambda loss: sum([loss]),
    "stack": lambda loss: torch.stack([loss])[0],
    "copy": copy.deepcopy,
    "moved": lambda loss: loss.to(torch.float64),
    "written into": lambda loss: torch.zeros(1).add_(loss)[0],
    "written": lambda loss: loss.mul_(1.0),
    "detached": lambda loss: loss.detach().clone(),
}


def pending(waits: list[str]) -> Tensor:
    return Losses([torch.tensor(1.5), torch.tensor(2.5)], lambda: waits.append("waited")).total(
        "mean"
    )


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whatever_reads_it_waits_once(use: Callable[[Tensor], Any]) -> None:
    waits: list[str] = []
    loss = pending(waits)
    assert isinstance(loss.detach(), Tensor)
    assert waits == []
    assert [float(use(loss)), float(use(loss))] == [2.0, 2.0]
    assert waits == ["waited"]
    assert type(loss + 1) is Tensor


def test_only_a_number_that_is_read_asks_whether_the_batch_was_one() -> None:
    """On a device it would wait for the step to end; on the CPU the step is over."""
    requested: list[str] = []
    far = Losses([torch.zeros((), device="meta")], require=lambda: requested.append("asked"))
    assert (far.total("sum") + 1).is_meta
    assert requested == []
    far.read(as_numbers=True)
    assert requested == ["asked"]

    def refuse() -> None:
        raise ValueError("other batches")

    loss = Losses([torch.tensor(1.0)], require=refuse).total("sum")
    for _ in range(2):
        with pytest.raises(ValueError, match="other batches"):
            loss.item()
