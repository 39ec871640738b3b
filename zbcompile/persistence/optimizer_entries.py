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
from zbcompile.persistence.local_state import LocalState


def class_name(optimizer: Any) -> str:
    """Returns the name of the class that does the updates. Raises PipelineError for several at
    once."""
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

    `stored` has the shape and dtype of every tensor of it, None for other values; `values` has
    these. `read` fills tensors in place, by their names in the checkpoint.
    """
    divided = isinstance(optimizer, PipelineOptimizer) and optimizer.parameters.zero
    if isinstance(optimizer, PipelineOptimizer):
        titles, members = state.titles, optimizer.parameters_to_load()
        names = set(optimizer.trained.local)
    else:
        titles, members = {name: name for name in state.shapes}, list(_members(optimizer, state))
        names = {value.name for value in members}
    names_by_title = {title: name for name, title in titles.items() if name in names}
    keys = by_name(stored, "state", names_by_title)
    entries: Values = {}
    for member in members:
        title = titles[member.name]
        for key, tensor in keys[title].items():
            entry = f"state.{title}.{key}"
            if tensor is None:
                entries[entry] = values[f"optimizer.{entry}"]
            else:
                device = "cpu" if divided else None
                entries[entry] = empty_entry(member, key, tensor.shape, tensor.dtype, device)
    read(
        {
            f"optimizer.{key}": value
            for key, value in entries.items()
            if isinstance(value, torch.Tensor)
        }
    )
    for title, options in by_name(stored, "param_groups", names_by_title).items():
        for key, tensor in options.items():
            entry = f"param_groups.{title}.{key}"
            if tensor is not None:
                read(
                    {
                        f"optimizer.{entry}": (
                            option := torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        )
                    }
                )
            entries[entry] = values[f"optimizer.{entry}"] if tensor is None else option
    if isinstance(optimizer, PipelineOptimizer):
        optimizer.load_state_dict(_renamed(entries, names_by_title))
        return
    states, options = (
        by_name(entries, "state", names_by_title),
        by_name(entries, "param_groups", names_by_title),
    )
    states_of_members = [states[member.name] for member in members]
    optimizer.load_state_dict(
        torch_state_dict(members, states_of_members, options, optimizer.param_groups)
    )


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
