"""The tensors of a model that this process has, under the model's own names, tied ones only under
the first name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.model.model_info import ModelFacts, facts_of
from zbcompile.model.placements import SHARD, along


@dataclass(frozen=True)
class LocalState:
    """This process's part of a model, of which `module` is the source.

    `tensors` are its entries of eager's state dict, `parameters` what an optimizer trains; parts of
    DTensors and rows of a sharded output layer are DTensors. `shapes` are those of all tensors of
    the whole model, None if only another rank knows. `titles` are the names in a checkpoint by the
    model's own: what is sharded by hand has another name on each rank. `is_writer(name)` is true on
    exactly one of the processes that have the same tensor.
    """

    module: nn.Module
    model: ModelFacts
    shapes: Mapping[str, tuple[int, ...] | None]
    titles: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]
    parameters: Mapping[str, nn.Parameter]
    is_writer: Callable[[str], bool]
    ranks: Ranks


def local_state(source: Pipeline | nn.Module) -> LocalState:
    """Returns this process's part of a compiled pipeline; of a plain model, all of it."""
    if isinstance(source, Pipeline):
        return _of_pipeline(source)
    if not isinstance(source, nn.Module):
        raise PipelineError(
            f"expected a pipeline or an nn.Module, received {type(source).__name__}."
        )
    facts = facts_of(source, {})
    device = next((tensor.device for tensor in source.parameters()), torch.device("cpu"))
    shapes, tensors = _shapes(facts), _untied(source.state_dict(), facts)
    parameters, titles = dict(source.named_parameters()), {name: name for name in shapes}
    return LocalState(
        source, facts, shapes, titles, tensors, parameters, lambda _: True, Ranks(1, device)
    )


def _of_pipeline(pipe: Pipeline) -> LocalState:
    facts, ranks, mesh = pipe.program.model, pipe.ranks, pipe.ranks.mesh
    shapes, titles = dict[str, tuple[int, ...] | None](), dict[str, str]()
    for name, shape in _shapes(facts).items():
        by_hand = [d for d in along(pipe.program.placement(name), SHARD) if mesh.size(d) > 1]
        if name in pipe.parts:
            by_hand, shape = [], tuple(pipe.parts[name].whole.shape)
        # only the model knows how a tensor that it shards by hand would become whole
        for place in product(*(range(mesh.size(d)) for d in by_hand)):
            parts = [f"{d} {i} of {mesh.size(d)}" for d, i in zip(by_hand, place, strict=True)]
            title = f"{name} ({', '.join(parts)})" if parts else name
            shapes[title] = None
            if place == tuple(map(mesh.index, by_hand)):
                titles[name], shapes[title] = title, shape
    names = {title: name for name, title in titles.items()}
    tensors = {titles[name]: tensor for name, tensor in _untied(pipe.state_dict(), facts).items()}
    parameters = {titles[name]: parameter for name, parameter in pipe.named_parameters()}

    def is_writer(title: str) -> bool:
        name = names[title]
        shards = along(pipe.program.placement(name), SHARD)
        replicas = [dimension for dimension in mesh.beside("pp") if dimension not in shards]
        is_rows = title in tensors and is_distributed(tensors[title]) and name not in pipe.parts
        has_first = is_rows or pipe.program.holders(name)[0] in ranks.local
        return has_first and mesh.index(*replicas) == 0

    return LocalState(pipe.model, facts, shapes, titles, tensors, parameters, is_writer, ranks)


def _shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    return {
        member.name: member.shape
        for member in facts.members
        if member.saved and member.first == member.name
    }


def _untied(state: Mapping[str, Any], facts: ModelFacts) -> dict[str, torch.Tensor]:
    return {
        k: v for k, v in state.items() if isinstance(v, torch.Tensor) and facts.names.get(k, k) == k
    }


def require_names(path: Path, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raises PipelineError if what was saved lacks names of the model, or has others."""
    if missing or unexpected:
        raise PipelineError(
            f"{path} is of another model: missing {missing[:4] or 'nothing'}, unexpected"
            f" {unexpected[:4] or 'nothing'}."
        )
