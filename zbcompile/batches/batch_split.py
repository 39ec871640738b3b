"""Decides along which dimension, if any, each input is cut into microbatches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zbcompile.errors import PipelineError

Cut = int | None  # a dimension; None: every microbatch takes the whole leaf
Split = Mapping[str, bool | int]  # the user's choice by path, as in `zbcompile.pipeline(split=)`


def choose_cuts(
    paths: Sequence[str], leaves: Sequence[Any], split: Split, partial: bool = False
) -> tuple[tuple[Cut, ...], int]:
    """The cut of every leaf, and the number of samples in the batch.

    `split` names leaves by path (`args[0]`, `kwargs['mask']`, `target`), by the bare name of a
    keyword (`mask`), or by the path of what holds them (`args[1]`). `partial`: leaves that it names
    may be missing.

    A leaf that `split` names is cut as it says, by its own length. Of the others, tensors without
    dimensions or with one row are whole, and the rest agree about dimension 0, which is the batch.
    Raises PipelineError if they do not, if a leaf may be a table as long as the batch, if the batch
    is empty or has no tensor to cut.
    """
    named = _named(paths, leaves, split, partial)
    pairs = zip(paths, leaves, strict=True)
    tensors = {path: leaf for path, leaf in pairs if isinstance(leaf, torch.Tensor) and leaf.ndim}
    rows = {path: leaf.shape[0] for path, leaf in tensors.items() if path not in named}
    cut = {path: tensors[path].shape[dim] for path, dim in named.items() if dim is not None}
    batched = {path: length for path, length in rows.items() if length != 1} or (
        {} if cut else rows
    )
    _require_agreement(batched)
    lengths = {**batched, **cut}
    _require_samples(lengths)
    _refuse_ambiguous({path: tensors[path] for path in batched})
    return tuple(named.get(path, 0 if path in lengths else None) for path in paths), next(
        iter(lengths.values())
    )


def _named(
    paths: Sequence[str], leaves: Sequence[Any], split: Split, partial: bool
) -> dict[str, Cut]:
    """The dimension that `split` gives for each leaf that it names."""
    cuts: dict[str, Cut] = {}
    for name, value in split.items():
        names, inner = (name, f"kwargs['{name}']"), (f"{name}[", f"{name}.")
        matches = [i for i, path in enumerate(paths) if path in names or path.startswith(inner)]
        if not matches and not partial:
            raise PipelineError(
                f"split= names {name!r}, which is not an input; the inputs are {', '.join(paths)}."
            )
        cuts |= {paths[i]: _dimension(paths[i], leaves[i], value) for i in matches}
    return cuts


def _dimension(path: str, leaf: Any, value: bool | int) -> Cut:
    if value is False or leaf is None:
        return None
    if not isinstance(value, int):
        raise PipelineError(
            f"split={{{path!r}: {value!r}}}; expected False, True or the dimension to cut."
        )
    dim = 0 if value is True else value
    if not isinstance(leaf, torch.Tensor):
        raise PipelineError(
            f"split= asks to cut {path}, which is a {type(leaf).__name__}, not a tensor."
        )
    if not -leaf.ndim <= dim < leaf.ndim:
        raise PipelineError(
            f"split= asks to cut dimension {dim} of {path}, which has shape {list(leaf.shape)};"
            " expected one of its dimensions, counted from 0, or False for the whole tensor."
        )
    return dim % leaf.ndim


def _require_agreement(lengths: Mapping[str, int]) -> None:
    """Name the leaves whose dimension 0 is not the most frequent one."""
    if len(set(lengths.values())) <= 1:
        return
    size = Counter(lengths.values()).most_common(1)[0][0]
    uneven = [path for path, length in lengths.items() if length != size]
    batch = [path for path, length in lengths.items() if length == size]
    rows = ", ".join(f"{path} has {lengths[path]} rows" for path in uneven)
    raise PipelineError(
        f"{rows}, the batch {size} ({', '.join(batch)}). If each microbatch needs a part of its own"
        " (offsets of packed documents, patches of pictures), pass"
        " microbatches=[(args, kwargs, target), ...]. For the same whole tensor in every"
        f" microbatch, pass split={dict.fromkeys(uneven, False)}; True instead of False cuts it by"
        " its own length, a number along that dimension."
    )


def _require_samples(lengths: Mapping[str, int]) -> None:
    if not lengths:
        raise PipelineError(
            "the batch has no tensor with a batch dimension; nothing can be split into"
            " microbatches."
        )
    empty = [path for path, length in lengths.items() if length == 0]
    if empty:
        raise PipelineError(
            f"the batch is empty: {', '.join(empty)} has no rows. Skip such a batch."
        )


def _refuse_ambiguous(batched: Mapping[str, torch.Tensor]) -> None:
    """Refuse a table that may only happen to be as long as the batch. The first tensor is the batch
    itself, and so are tensors of its shape (labels alongside token ids). A target has a row per
    sample."""
    batch = {(leaf.shape, leaf.dtype) for leaf in list(batched.values())[:1]}
    for path, leaf in batched.items():
        is_square = leaf.ndim >= 2 and leaf.shape[0] == leaf.shape[1]
        if is_square and not path.startswith("target") and (leaf.shape, leaf.dtype) not in batch:
            raise PipelineError(
                f"{path} has shape {list(leaf.shape)} and the batch size is {leaf.shape[0]}: it may"
                f" be one row per sample or one table for all. Say which: split={{{path!r}: True}}"
                f" or split={{{path!r}: False}}."
            )
