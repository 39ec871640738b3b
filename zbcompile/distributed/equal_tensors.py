"""Checks that tensors of several ranks are equal: tied parameters, model copies, replicas. Without
the check a model that every rank seeds differently would train on, with a loss that belongs to no
model.

Initial values are gathered once per program, not reduced as a digest
(`zbcompile.distributed.agreement.agree`): each pair of ranks shares other tensors, and a digest
compares what the same ranks have in common.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from zbcompile.distributed.agreement import unlike
from zbcompile.distributed.ranks import Ranks
from zbcompile.model.placements import CHOSEN, SHARD

CHUNK = 1 << 20  # elements that are summed at a time
_ODD = 0x9E3779B97F4A7C1
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_equal_tensors(ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
    """Raise PipelineError on every rank if two ranks hold different values under one name. One
    exchange of a number per tensor; ranks may hold different names."""
    local = {name: checksum(tensor) for name, tensor in tensors.items()}
    reports = ranks.gather(local)
    different: dict[str, tuple[int, int]] = {}
    for name, first, rank, _, _ in unlike(ranks.members, reports):
        different.setdefault(name, (first, rank))
    if different:
        name, (first, second) = next(iter(different.items()))
        more = f" (and {len(different) - 1} more tensors)" if different.keys() - {name} else ""
        apart = places_apart(ranks, first, second)
        text = (
            f"{name}{more} is shared by ranks {first} and {second}{apart},"
            " which hold different values of it. Build the model alike on every rank"
            " (torch.manual_seed before it), or load one state dict on all of them:"
            " pipe.load_state_dict(state) after compiling."
        )
        raise ranks.refusal(text + if_meant(ranks, name, first, second, SHARD))


def places_apart(ranks: Ranks, first: int, second: int) -> str:
    """Returns text for a message: the dimensions of the mesh along which two ranks differ, or ""
    if the mesh has no dimension but the pipeline's."""
    dimensions = _dimensions_between(ranks, first, second)
    return f" (apart along {', '.join(dimensions)})" if dimensions else ""


def _dimensions_between(ranks: Ranks, first: int, second: int) -> list[str]:
    if not ranks.mesh.beside("pp"):
        return []
    one, second_place = ranks.mesh.place_of(first), ranks.mesh.place_of(second)
    return [f'"{name}"' for name in one if one[name] != second_place[name]]


def if_meant(ranks: Ranks, name: str, first: int, second: int, word: str) -> str:
    """How to say that tensors differ along a dimension by intent."""
    chosen = [n for n in _dimensions_between(ranks, first, second) if n.strip('"') in CHOSEN]
    return (
        f' If that is meant, say so: placements={{"{name}": {{{chosen[0]}: "{word}"}}}}.'
        if chosen
        else ""
    )


def checksum(tensor: Tensor) -> int:
    """A number made of all bits of a tensor in order, on its device.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
    False
    """
    value = tensor.detach()
    flat = (torch.view_as_real(value) if value.is_complex() else value).contiguous().view(-1)
    bits = flat.view(_INTEGER[flat.element_size()])
    counted = torch.arange(1, min(CHUNK, len(bits)) + 1, device=bits.device)
    weights = _mixed(counted * _ODD) | 1  # odd: no bit is lost
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(CHUNK):
        weight = weights[: len(part)]
        total = total * _ODD + (_mixed(part.to(torch.int64) * weight) * weight).sum()
    return int(total)


def _mixed(bits: Tensor) -> Tensor:
    """Let high bits reach low ones: in a sum of products alone, two flipped signs cancel out."""
    return (bits ^ (bits >> 31 & 0x1FFFFFFFF)) * _ODD
