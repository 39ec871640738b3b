"""The state of a pipeline's optimizer under the names of parameters, as
torch.distributed.checkpoint flattens it.

    state.NAME.KEY            what the optimizer keeps of a parameter
    param_groups.NAME.KEY     the options of the group that the parameter is in

torch's `set_optimizer_state_dict` reads it with `flatten_optimizer_state_dict=True`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.optimizer_parameters import OptimizerParameters, OptimizerTensor
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import (
    Chunk,
    TensorShard,
    is_distributed,
    local_of,
    shard_of,
)
from zbcompile.optimizer.optimizer_config import OptimizerConfig
from zbcompile.optimizer.sharded_state import gather_states, names_with_whole_state, scatter_states
from zbcompile.optimizer.trained_parameters import TrainedParameters
from zbcompile.torch_private import step_without_hooks

Values = dict[str, Any]
MASTER = "master"
MEMBERS = ("params", "param_names")  # the keys of a parameter group that list its members


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of an optimizer: the number of its group, and the `tensor` in `param_groups`.

    `local` has the shape and memory layout of this process's part of the parameter, which is at
    `chunk` of the whole; None if the part is all of it.
    """

    name: str
    group: int
    tensor: Tensor
    local: Tensor
    chunk: Chunk | None = None


def state_entries(member: NamedParameter, state: Mapping[Any, Any]) -> Values:
    """Returns the entries `state.NAME.KEY` of a parameter; state of a part of it as shards."""
    entries: Values = {}
    for key, value in state.items():
        if isinstance(value, Mapping) or "." in str(key):
            raise PipelineError(
                f"the optimizer keeps {key}, which is a mapping or has a dot in its name, for"
                f" {member.name}, and a state dict could not name its entries. Use an optimizer"
                " whose state has one level, such as AdamW."
            )
        if is_distributed(value):
            value = shard_of(value)
        elif member.chunk is not None and isinstance(value, Tensor) and value.dim():
            if value.shape != member.local.shape:
                raise PipelineError(
                    f"the optimizer keeps {key} of shape {list(value.shape)} for {member.name}, "
                    f"of which each rank has a part of shape {list(member.local.shape)}; state of "
                    "another shape cannot be reassembled. Use an optimizer that works element by "
                    'element, such as AdamW, or vocab="off".'
                )
            value = TensorShard.of(value, member.chunk)
        entries[f"state.{member.name}.{key}"] = value
    return entries


def option_entries(name: str, group: Mapping[str, Any]) -> Values:
    """Returns the entries `param_groups.NAME.KEY` of a parameter."""
    options = {key: value for key, value in group.items() if key not in MEMBERS}
    return {f"param_groups.{name}.{key}": value for key, value in options.items()}


def by_name(entries: Mapping[str, Any], section: str, names: Collection[str]) -> dict[str, Values]:
    """Returns the entries of a section by the names of parameters, and by key; of other names none.

    >>> by_name({"state.a.b.step": 1, "param_groups.a.b.lr": 2}, "state", {"a.b"})
    {'a.b': {'step': 1}}
    """
    values: dict[str, Values] = {name: {} for name in names}
    for entry, value in entries.items():
        title, _, key = entry.rpartition(".")
        name = title.removeprefix(f"{section}.")
        if name != title and name in values:
            values[name][key] = value
    return values


def torch_state_dict(
    members: Sequence[NamedParameter],
    states: Iterable[Mapping[str, Any]],
    options: Mapping[str, Values],
    groups: Sequence[Mapping[str, Any]],
) -> Values:
    """Returns the argument for `load_state_dict` of a torch optimizer with these groups.

    A group gets the options of its first member that has any: a frozen parameter may have none.
    """
    pairs = enumerate(zip(members, states, strict=True))
    state = {number: _like(member, values) for number, (member, values) in pairs if values}
    saved_groups = []
    for number, group in enumerate(groups):
        group_members = [
            (index, member.name) for index, member in enumerate(members) if member.group == number
        ]
        saved = next((options[name] for _, name in group_members if options.get(name)), None)
        if group_members and saved is None:
            raise PipelineError(
                f"the checkpoint has no optimizer state for {group_members[0][1]}. It was saved"
                " without optimizer=, or with one that did not train it. Load it without"
                " optimizer=."
            )
        current = {key: value for key, value in group.items() if key not in MEMBERS}
        saved_groups.append({**(saved or current), "params": [index for index, _ in group_members]})
    return {"state": state, "param_groups": saved_groups}


def _like(member: NamedParameter, state: Mapping[str, Any]) -> Values:
    """Returns the state with plain tensors, or with DTensors if the optimizer updates a DTensor."""
    plain = {key: local_of(value) for key, value in state.items()}
    user_tensor: Any = member.tensor
    if is_distributed(user_tensor):
        from torch.distributed.tensor import DTensor

        layout = {"run_check": False, "shape": user_tensor.shape, "stride": user_tensor.stride()}
        for key, value in plain.items():
            if isinstance(state[key], TensorShard):
                plain[key] = DTensor.from_local(
                    value, user_tensor.device_mesh, user_tensor.placements, **layout
                )
    return plain


class OptimizerState:
    """Reads and writes the state of a torch optimizer over a pipeline's `parameters`.

    `numbers` has the group of every parameter of the model that it trains; `stepped` its tensors
    that have had an update.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        ranks: Ranks,
        trained: TrainedParameters,
        parameters: OptimizerParameters,
        numbers: Mapping[str, int],
    ) -> None:
        self.config, self.ranks, self.trained = config, ranks, trained
        self.parameters, self.numbers = parameters, numbers
        self.stepped: set[Tensor] = set()

    def entries(self, inner: Optimizer, is_checkpoint: bool) -> Values:
        """Returns the entries of the state dict; of a checkpoint only what this process writes. The
        state before the first update is that of an update with gradients of zero, but a checkpoint
        has none."""
        tensors, entries = self.parameters.tensors, Values()
        states, elementwise = {}, self.config.is_elementwise
        for entry in tensors:
            states[entry] = state = dict(inner.state.get(entry.tensor, {}))
            if entry.is_master and (state or entry.tensor in self.stepped):
                state[MASTER] = entry.tensor.detach()
            for key, value in state.items() if entry.is_part and elementwise else ():
                shape = list(value.shape) if isinstance(value, Tensor) else []
                if shape and shape != list(entry.tensor.shape):
                    raise PipelineError(
                        f"the optimizer keeps {key} of shape {shape} for a part of {entry.name}"
                        f" with shape {list(entry.tensor.shape)}, and a checkpoint cannot put such"
                        " parts together. Pass zero=0."
                    )
        if not is_checkpoint and not any(states.values()):
            states = self._initial_states(inner)
        for name in self._local_names():
            if not is_checkpoint or self.trained.is_counted(name):
                entries |= option_entries(name, inner.param_groups[self.numbers[name]])
        if self.parameters.zero:
            with self.ranks.waiting("the optimizer's state"):
                named = gather_states(states, self.parameters.buffers)
        else:
            named = {tensor.name: state for tensor, state in states.items()}
        uncounted = {entry.name for entry in tensors if is_checkpoint and not entry.counted}
        for name, state in named.items():
            if name not in uncounted:
                entries |= state_entries(self._member(name), state)
        return entries

    def parameters_to_load(self) -> list[NamedParameter]:
        """Returns the parameters whose state `load` takes on this process."""
        if self.parameters.zero:
            return list(map(self._member, names_with_whole_state(self.parameters.buffers)))
        return [self._member(entry.name) for entry in self.parameters.tensors]

    def load(self, state_dict: Mapping[str, Any]) -> tuple[dict[OptimizerTensor, Values], Values]:
        """Returns the state of every tensor, and the options by name, of a state dict. Raises
        PipelineError for state that this process would ignore."""
        names = self._local_names()
        options = by_name(state_dict, "param_groups", names)
        states = by_name(state_dict, "state", names)
        n_entries = sum(len(states[member.name]) for member in self.parameters_to_load())
        if sum(key.startswith("state.") for key in state_dict) != n_entries:
            raise PipelineError(
                "this state dict is of another rank, or another zero=. Load what this rank has"
                " saved, or use zbcompile.save_checkpoint, which any rank can read."
            )
        tensors = self.parameters.tensors
        if not self.parameters.zero:
            return {tensor: dict(states[tensor.name]) for tensor in tensors}, options
        gathered = {
            name: {key: local_of(value) for key, value in state.items()}
            for name, state in states.items()
        }
        with self.ranks.waiting("the optimizer's state"):
            return scatter_states(gathered, tensors, self.parameters.buffers), options

    def load_into(
        self, inner: Optimizer, states: Mapping[OptimizerTensor, Values], options: Values
    ) -> None:
        """Gives `inner` the state of its tensors, and masters their values."""
        by_tensor = {entry.tensor: entry for entry in self.parameters.tensors}
        masters = {
            entry: local_of(state.pop(MASTER)) for entry, state in states.items() if MASTER in state
        }
        ordered = [by_tensor[tensor] for group in inner.param_groups for tensor in group["params"]]
        members = [self._member(entry.name, entry.tensor) for entry in ordered]
        inner.load_state_dict(
            torch_state_dict(
                members, [states[entry] for entry in ordered], options, inner.param_groups
            )
        )
        for entry, master in masters.items():
            entry.tensor.detach().copy_(master)
        self.stepped = {entry.tensor for entry in masters}

    def _initial_states(self, inner: Optimizer) -> dict[OptimizerTensor, Values]:
        """Returns the state that an update with gradients of zero makes."""
        groups = [{**group, "params": list[Tensor]()} for group in inner.param_groups]
        twins = dict[OptimizerTensor, Tensor]()
        for entry in self.parameters.tensors:
            if entry.tensor.requires_grad:
                twin = twins[entry] = torch.zeros_like(entry.tensor).detach().requires_grad_()
                twin.grad = torch.zeros_like(twin).detach()
                groups[self.numbers[entry.name]]["params"].append(twin)
        optimizer, states = self.config.make(groups), dict[OptimizerTensor, Values]()
        step_without_hooks(optimizer)
        for entry, twin in twins.items():
            states[entry] = state = dict(optimizer.state.get(twin, {}))
            if "step" in state:
                state["step"] = state["step"] * 0
            if entry.is_master:
                state[MASTER] = entry.tensor.detach()
        return states

    def _local_names(self) -> list[str]:
        return [name for name in self.numbers if name in self.trained.local]

    def _member(self, name: str, tensor: Tensor | None = None) -> NamedParameter:
        local = self.trained.local[name]
        return NamedParameter(
            name,
            self.numbers[name],
            local if tensor is None else tensor,
            local,
            self.trained.chunk(name),
        )
