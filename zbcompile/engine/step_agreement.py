"""The comparison of batches: ranks of a pipeline must train on the same one, or they would compute
a wrong gradient in silence."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from zbcompile.distributed.agreement import agree
from zbcompile.distributed.equal_tensors import checksum
from zbcompile.distributed.mesh import Mesh
from zbcompile.distributed.ranks import Ranks
from zbcompile.passes.torch_names import type_text
from zbcompile.torch_private import pytree

# The checksum of a batch, which is sent among the losses: bfloat16 has every integer up to 128.
PIECES, BITS = 4, 7
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FACTOR = 0x9E3779B97F4A7C1
SEED = "Seed what is random in the data set and the collator alike on all ranks of a pipeline."


def require_same_batch(ranks: Ranks, inputs: Mapping[str, Any]) -> None:
    """Raises PipelineError, on every rank, if another rank of this pipeline got another batch.

    For compilations and evaluations; later steps compare integer inputs, with the losses. The
    caller is in a region of the watch.
    """
    if ranks.group is not None:
        agree(
            ranks,
            {name: _mark(pytree.tree_leaves(value)) for name, value in inputs.items()},
            "of a pipeline got different batches",
            f"All need the same. {SEED}",
            inputs,
            ranks.mesh.beside("pp"),
        )


def _mark(leaves: Sequence[Any]) -> str:
    """Returns the number and the forms of the parts of an input, with a checksum of all of them."""
    forms = [type_text(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    sums = [checksum(leaf) for leaf in leaves if isinstance(leaf, Tensor) and _is_plain(leaf)]
    mark = crc32(repr((forms, sums)).encode())
    return f"{len(leaves)} x {', '.join(dict.fromkeys(forms))} of checksum {mark:x}"


def integer_marks(microbatches: Sequence[Mapping[str, Tensor]], mesh: Mesh, like: Tensor) -> Tensor:
    """Returns a checksum of the integer inputs of a step at the index of this rank, among zeros.

    The sum over all ranks has those of all [place in the mesh, rank of the pipeline, piece]. Does
    not synchronize with a device.
    """
    marks = like.new_zeros((mesh.size(*mesh.beside("pp")), mesh.size("pp"), PIECES))
    tensors = [tensor for inputs in microbatches for _, tensor in sorted(inputs.items())]
    parts = [
        tensor.reshape(-1).to(like.device)
        for tensor in tensors
        if _is_plain(tensor) and tensor.dtype in _INTEGERS
    ]
    if parts:
        values = torch.cat(parts).to(torch.int64)
        weights, bits = _weights(len(values), like.device)
        pieces = ((values * weights).sum() >> bits) & ((1 << BITS) - 1)
        marks[mesh.index(*mesh.beside("pp")), mesh.index("pp")] = pieces.to(like.dtype)
    return marks


@lru_cache(maxsize=4)
def _weights(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns factors for `count` integers, and the bit positions of the pieces in their sum. These
    are its upper bits: the lower ones depend on the lower bits of each integer alone."""
    weights = torch.arange(1, count + 1, device=device) * _FACTOR
    return weights, 63 - BITS * torch.arange(1, PIECES + 1, device=device)


def require_same_integers(ranks: Ranks, marks: Tensor) -> None:
    """Raises PipelineError if ranks of one pipeline have different checksums. Synchronizes with the
    device."""
    for _, rank in (marks != marks[:, :1]).any(-1).nonzero().tolist():
        raise ranks.refusal(
            f"the integer inputs of this batch differ between rank 0 and rank {rank} of the"
            f" pipeline: each stage reads its own rank's, so the loss belongs to no batch. {SEED}"
        )


def _is_plain(tensor: Tensor) -> bool:
    has_values = tensor.layout is torch.strided and not tensor.is_meta
    return has_values and type(tensor) in (Tensor, nn.Parameter)
