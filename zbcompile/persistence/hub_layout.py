"""Weights as the Hub stores them: under which names, and in which pieces, transformers keeps a model's tensors.

A folder may hold a tensor under an older name, without the prefix of the base model, or in pieces (experts one by one).
transformers has the rules, by model; here they say which stored tensors each tensor of the model is made of, so that a
rank reads only those.
"""

import copy
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbcompile.errors import PipelineError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensorAsIs:
    """A tensor that is in a file as it is."""

    key: str
    file: Any

    @property
    def shape(self) -> Shape:
        return tuple(self.file.get_slice(self.key).get_shape())

    @property
    def dtypes(self) -> set[str]:
        """Its dtype in the words of safetensors, such as "BF16"."""
        return {self.file.get_slice(self.key).get_dtype()}

    def read(self, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of it, all if that is empty."""
        found = self.file.get_slice(self.key)[part] if part else self.file.get_tensor(self.key)
        return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TensorStandIn:
    """Stands for the file of a tensor of which only the shape is known."""

    size: Shape

    def get_slice(self, key: str) -> "TensorStandIn":
        return self

    def get_shape(self) -> Shape:
        return self.size


@dataclass(frozen=True)
class TensorConversion:
    """A tensor that transformers makes of others: `pieces` are these, by the pattern of each."""

    name: str
    shape: Shape
    target: str
    converter: Any
    pieces: tuple[tuple[str, StoredTensorAsIs], ...]
    model: Any

    @property
    def dtypes(self) -> set[str]:
        return set[str]().union(*(piece.dtypes for _, piece in self.pieces))

    def read(self, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of it, all if that is empty; every piece is read."""
        tensors = [(pattern, piece.key, piece.read(())) for pattern, piece in self.pieces]
        return _converted(self.target, self.converter, tensors, self.model)[self.name][part]


Stored = StoredTensorAsIs | TensorConversion  # a tensor as files hold it


def stored_tensors(model: Any, files: Mapping[str, Any], loading: bool = False) -> dict[str, Stored]:
    """What `files` (a file by the name of every tensor) hold, by the model's names; what the model does not have is
    under the name in the file. `loading` lets the model keep the rules that it needed, for saving, as from_pretrained
    does. Raises PipelineError for pieces that do not fit together."""
    if not is_pretrained(model):
        return {key: StoredTensorAsIs(key, file) for key, file in files.items()}
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(model)
    names, found = model.state_dict(keep_vars=True), dict[str, Stored]()
    groups: dict[str, list[tuple[str, StoredTensorAsIs]]] = {}
    for key in sorted(files, key=_natural):
        name, pattern = _renamed(key, rules, model.base_model_prefix, names)
        if name in names and pattern is not None:
            groups.setdefault(name, []).append((pattern, StoredTensorAsIs(key, files[key])))
        elif name in names or not _is_ignored(name, model):
            found[name if name in names else key] = StoredTensorAsIs(key, files[key])
    for name, pieces in groups.items():
        found |= _group(name, pieces, rules, model)
    if loading:
        model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return found


def _renamed(key: str, rules: list[Any], prefix: Any, names: dict[str, Any]) -> tuple[str, str | None]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    name, pattern = rename_source_key(key, renamings, converters, prefix, names)
    if name not in names and key in names:
        name, pattern = rename_source_key(key, [], [], prefix, names)
    return name, pattern


def _group(target: str, pieces: list[tuple[str, StoredTensorAsIs]], rules: list[Any], model: Any) -> dict[str, Stored]:
    """The tensors that are made of the same pieces; tensors without memory tell their names and shapes."""
    converter = next(rule for rule in rules if pieces[0][0] in rule.source_patterns)
    described = [(pattern, piece.key, torch.empty(piece.shape, device="meta")) for pattern, piece in pieces]
    made = _converted(target, converter, described, model)
    return {
        name: TensorConversion(name, tuple(tensor.shape), target, converter, tuple(pieces), model)
        for name, tensor in made.items()
    }


def _converted(
    target: str, converter: Any, tensors: Iterable[tuple[str, str, torch.Tensor]], model: Any
) -> dict[str, torch.Tensor]:
    own, keys = copy.deepcopy(converter), []
    for pattern, key, tensor in tensors:
        own.add_tensor(target, key, pattern, tensor)
        keys.append(key)
    try:
        made = own.convert(target, model=model, config=model.config)
    except Exception as error:  # of transformers' operations, which know no names
        raise PipelineError(
            f"{target} cannot be made of {', '.join(keys[:4])} ({len(keys)} tensors): {type(error).__name__}: {error}. "
            "Save the model with this version of transformers, and load that."
        ) from None
    return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}


def as_stored(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These tensors of the model under the names, and in the pieces, that `save_pretrained` writes. Raises
    PipelineError if a file's tensor is made of several, of which these are some."""
    if not is_pretrained(model) or not tensors:
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(model, dict(tensors)))  # type: ignore[arg-type]
    except Exception as error:  # of transformers' operations
        raise PipelineError(
            f"the tensors of this rank cannot be stored as {type(model).__name__}.save_pretrained does "
            f"({type(error).__name__}: {error}). Save one file (a name that ends in .safetensors), which gathers them."
        ) from None


def write_config(folder: Path, model: Any) -> None:
    """The files next to the weights by which `from_pretrained` knows the model; none for other models."""
    if not is_pretrained(model):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def is_pretrained(model: nn.Module) -> bool:
    """Whether this is a model of transformers, which is then imported already."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return base is not None and isinstance(model, base)


def _is_ignored(name: str, model: Any) -> bool:
    """Whether files may hold this tensor without need: the model says so, or it was a saved buffer once."""
    own = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unneeded = {*own, r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}
    return any(re.search(pattern, name) for pattern in unneeded)


def _natural(key: str) -> list[Any]:
    """Experts by their numbers, not by the digits of these."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in key.split(".")]
