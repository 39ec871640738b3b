"""The state dict of a pipeline's optimizer, under the names of parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.optimizer_parameters import OptimizerParameters, OptimizerTensor
from zbcompile.errors import PipelineError
from zbcompile.model.tensor_shard import local_of
from zbcompile.optimizer.named_state import (
    MEMBERS,
    NamedParameter,
    by_name,
    option_entries,
    state_entries,
    torch_state_dict,
)
from zbcompile.optimizer.optimizer_config import OptimizerConfig
from zbcompile.optimizer.sharded_state import gather_states, names_with_whole_state, scatter_states
from zbcompile.optimizer.trained_parameters import TrainedParameters
from zbcompile.torch_private import step_without_hooks

State = dict[str, Any]
MASTER = "master"


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
        self.stepped: set[torch.Tensor] = set()

    def entries(self, inner: Optimizer, is_checkpoint: bool) -> State:
        """Returns the entries of the state dict; of a checkpoint only what this process writes. The
        state before the first update is that of an update with gradients of zero, but a checkpoint
        has none."""
        tensors, entries = self.parameters.tensors, State()
        states = self._states(inner)
        if not is_checkpoint and not any(states.values()):
            states = self._initial_states(inner)
        for name in self._local_names():
            if not is_checkpoint or self.trained.is_counted(name):
                entries |= option_entries(name, inner.param_groups[self.numbers[name]])
        if self.parameters.zero:
            with self.ranks.watch.position.waiting("the optimizer's state"):
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

    def load(self, state_dict: Mapping[str, Any]) -> tuple[dict[OptimizerTensor, State], State]:
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
        with self.ranks.watch.position.waiting("the optimizer's state"):
            return scatter_states(gathered, tensors, self.parameters.buffers), options

    def load_into(
        self, inner: Optimizer, states: Mapping[OptimizerTensor, State], options: State
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

    def _states(self, inner: Optimizer) -> dict[OptimizerTensor, State]:
        """Returns the state of this process's tensors, with the masters."""
        states = {}
        for entry in self.parameters.tensors:
            state = dict(inner.state.get(entry.tensor, {}))
            if entry.is_master and (state or entry.tensor in self.stepped):
                state[MASTER] = entry.tensor.detach()
            states[entry] = state
        return states

    def _initial_states(self, inner: Optimizer) -> dict[OptimizerTensor, State]:
        """Returns the state that an update with gradients of zero makes."""
        states = {}
        for entry in self.parameters.tensors:
            if not entry.tensor.requires_grad:
                continue
            like = torch.zeros_like(entry.tensor).detach().requires_grad_()
            like.grad = torch.zeros_like(like).detach()
            group = inner.param_groups[self.numbers[entry.name]]
            options = {key: value for key, value in group.items() if key not in MEMBERS}
            optimizer = self.config.make([{**options, "params": [like]}])
            step_without_hooks(optimizer)
            state = dict(optimizer.state.get(like, {}))
            if "step" in state:
                step = state["step"]
                state["step"] = torch.zeros_like(step) if isinstance(step, torch.Tensor) else 0
            states[entry] = state | ({MASTER: entry.tensor.detach()} if entry.is_master else {})
        return states

    def _local_names(self) -> list[str]:
        return [name for name in self.numbers if name in self.trained.local]

    def _member(self, name: str, tensor: torch.Tensor | None = None) -> NamedParameter:
        local = self.trained.local[name]
        return NamedParameter(
            name,
            self.numbers[name],
            local if tensor is None else tensor,
            local,
            self.trained.chunk(name),
        )
