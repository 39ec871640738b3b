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
    if found:
        raise ranks.refusal(f"{found}, and every rank must get the same batch. {SEED}")


def warn_of_other_batches(ranks: Ranks, step: Microbatches) -> None:
    """Once, in the first step: a rank may pass anything for what its stages do not read."""
    plain = [{path: tensor for path, tensor in part.items() if _is_plain(tensor)} for part in step.tensors]
    paths = {path: [part.get(path) for part in plain] for part in plain for path in part}
    if (found := _what_differs(ranks, paths)) and ranks.rank == 0:
        says = "Each stage reads its own rank's, so the loss belongs to no batch"
        warnings.warn(f"{found}. {says}. {SEED}", RuntimeWarning, stacklevel=5)


def _what_differs(ranks: Ranks, inputs: Mapping[str, Any]) -> str:
    if ranks.group is None:
        return ""
    with ranks.watch.position.waiting("the batch of the others"):
        found = ranks.gather_here({name: _checksum(value) for name, value in inputs.items()})
    for rank, other in enumerate(found):
        for name in sorted(found[0].keys() | other.keys()):
            if found[0].get(name) != other.get(name):
                return f"{name} of this batch differs between rank 0 and rank {rank} of the pipeline"
    return ""


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_complex()


def _checksum(value: Any) -> list[Any]:
    return [_of_tensor(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in pytree.tree_leaves(value)]


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), zlib.crc32(content.numpy().tobytes())
