"""Weights as the Hub stores them: under which names, and in which pieces, transformers keeps a
model's tensors.

A folder may hold a tensor under an older name, without the prefix of the base model, or in pieces
(experts one by one). transformers has the rules, by model; here they say which stored tensors each
tensor of the model is made of, so that a rank reads only those.
"""

import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbcompile.errors import PipelineError
from zbcompile.model.module_tensors import local_state_allowed

Shape = tuple[int, ...]
# the pattern, the name and the values of stored tensors
Pieces = Iterable[tuple[str, str, torch.Tensor]]
Convert = Callable[[Pieces], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class HubTensor:
    """A tensor of the model, and the names of its stored tensors with their patterns. `convert`
    joins several."""

    name: str
    shape: Shape
    pieces: tuple[tuple[str, str], ...]
    convert: Convert | None = None

    def dtypes(self, files: Mapping[str, Any]) -> list[str]:
        """Returns the dtypes of the stored tensors in the words of safetensors, such as "BF16"."""
        return sorted({files[key].get_slice(key).get_dtype() for _, key in self.pieces})

    def read(self, files: Mapping[str, Any], part: tuple[slice, ...]) -> torch.Tensor:
        """Returns a part of it, all if that is empty; of several stored tensors every one
        is read."""
        if self.convert is not None:
            tensors = [(pattern, key, files[key].get_tensor(key)) for pattern, key in self.pieces]
            return self.convert(tensors)[self.name][part]
        ((_, key),) = self.pieces
        return files[key].get_slice(key)[part] if part else files[key].get_tensor(key)  # type: ignore[no-any-return]


def hub_tensors(
    model: Any, shapes: Mapping[str, Shape], loading: bool = False
) -> dict[str, HubTensor]:
    """Returns what stored tensors of these shapes are, by the model's names; what the model does
    not have is under its stored name. `loading` lets the model keep the rules that it needed, for
    saving, as from_pretrained does. Raises PipelineError for tensors that do not fit together."""
    if not is_pretrained(model):
        return {key: HubTensor(key, shape, (("", key),)) for key, shape in shapes.items()}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key

    rules = get_model_conversion_mapping(model)
    with local_state_allowed():  # for the names
        names, tensors = model.state_dict(keep_vars=True), dict[str, HubTensor]()
    groups: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(shapes, key=dot_natural_key):
        name, pattern = _renamed(key, rules, model.base_model_prefix, names)
        if name in names and pattern is not None:
            groups.setdefault(name, []).append((pattern, key))
        elif name in names or not _is_ignored(name, model):
            target_name = name if name in names else key
            tensors[target_name] = HubTensor(target_name, shapes[key], (("", key),))
    for target, pieces in groups.items():
        rule = next(rule for rule in rules if pieces[0][0] in rule.source_patterns)
        convert = partial(_converted, target, rule, model)
        placeholders = [
            (pattern, key, torch.empty(shapes[key], device="meta")) for pattern, key in pieces
        ]
        for name, tensor in convert(placeholders).items():
            tensors[name] = HubTensor(name, tuple(tensor.shape), tuple(pieces), convert)
    if loading:
        model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return tensors


def _renamed(
    key: str, rules: list[Any], prefix: Any, names: dict[str, Any]
) -> tuple[str, str | None]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    name, pattern = rename_source_key(key, renamings, converters, prefix, names)
    if name not in names and key in names:
        name, pattern = rename_source_key(key, [], [], prefix, names)
    return name, pattern


def _converted(target: str, converter: Any, model: Any, tensors: Pieces) -> dict[str, torch.Tensor]:
    operation, keys = copy.deepcopy(converter), []
    for pattern, key, tensor in tensors:
        operation.add_tensor(target, key, pattern, tensor)
        keys.append(key)
    try:
        results = operation.convert(target, model=model, config=model.config)
    except Exception as error:  # of transformers' operations, which know no names
        raise PipelineError(
            f"{target} cannot be made of {', '.join(keys[:4])} ({len(keys)} tensors):"
            f" {type(error).__name__}: {error}. Save the model with this version of transformers,"
            " and load that."
        ) from None
    return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def as_stored(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors of the model under the names, and in the pieces, of `save_pretrained`.
    Raises PipelineError if a file's tensor is made of several, of which these are some."""
    if not is_pretrained(model) or not tensors:
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(model, dict(tensors)))  # type: ignore[arg-type]
    except Exception as error:  # of transformers' operations
        raise PipelineError(
            f"the tensors of this rank cannot be stored as {type(model).__name__}.save_pretrained"
            f" does ({type(error).__name__}: {error}). Save one file (a name that ends in"
            " .safetensors), which gathers them."
        ) from None


def write_config(folder: Path, model: Any) -> None:
    """The files next to the weights by which `from_pretrained` knows the model; none for other
    models."""
    if not is_pretrained(model):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def is_pretrained(model: nn.Module) -> bool:
    """Returns True for a model of transformers, which is then imported."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return base is not None and isinstance(model, base)


def _is_ignored(name: str, model: Any) -> bool:
    """Returns True for a stored tensor that the model ignores, or that was a saved buffer in an
    older release."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unneeded = {*ignored, r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}
    return any(re.search(pattern, name) for pattern in unneeded)
