"""The comparison of batches: ranks of a pipeline must train on the same one, or they would compute
a wrong gradient in silence."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from zbcompile.distributed.agreement import Digests, unlike
from zbcompile.distributed.equal_tensors import checksum
from zbcompile.distributed.mesh import BATCHES, Mesh
from zbcompile.distributed.ranks import Ranks
from zbcompile.passes.torch_names import type_text
from zbcompile.torch_private import pytree

# The checksum of a batch, which is sent among the losses: bfloat16 has every integer up to 128.
PIECES, BITS = 4, 7
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FACTOR = 0x9E3779B97F4A7C1
SEED = "Seed what is random in the data set and the collator alike on all ranks of a pipeline."


class StepAgreement:
    """With replicas, one reduction per step: all ranks run as many microbatches, return the same
    and compile together. It begins before the first action, and is read when a rank needs it.

    Collectives of unequal size end gloo's process without a message, so that a difference has to be
    found before them.
    """

    def __init__(
        self,
        ranks: Ranks,
        count: int,
        returns: str,
        compiles: bool,
        shapes: Sequence[str],
        independent: Sequence[str],
    ) -> None:
        """Along the `independent` dimensions of the mesh microbatches may have other shapes."""
        self._ranks = ranks
        same = f"{count} microbatches with {returns}" + ", which it compiles" * compiles
        compared = None if tuple(independent) == BATCHES else tuple(shapes)
        self._summary = f"runs {same}, of {'; '.join(shapes)}"
        self._digests = Digests(ranks, (same, ()), (compared, independent))

    def differs(self) -> bool:
        """Returns True if ranks are about to take different steps. Blocks until all have sent their
        digests."""
        return any(self._digests.differ)

    def require(self) -> None:
        """Raises PipelineError, on every rank, if they are."""
        if not self.differs():
            return
        ranks, summaries = self._ranks, self._ranks.gather(self._summary)
        for rank, summary in zip(ranks.members, summaries, strict=True):
            if summary != summaries[0]:
                raise ranks.refusal(
                    f"rank {ranks.members[0]} {summaries[0]}; rank {rank} {summary}. Replicas take"
                    " as many microbatches in every step, return the same and compile together:"
                    " pass batches of one size, and change what a capture depends on (train, eval,"
                    " requires_grad, autocast, values that forward reads in Python) on every rank"
                    " alike."
                )


def require_same_batch(ranks: Ranks, inputs: Mapping[str, Any]) -> None:
    """Raises PipelineError, on every rank, if another rank of this pipeline got another batch.

    For compilations and evaluations; later steps compare integer inputs, with the losses. The
    caller is in a region of the watch.
    """
    if ranks.group is None:
        return
    sums = {name: [_mark(leaf) for leaf in pytree.tree_leaves(inputs[name])] for name in inputs}
    if not any(Digests(ranks, (sorted(sums.items()), ranks.mesh.beside("pp"))).differ):
        return
    reports = ranks.gather_here(sums)
    names = {name for report in reports for name in report}
    rows = [{name: report.get(name, []) for name in names} for report in reports]
    for name, first, rank, left, right in sorted(unlike(range(len(rows)), rows)):
        forms = [f"{len(p)} microbatches of {p[0][0]}" if p else "none" for p in (left, right)]
        detail = "" if forms[0] == forms[1] else f" ({forms[0]}, and {forms[1]})"
        raise ranks.refusal(
            f"{name} of this batch differs between rank {first} and rank {rank} of the"
            f" pipeline{detail}, and every rank must get the same batch. {SEED}"
        )
    raise ranks.refusal(f"the ranks of another replica's pipeline got batches that differ. {SEED}")


def _mark(leaf: Any) -> tuple[str, Any]:
    """Returns the form of an input and its checksum, which is 0 for a tensor without plain
    bytes."""
    if isinstance(leaf, torch.Tensor):
        return type_text(leaf), checksum(leaf) if _is_plain(leaf) else 0
    return "", repr(leaf)


def integer_marks(
    microbatches: Sequence[Mapping[str, torch.Tensor]], mesh: Mesh, like: torch.Tensor
) -> torch.Tensor:
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
def _weights(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns factors for `count` integers, and the bit positions of the pieces in their sum. These
    are its upper bits: the lower ones depend on the lower bits of each integer alone."""
    weights = torch.arange(1, count + 1, device=device) * _FACTOR
    return weights, 63 - BITS * torch.arange(1, PIECES + 1, device=device)


def require_same_integers(ranks: Ranks, marks: torch.Tensor) -> None:
    """Raises PipelineError if ranks of one pipeline have different checksums. Synchronizes with the
    device."""
    for _, rank in (marks != marks[:, :1]).any(-1).nonzero().tolist():
        raise ranks.refusal(
            f"the integer inputs of this batch differ between rank 0 and rank {rank} of the"
            f" pipeline: each stage reads its own rank's, so the loss belongs to no batch. {SEED}"
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
