"""The state of an optimizer in a checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zbcompile.errors import PipelineError
from zbcompile.model.tensor_shard import chunk_of, local_of
from zbcompile.optimizer.named_state import (
    NamedParameter,
    Values,
    by_name,
    empty_entry,
    option_entries,
    state_entries,
    torch_state_dict,
)
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer
from zbcompile.persistence.checkpoint_values import from_data
from zbcompile.persistence.local_state import LocalState


def class_name(optimizer: Any) -> str | None:
    """Returns the name of the class that does the updates, None without an optimizer. Raises
    PipelineError for several at once."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        text = f"optimizer= received a {type(optimizer).__name__}; expected one torch optimizer."
        raise PipelineError(f"{text} Save each of several in a folder of its own.")
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
                    entries[entry] = empty_entry(by_member[title], key, size, dtype, device)
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
