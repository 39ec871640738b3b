"""Checks that tensors of several ranks are equal: tied parameters, model copies, replicas. Without
the check a model that every rank seeds differently would train on, with a loss that belongs to no
model.

Initial values are gathered once per program, not reduced as a digest
(`zbcompile.distributed.agreement.agree`): each pair of ranks shares other tensors, and a digest
compares what the same ranks have in common.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from zbcompile.distributed.agreement import gathered, unlike
from zbcompile.distributed.ranks import Ranks
from zbcompile.model.placements import CHOSEN, PARTIAL, SHARD

TOLERANCE = {
    1: 0.2,
    2: 0.05,
    4: 1e-3,
    8: 1e-6,
}  # by bytes of an element: what sums in another order differ by at most
CHUNK = 1 << 20  # elements that are summed at a time
_ODD = 0x9E3779B97F4A7C1
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_equal_tensors(ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise PipelineError on every rank if two ranks hold different values under one name. One
    exchange of a number per tensor; ranks may hold different names."""
    local = {name: checksum(tensor) for name, tensor in tensors.items()}
    with ranks.watch.position.waiting("the comparison of shared tensors"):
        reports = ranks.gather(local)
    different: dict[str, tuple[int, int]] = {}
    for name, first, rank, _, _ in unlike(ranks.members, reports):
        different.setdefault(name, (first, rank))
    if different:
        name, (first, second) = next(iter(different.items()))
        more = f" (and {len(different) - 1} more tensors)" if different.keys() - {name} else ""
        text = (
            f"{name}{more} is shared by ranks {first} and {second}{_apart(ranks, first, second)},"
            " which hold different values of it. Build the model alike on every rank"
            " (torch.manual_seed before it), or load one state dict on all of them:"
            " pipe.load_state_dict(state) after compiling."
        )
        raise ranks.refusal(text + _if_meant(ranks, name, first, second, SHARD))


def _apart(ranks: Ranks, first: int, second: int) -> str:
    """Returns text for a message: the dimensions of the mesh along which two ranks differ, or ""
    if the mesh has no dimension but the pipeline's."""
    dimensions = _dimensions_between(ranks, first, second)
    return f" (apart along {', '.join(dimensions)})" if dimensions else ""


def _dimensions_between(ranks: Ranks, first: int, second: int) -> list[str]:
    if not ranks.mesh.beside("pp"):
        return []
    one, second_place = ranks.mesh.place_of(first), ranks.mesh.place_of(second)
    return [f'"{name}"' for name in one if one[name] != second_place[name]]


def _if_meant(ranks: Ranks, name: str, first: int, second: int, word: str) -> str:
    """How to say that tensors differ along a dimension by intent."""
    chosen = [n for n in _dimensions_between(ranks, first, second) if n.strip('"') in CHOSEN]
    return (
        f' If that is meant, say so: placements={{"{name}": {{{chosen[0]}: "{word}"}}}}.'
        if chosen
        else ""
    )


def require_equal_losses(ranks: Ranks, losses: torch.Tensor) -> None:
    """Raise PipelineError on every rank unless the ranks along "tp", the columns, computed the same
    losses."""
    values = losses.double()
    bound = TOLERANCE[losses.element_size()] * values.abs().amax(dim=1, keepdim=True)
    far = ((values - values[:, :1]).abs() > bound).nonzero()
    if len(far):
        microbatch, column = far[0].tolist()
        raise ranks.refusal(
            f'the loss of microbatch {microbatch} is {values[microbatch, 0]:g} on rank 0 along "tp"'
            f" and {values[microbatch, column]:g} on rank {column}; these ranks train on one batch"
            ' and must compute one loss. Pass the same batch along "tp"; if every rank has a part'
            " of the loss, add the parts up in the model."
        )


def require_equal_results(
    ranks: Ranks,
    results: Mapping[str, tuple[torch.Tensor, Sequence[str]]],
    parts: Mapping[str, tuple[int, Sequence[str]]],
    losses: Sequence[float],
    trained: Collection[str],
) -> None:
    """Raise PipelineError on every rank if the gradient of a `trained` parameter, or a buffer that
    forward writes, differs between ranks that should all have computed the whole of it: `results`
    has each with the dimensions along which that is so. Differences by rounding are allowed.

    Also raises it if what the ranks along a dimension contribute to the sum of a gradient is equal
    bit by bit: each has the whole sum already. `parts` has the checksum of each contribution, with
    the dimensions along which it is summed. Ranks with equal `losses` may well train on equal
    batches.
    """
    mesh = ranks.mesh

    def place(*dimensions: str) -> tuple[int, ...]:
        return tuple(mesh.index(dimension) for dimension in mesh.beside(*dimensions))

    full_results = {
        (name, place(*along)): projections(tensor) for name, (tensor, along) in results.items()
    }
    summed = {
        (name, dimension, place(dimension)): value
        for name, (value, along) in parts.items()
        for dimension in along
    }
    reports = gathered(ranks, (full_results, summed, losses))
    _require_parts(ranks, [(dimension, theirs) for _, dimension, theirs in reports])
    for (name, _), first, rank, _, _ in unlike(
        ranks.members, [dimension for dimension, _, _ in reports], _near
    ):
        raise ranks.refusal(_differs(ranks, name, first, rank, name in trained))


def _require_parts(
    ranks: Ranks, reports: Sequence[tuple[Mapping[Any, int], Sequence[float]]]
) -> None:
    entries: dict[Any, list[tuple[int, Sequence[float]]]] = {}
    for report, theirs in reports:
        for key, value in report.items():
            entries.setdefault(key, []).append((value, theirs))
    for (name, dimension, _), pairs in entries.items():
        values, batches = {value for value, _ in pairs}, {theirs for _, theirs in pairs}
        if len(values) == 1 and values != {0} and (dimension == "tp" or len(batches) > 1):
            raise ranks.refusal(
                f'the gradient of {name} is equal on all {len(pairs)} ranks along "{dimension}",'
                " although each has a part of the data: it is a whole sum already, and would be"
                " summed once more. If every rank computes all of it, say so:"
                f' placements={{"{name}": {{"{dimension}": "replicate"}}}}.'
            )


def _differs(ranks: Ranks, name: str, first: int, second: int, trained: bool) -> str:
    pair = f"{name} differs between ranks {first} and {second}{_apart(ranks, first, second)}"
    if not trained:
        meant = _if_meant(ranks, name, first, second, SHARD)
        remedy = "Let all of them write the same: sum it over the ranks first."
        return f"what forward writes into buffer {pair}. {remedy}{meant}"
    meant = _if_meant(ranks, name, first, second, PARTIAL)
    return (
        f"the gradient of {pair}, although each should compute the whole of it.{meant} (each"
        " computes a part, to be summed once per step)."
    )


def projections(tensor: torch.Tensor) -> list[float]:
    """Returns the tolerance for a tensor, its norm, and sums of its elements under fixed random
    signs. Two tensors whose distance is a fraction of their norm differ by about as much in one of
    these numbers."""
    flat = tensor.detach().reshape(-1).double()
    generator = torch.Generator(flat.device).manual_seed(0)
    signs = (torch.rand(flat.numel(), generator=generator, device=flat.device) < 0.5) * 2.0 - 1
    sums = [float((flat * signs.roll(shift)).sum()) for shift in (0, 1, 7, 31)]
    return [TOLERANCE[tensor.element_size()], float(flat.norm()), *sums]


def _near(values: list[float], expected: list[float]) -> bool:
    tolerance, norm, *_ = expected
    return all(
        abs(a - b) <= tolerance * norm or a != a for a, b in zip(values, expected, strict=True)
    )


def checksum(tensor: torch.Tensor) -> int:
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


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """Let high bits reach low ones: in a sum of products alone, two flipped signs cancel out."""
    return (bits ^ (bits >> 31 & 0x1FFFFFFFF)) * _ODD
