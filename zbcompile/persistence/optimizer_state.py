"""An optimizer's state under the names of parameters, as `torch.distributed.checkpoint.state_dict` flattens it:

    state.NAME.KEY            what the optimizer keeps of a parameter
    param_groups.NAME.KEY     the options of the group that the parameter is in

torch's own `set_optimizer_state_dict` reads it with `StateDictOptions(flatten_optimizer_state_dict=True)`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.optimizer.pipeline_optimizer import MASTER, PipelineOptimizer
from zbcompile.persistence.local_tensors import Holding, like_rows, local_part
from zbcompile.persistence.sharded_state import ParameterState, members_of, sharded_values, state_of_slice

Values = dict[str, Any]
MEMBERS = ("params", "param_names")  # the keys of a parameter group that list its members


def optimizer_values(optimizer: Optimizer, holding: Holding) -> Values:
    """The state that this process writes. Tensors are the optimizer's own; of sharded rows they are DTensors."""
    values: Values = {}
    if isinstance(optimizer, PipelineOptimizer) and optimizer.slices.divided:
        for number, name in members_of(optimizer, holding):
            values |= _options_of_group(optimizer.param_groups[number], name) if holding.writes(name) else {}
        return values | sharded_values(optimizer, holding)
    for group, name, parameter in _trained(optimizer, holding):
        if holding.writes(name):
            for key, value in _flat(_state_of(optimizer, parameter)):
                values[f"state.{name}.{key}"] = _as_rows(value, name, key, parameter, holding)
            values |= _options_of_group(group, name)
    return values


def _options_of_group(group: Mapping[str, Any], name: str) -> Values:
    return {f"param_groups.{name}.{key}": value for key, value in group.items() if key not in MEMBERS}


def _state_of(optimizer: Optimizer, tensor: torch.Tensor) -> Mapping[str, Any]:
    """What the optimizer keeps of a parameter, with the master that it updates in its place."""
    state = optimizer.state.get(tensor, {})
    master = isinstance(optimizer, PipelineOptimizer) and optimizer.keeps_master(tensor)
    return {**state, MASTER: tensor.detach()} if master else state


def kind_of(optimizer: Any) -> str:
    """The name of the class that does the updates. Raises PipelineError for several at once."""
    if not isinstance(optimizer, Optimizer):
        text = f"optimizer= received a {type(optimizer).__name__}; expected one torch optimizer."
        raise PipelineError(f"{text} Save each of several in a folder of its own.")
    return str((optimizer.request.kind if isinstance(optimizer, PipelineOptimizer) else type(optimizer)).__name__)


def _trained(optimizer: Optimizer, holding: Holding) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, _name_of(parameter, optimizer, holding), parameter


def _name_of(tensor: torch.Tensor, optimizer: Optimizer, holding: Holding) -> str:
    if isinstance(optimizer, PipelineOptimizer):
        return holding.name_of(optimizer.slices.of_tensor(tensor).shown)
    return holding.name_of(tensor)


def _flat(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", each) for inner, each in _flat(value))
        else:
            yield str(key), value


def _as_rows(value: Any, name: str, key: str, parameter: torch.Tensor, holding: Holding) -> Any:
    """`value` as a DTensor if it belongs to the rows of a sharded parameter; a single number is equal on all ranks."""
    rows = holding.tensors.get(name)
    if rows is None or not is_distributed(rows) or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if is_distributed(parameter):  # torch's optimizers keep DTensors for it
        return value
    if value.shape != parameter.shape:
        raise PipelineError(
            f"the optimizer keeps {key} of shape {list(value.shape)} for {name}, of which each rank has rows of shape "
            f"{list(parameter.shape)}; state of another shape cannot be reassembled. Use an optimizer that "
            'works element by element, such as AdamW, or vocab="off".'
        )
    return like_rows(value, rows)


def state_keys(saved: Mapping[str, Any], holding: Holding) -> dict[str, list[str]]:
    """Which `state.NAME.KEY` a checkpoint has, by the names of this process's parameters."""
    found: dict[str, list[str]] = {name: [] for name in holding.parameters}
    for key in saved:
        name, rest = key.removeprefix("state."), ""
        while key.startswith("state.") and name and name not in found:
            name, _, last = name.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
        if rest and name:
            found[name].append(rest)
    return found


def load_optimizer(
    optimizer: Optimizer, holding: Holding, saved: Mapping[str, Any], read: Callable[[Values], Values]
) -> None:
    """Give `optimizer` the state of a checkpoint.

    `saved` describes every value of it: a tensor's dtype and shape, None for anything else. `read` fills a mapping of
    tensors and None with the values.
    """
    keys = state_keys(saved, holding)
    if isinstance(optimizer, PipelineOptimizer) and optimizer.slices.divided:
        slices = [optimizer.slices.of_tensor(each) for group in optimizer.param_groups for each in group["params"]]
        states = [state_of_slice(each, holding, keys[holding.name_of(each.shown)], saved) for each in slices]
        members = list(members_of(optimizer, holding))
    else:
        trained = list(_trained(optimizer, holding))
        states = [_state_of_parameter(name, each, holding, keys[name], saved) for _, name, each in trained]
        groups = enumerate(group["params"] for group in optimizer.param_groups)
        members = [(number, _name_of(each, optimizer, holding)) for number, group in groups for each in group]
    wanted = {key: room for each in states for key, room in each.wanted.items()}
    leaders = _leaders(members, saved)
    for name in leaders.values():
        wanted |= {key: _room(saved[key], "", None, holding) for key in _options_of(name, saved)}
    values = read(wanted)
    state = {number: _nested(each.loaded(values)) for number, each in enumerate(states) if each.room}
    optimizer.load_state_dict({"state": state, "param_groups": _groups(optimizer, leaders, values)})


def _state_of_parameter(
    name: str, parameter: torch.Tensor, holding: Holding, keys: Sequence[str], saved: Mapping[str, Any]
) -> ParameterState:
    """Room for the entries `keys` of the state of a parameter that no replica holds divided."""
    state = ParameterState(name, {}, {})
    for key in keys:
        state.room[key] = room = _room(saved[f"state.{name}.{key}"], name, parameter, holding)
        if is_distributed(room) and not is_distributed(parameter):  # this rank's rows, which the optimizer has plain
            state.own[key] = local_part(room)
    return state


def _leaders(members: Sequence[tuple[int, str]], saved: Mapping[str, Any]) -> dict[int, str]:
    """The parameter whose saved options each group gets, by its number: the first with any; a frozen one may have
    none."""
    known = {key.rpartition(".")[0] for key in saved}
    last = members[::-1]
    return {**dict(last), **{number: name for number, name in last if f"param_groups.{name}" in known}}


def _options_of(name: str, saved: Mapping[str, Any]) -> list[str]:
    prefix = f"param_groups.{name}."
    found = [key for key in saved if key.startswith(prefix)]
    if not found:
        raise PipelineError(
            f"the checkpoint has no optimizer state for {name}. It was saved without optimizer=, or with one that did "
            "not train it. Load it without optimizer=."
        )
    return found


def _room(described: Any, name: str, parameter: torch.Tensor | None, holding: Holding) -> Any:
    """An empty tensor for a value to be read into, laid out as its parameter if their shapes are equal."""
    if described is None:
        return None
    rows = holding.tensors.get(name)
    if parameter is not None and rows is not None and described.shape == tuple(rows.shape):
        own = torch.empty_like(parameter, dtype=described.dtype, requires_grad=False)
        return like_rows(own, rows) if is_distributed(rows) and not is_distributed(own) else own
    return torch.empty(described.shape, dtype=described.dtype, device="cpu")


def _groups(optimizer: Optimizer, leaders: Mapping[int, str], values: Values) -> list[Values]:
    """The options in the form of `Optimizer.load_state_dict`: parameters by number, in the order of the groups."""
    groups: list[Values] = []
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in MEMBERS}
        if index in leaders:
            prefix = f"param_groups.{leaders[index]}."
            options = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        groups.append({**options, "params": list(range(number, number + len(group["params"])))})
        number += len(group["params"])
    return groups


def _nested(found: Values) -> Values:
    nested: Values = {}
    for key, value in found.items():
        *path, last = key.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested
