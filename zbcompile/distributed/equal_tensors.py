"""Check that tensors held by several ranks are equal: tied parameters, model copies, replicas. Otherwise a model that
each rank seeds by itself would train on, with a loss that belongs to no model."""

from collections.abc import Mapping

import torch

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError

CHUNK = 1 << 20  # elements that are summed at a time
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_equal_tensors(ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise PipelineError on every rank if two ranks hold different values under one name. One exchange of a number per
    tensor; ranks may hold different names."""
    own = {name: checksum(tensor) for name, tensor in tensors.items()}
    with ranks.watch.position.waiting("the comparison of shared tensors"):
        reports = ranks.gather(own)
    found: dict[str, tuple[int, int]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, report in zip(ranks.members, reports, strict=True):
        for name, value in report.items():
            first, expected = found.setdefault(name, (rank, value))
            if value != expected:
                different.setdefault(name, (first, rank))
    if different:
        name, (first, second) = next(iter(different.items()))
        others = f" (and {len(different) - 1} more tensors)" if different.keys() - {name} else ""
        text = (
            f"{name}{others} is shared by ranks {first} and {second}, which hold different values of it. Build the "
            "model alike on every rank (torch.manual_seed before it), or load one state dict on all of them: "
            "pipe.load_state_dict(state) after compiling."
        )
        raise ranks.watch.known_to_all(PipelineError(text))


def checksum(tensor: torch.Tensor) -> int:
    """A number made of all bits of a tensor in order, on its device.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
    False
    """
    value = tensor.detach()
    flat = (torch.view_as_real(value) if value.is_complex() else value).contiguous().view(-1)
    bits = flat.view(_INTEGER[flat.element_size()])
    weights = torch.arange(1, 2 * CHUNK, 2, device=bits.device) * 0x9E3779B97F4A7C1  # odd: no bit is lost
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(CHUNK):
        total = total * 0x100000001B3 + (part.to(torch.int64) * weights[: len(part)]).sum()
    return int(total)
