"""The tensors of a model that this process has, under the model's own names, tied ones only under
the first name; and the state of their optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import TensorShard, chunk_of, is_distributed, local_of
from zbcompile.model.model_info import ModelFacts, facts_of
from zbcompile.model.placements import SHARD, along
from zbcompile.optimizer.optimizer_state import (
    NamedParameter,
    Values,
    by_name,
    option_entries,
    state_entries,
    torch_state_dict,
)
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer
from zbcompile.persistence.checkpoint_values import from_data


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


# The state of an optimizer in a checkpoint


def class_name(optimizer: Any) -> str | None:
    """Returns the name of the class that does the updates, None without an optimizer. Raises
    PipelineError for several at once."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        raise PipelineError(
            f"optimizer= received a {type(optimizer).__name__}; expected one torch optimizer. Save"
            " each of several in a folder of its own."
        )
    return (
        optimizer.config.kind if isinstance(optimizer, PipelineOptimizer) else type(optimizer)
    ).__name__


def optimizer_entries(optimizer: Optimizer, state: LocalState) -> Values:
    """Returns the state that this process writes, by the parameters' names in a checkpoint."""
    if isinstance(optimizer, PipelineOptimizer):
        return _renamed(optimizer.checkpoint_state(), state.titles)
    entries: Values = {}
    for member in _members(optimizer, state):
        if state.is_writer(member.name):
            entries |= state_entries(member, optimizer.state.get(member.tensor, {}))
            entries |= option_entries(member.name, optimizer.param_groups[member.group])
    return entries


def load_optimizer(
    optimizer: Optimizer,
    state: LocalState,
    stored: Mapping[str, Any],
    values: Values,
    read: Callable[[Values], None],
) -> None:
    """Gives an optimizer the state of a checkpoint.

    `stored` has the metadata of every tensor of it, None for other values; `values` has these as
    data. `read` fills tensors in place, by their names in the checkpoint.
    """
    if isinstance(optimizer, PipelineOptimizer):
        device = "cpu" if optimizer.parameters.zero else None
        titles, members = state.titles, optimizer.parameters_to_load()
        names = set(optimizer.trained.local)
    else:
        titles, members = {name: name for name in state.shapes}, list(_members(optimizer, state))
        names, device = {member.name for member in members}, None
    by_title = {title: name for name, title in titles.items() if name in names}
    by_member = {titles[member.name]: member for member in members}
    entries: Values = {}
    for section in ("state", "param_groups"):
        for title, keys in by_name(stored, section, by_title).items():
            for key, tensor in keys.items():
                entry = f"{section}.{title}.{key}"
                if tensor is None:
                    entries[entry] = from_data(values[f"optimizer.{entry}"], {})
                    continue
                size, dtype = tensor.size, tensor.properties.dtype
                if section == "param_groups":
                    entries[entry] = torch.empty(size, dtype=dtype, device="cpu")
                elif title in by_member:
                    entries[entry] = _empty_entry(by_member[title], key, size, dtype, device)
    read({f"optimizer.{key}": v for key, v in entries.items() if isinstance(v, torch.Tensor)})
    entries = _renamed(entries, by_title)
    if not isinstance(optimizer, PipelineOptimizer):
        states = by_name(entries, "state", names)
        entries = torch_state_dict(
            members,
            [states[member.name] for member in members],
            by_name(entries, "param_groups", names),
            optimizer.param_groups,
        )
    optimizer.load_state_dict(entries)


def _members(optimizer: Optimizer, state: LocalState) -> Iterator[NamedParameter]:
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise PipelineError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not"
                    " one of this process's. Make it with pipe.parameters(), or model.parameters()"
                    " for a plain model, after compiling or loading."
                )
            chunk = chunk_of(state.tensors.get(name))
            yield NamedParameter(name, number, parameter, local_of(parameter), chunk)


def _renamed(entries: Values, names: Mapping[str, str]) -> Values:
    """Returns entries under other names of parameters."""
    if all(name == new_name for name, new_name in names.items()):
        return entries
    return {
        f"{section}.{names[name]}.{key}": value
        for section in ("state", "param_groups")
        for name, state in by_name(entries, section, names).items()
        for key, value in state.items()
    }


def _empty_entry(
    member: NamedParameter, key: str, shape: Sequence[int], dtype: torch.dtype, device: Any = None
) -> torch.Tensor:
    """Returns memory for an entry to be read into: as large as this process's part of the parameter
    if the entry has the parameter's shape."""
    full_shape = tuple(member.local.shape) if member.chunk is None else member.chunk[0]
    if tuple(shape) != full_shape or key == "step":  # a parameter may have the shape of a step: ()
        return torch.empty(shape, dtype=dtype, device="cpu")
    device = device or member.local.device
    local = torch.empty_like(member.local, dtype=dtype, device=device, requires_grad=False)
    return local if member.chunk is None else TensorShard.of(local, member.chunk)
