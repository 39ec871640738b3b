"""All ranks of a pipeline must train on the same batch: they would otherwise compute a wrong gradient in silence."""

import warnings
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from zbcompile.distributed.ranks import Ranks
from zbcompile.model.batch import Microbatches
from zbcompile.torch_private import pytree

SEED = "Seed what is random in the data set and the collator alike on all ranks of a pipeline."


def require_same_batch(ranks: Ranks, inputs: Mapping[str, Any]) -> None:
    """Raise PipelineError, on every rank, if another rank of this pipeline got another batch."""
    with ranks.watch.region("comparing batches"):
        found = _what_differs(ranks, inputs)
    for name in found:
        raise ranks.refusal(f"{found[name]}, and every rank must get the same batch. {SEED}")


class BatchComparison:
    """Compares the batches of a pipeline's ranks in the first step and in each `every`th from then on (0: in no other).
    An input that differs is named once: a rank may pass anything for what its stages do not read."""

    def __init__(self, ranks: Ranks, every: int) -> None:
        self._ranks, self._every = ranks, every
        self._steps = 0
        self._named: set[str] = set()

    def begin_step(self, step: Microbatches) -> None:
        """Warn, on the first rank, if this is a step to compare and another rank got another batch."""
        due = self._steps == 0 or (self._every > 0 and self._steps % self._every == 0)
        self._steps += 1
        if not due or self._ranks.group is None:
            return
        paths = {path for part in step.tensors for path in part} - self._named
        parts = {path: [_plain(part.get(path)) for part in step.tensors] for path in paths}
        found = _what_differs(self._ranks, parts)
        self._named |= found.keys()
        if found and self._ranks.rank == 0:
            says = "Each stage reads its own rank's, so the loss belongs to no batch"
            warnings.warn(f"{next(iter(found.values()))}. {says}. {SEED}", RuntimeWarning, stacklevel=5)


def _what_differs(ranks: Ranks, inputs: Mapping[str, Any]) -> dict[str, str]:
    """What differs between the first rank and another, in words, by its name; on all ranks in one order."""
    if ranks.group is None:
        return {}
    with ranks.watch.position.waiting("the batch of the others"):
        found = ranks.gather_here({name: _checksum(value) for name, value in inputs.items()})
    differs: dict[str, str] = {}
    for rank, other in enumerate(found):
        for name in sorted(found[0].keys() | other.keys()):
            if found[0].get(name) != other.get(name):
                text = f"{name} of this batch differs between rank 0 and rank {rank} of the pipeline"
                differs.setdefault(name, text)
    return differs


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor that has a checksum; None otherwise."""
    has_one = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_complex()
    return tensor if has_one else None


def _checksum(value: Any) -> list[Any]:
    return [_of_tensor(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in pytree.tree_leaves(value)]


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), zlib.crc32(content.numpy().tobytes())
