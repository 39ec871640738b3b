"""How a batch becomes microbatches: which leaves are split along dimension 0 and which every microbatch sees whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zbcompile.errors import PipelineError
from zbcompile.torch_private import pytree

_TOP = ("args", "kwargs", "target")


@dataclass(frozen=True)
class Batch:
    """The flattened inputs of one step. `paths[i]` names `leaves[i]`; `is_split[i]` says whether it is divided."""

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    is_split: tuple[bool, ...]
    structure: Any
    size: int

    def microbatch(self, index: int, count: int) -> "Microbatch":
        """Microbatch `index` of `count` equal ones."""
        width = self.size // count
        return self.rows(index * width, (index + 1) * width)

    def rows(self, start: int, stop: int) -> "Microbatch":
        """The rows from `start` up to `stop` of every leaf that is split, the others whole."""
        leaves = [leaf[start:stop] if cut else leaf for leaf, cut in zip(self.leaves, self.is_split, strict=True)]
        return Microbatch(tuple(leaves), self.paths, self.structure)


@dataclass(frozen=True)
class Microbatch:
    """The inputs of one microbatch, by path and as `(args, kwargs, target)`."""

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    structure: Any

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor inputs by path, as the compiled graphs ask for them."""
        return {p: leaf for p, leaf in zip(self.paths, self.leaves, strict=True) if isinstance(leaf, torch.Tensor)}

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        return pytree.tree_unflatten(list(self.leaves), self.structure)  # type: ignore[no-any-return]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What a compiled graph is specialised on: structure, shapes, dtypes, strides and every value not a tensor."""
        return (str(self.structure), *(_describe(leaf) for leaf in self.leaves))

    def summary(self) -> str:
        """The tensor shapes, for messages."""
        shapes = [f"{path}{list(t.shape)}" for path, t in self.tensors.items()]
        return ", ".join(shapes) or "no tensors"


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), str(leaf.dtype), str(leaf.device)
    return repr(leaf)


def flatten_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, split: Mapping[str, bool] | None
) -> Batch:
    """Flatten a step's inputs and decide which leaves are split.

    The first tensor with dimensions gives the batch size; every tensor whose dimension 0 has that size is split.
    `split` overrides by path (`args[0]`, `kwargs['mask']`, `target`) or by the bare name of a keyword (`mask`).
    Raises PipelineError for a batch without tensors, an ambiguous leaf and an override that matches nothing.
    """
    pairs, structure = pytree.tree_flatten_with_path((args, kwargs, target))
    paths = tuple(_path(path) for path, _ in pairs)
    leaves = tuple(leaf for _, leaf in pairs)
    chosen = _overrides(paths, split or {})
    first = _first_batched(paths, leaves, chosen)
    size = leaves[first].shape[0]
    is_split = tuple(_decide(paths[i], leaves[i], size, chosen, i == first) for i in range(len(leaves)))
    return Batch(leaves, paths, is_split, structure, size)


def input_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> dict[str, torch.Tensor]:
    """The tensors of one microbatch by path."""
    pairs, _ = pytree.tree_flatten_with_path((args, kwargs, target))
    return {_path(path): leaf for path, leaf in pairs if isinstance(leaf, torch.Tensor)}


def _path(path: Any) -> str:
    return _TOP[path[0].idx] + pytree.keystr(path[1:])


def _overrides(paths: tuple[str, ...], split: Mapping[str, bool]) -> dict[str, bool]:
    chosen: dict[str, bool] = {}
    for name, value in split.items():
        matches = [p for p in paths if p == name or p == f"kwargs['{name}']" or p.startswith((f"{name}[", f"{name}."))]
        if not matches:
            raise PipelineError(f"split= names {name!r}, which no input has; the inputs are {', '.join(paths)}.")
        chosen.update(dict.fromkeys(matches, value))
    return chosen


def _first_batched(paths: tuple[str, ...], leaves: tuple[Any, ...], chosen: Mapping[str, bool]) -> int:
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if isinstance(leaf, torch.Tensor) and leaf.ndim and chosen.get(path, True):
            return i
    raise PipelineError("the batch has no tensor with a batch dimension; nothing can be split into microbatches.")


def _decide(path: str, leaf: Any, size: int, chosen: Mapping[str, bool], defines_size: bool) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
        if chosen.get(path):
            raise PipelineError(f"split= asks to split {path}, which is not a tensor with a batch dimension.")
        return False
    if path in chosen:
        return _checked(path, leaf, size) if chosen[path] else False
    if leaf.shape[0] != size:
        return False
    square = leaf.ndim >= 2 and leaf.shape[1] == size
    if square and not defines_size and not path.startswith("target"):
        raise PipelineError(
            f"{path} has shape {list(leaf.shape)} and the batch size is {size}: it may be one row per sample or one "
            f"table for all. Say which: split={{{path!r}: True}} or split={{{path!r}: False}}."
        )
    return True


def _checked(path: str, leaf: torch.Tensor, size: int) -> bool:
    if leaf.shape[0] != size:
        raise PipelineError(f"split= asks to split {path} of shape {list(leaf.shape)}, but the batch size is {size}.")
    return True


def refuse_input_gradients(batch: Batch) -> None:
    """Raise PipelineError for an input that requires a gradient: a step gives gradients to parameters only."""
    for path, leaf in zip(batch.paths, batch.leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise PipelineError(
                f"{path} requires a gradient; a step gives gradients to the model's parameters only. Pass "
                "tensor.detach(), or make what computes it part of the model."
            )


def require_divisible(batch: Batch, microbatches: int) -> None:
    """Raise PipelineError when the batch cannot be cut into equal microbatches."""
    if batch.size % microbatches:
        near = [n for n in range(1, batch.size + 1) if batch.size % n == 0]
        raise PipelineError(
            f"a batch of {batch.size} samples cannot be split into {microbatches} equal microbatches. Pass a batch "
            f"size divisible by {microbatches}, or choose microbatches= among {near}."
        )
