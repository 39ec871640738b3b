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
from zbcompile.persistence.sharded_state import members_of, sharded_values, wanted_state

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
    return str((optimizer.wanted.kind if isinstance(optimizer, PipelineOptimizer) else type(optimizer)).__name__)


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
        wanted, state = wanted_state(optimizer, holding, keys, saved)
        members = list(members_of(optimizer, holding))
    else:
        wanted, state = _wanted_state(optimizer, holding, keys, saved)
        groups = enumerate(group["params"] for group in optimizer.param_groups)
        members = [(number, _name_of(each, optimizer, holding)) for number, group in groups for each in group]
    leaders = _leaders(members, saved)
    for name in leaders.values():
        wanted |= {key: _room(saved[key], "", None, holding) for key in _options_of(name, saved)}
    values = read(wanted)
    optimizer.load_state_dict({"state": state(values), "param_groups": _groups(optimizer, leaders, values)})


def _wanted_state(
    optimizer: Optimizer, holding: Holding, keys: Mapping[str, list[str]], saved: Mapping[str, Any]
) -> tuple[Values, Callable[[Values], dict[int, Values]]]:
    """As `wanted_state`, if every process has all the state of its parameters."""
    members = [(name, parameter) for _, name, parameter in _trained(optimizer, holding)]
    wanted = {
        f"state.{name}.{key}": _room(saved[f"state.{name}.{key}"], name, parameter, holding)
        for name, parameter in members
        for key in keys[name]
    }

    def state(values: Values) -> dict[int, Values]:
        found = [{key: values[f"state.{name}.{key}"] for key in keys[name]} for name, _ in members]
        own = [each if is_distributed(p) else _local(each) for each, (_, p) in zip(found, members, strict=True)]
        return {number: _nested(each) for number, each in enumerate(own) if each}

    return wanted, state


def _leaders(members: Sequence[tuple[int, str]], saved: Mapping[str, Any]) -> dict[int, str]:
    """The member whose options each group gets: the first that has any, as what was frozen may have none."""
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


def _local(found: Values) -> Values:
    """`found` with sharded values as this process's part."""
    return {key: local_part(value) if isinstance(value, torch.Tensor) else value for key, value in found.items()}


def _nested(found: Values) -> Values:
    nested: Values = {}
    for key, value in found.items():
        *path, last = key.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested
