"""The state of a pipeline's model: this process's parameters, and eager's state dict of all."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zbcompile.api.optimizers import Optimizers
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.model.placements import SHARD, along
from zbcompile.model.remote_tensors import local_state_dict
from zbcompile.model.tensor_shard import chunk_of, local_of
from zbcompile.optimizer.gradient_norm import total_norm
from zbcompile.program.program import Program
from zbcompile.program_cache.binding import ModelBinding
from zbcompile.program_cache.state_dict import stream_state


class ModelState:
    """This process's share of a model, once a program has placed it. Every method first completes
    the last update."""

    def __init__(self, binding: ModelBinding, optimizers: Optimizers) -> None:
        self._binding, self._optimizers = binding, optimizers
        self._ranks, self._parts = binding.ranks, binding.parts

    @property
    def program(self) -> Program:
        """The program that placed the parameters. Raises PipelineError before there is one."""
        if self._binding.program is None:
            raise PipelineError(
                "the pipeline is not compiled yet, so it is unknown which parameters are this"
                " rank's. Call pipe.compile(*args, target=..., **kwargs) with a batch, or pass"
                " example=, or run a step first."
            )
        return self._binding.program

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Returns this process's parameters by name, DTensors as such."""
        self._wait()
        parameters = {**self._binding.parameters, **self._parts.parameters}
        return {name: parameters[name] for name in self._binding.local_names}

    def share(self) -> dict[str, Any]:
        """Returns this process's part of eager's state dict."""
        self._wait()
        state, names = self._binding.local_state(), self.program.model.names
        shards, group = self._binding.shards, self._ranks.group
        if shards is not None and group is not None:
            state = shards.sharded_state(state, names, group)  # the rows are DTensors
        return self._parts.shown(state, names)

    def require_named_parts(self) -> None:
        """Raises PipelineError if ranks have different parts of a plain tensor under one name,
        which torch.distributed.checkpoint takes for copies."""
        program, mesh = self.program, self._ranks.mesh
        for name in sorted(program.homes.keys() - self._parts.parts.keys()):
            if any(mesh.size(dim) > 1 for dim in along(program.placement(name), SHARD)):
                raise PipelineError(
                    f"{name} is sharded by hand, so torch.distributed.checkpoint would take its"
                    " parts for copies. Call zbcompile.save_checkpoint, or make it a DTensor."
                )

    def full(self, frozen: bool) -> dict[str, Any]:
        """Returns eager's state dict on every rank, with or without what is frozen."""
        with self._ranks.watch.region("state_dict"):
            return self._parts.shown(dict(self._stream(frozen)), self.program.model.names)

    def stream(self) -> Iterator[tuple[str, Any]]:
        """Yields eager's state dict, tensor by tensor."""
        stream = self._stream()
        while True:
            with self._ranks.watch.region("stream_state_dict"):
                item = next(stream, None)
                if item is None:
                    return
                name, tensor = item
                tensor = self._parts.shown({name: tensor}, self.program.model.names)[name]
                tensor = tensor.full_tensor() if is_distributed(tensor) else tensor
            yield name, tensor

    def _stream(self, frozen: bool = True) -> Iterator[tuple[str, Any]]:
        self._wait()
        binding = self._binding
        return stream_state(
            binding.model, self._ranks, self.program.holders, binding.shards, frozen
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Copies this process's share out of eager's state dict, in place.

        Strict over the whole model: raises PipelineError, before anything is copied, for keys that
        it lacks or has in addition, and for tensors of another shape. The result of `share` is
        accepted too.
        """
        share = self.share()
        if _is_share(state, share):
            for key, value in share.items():
                if isinstance(value, torch.Tensor):
                    local_of(value).detach().copy_(local_of(state[key]).detach())
        else:
            state = self._parts.cut(state, self.program.model.names)
            _check_keys(local_state_dict(self._binding.model), state)
            for key, value in self._binding.local_state().items():
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    value.detach().copy_(state[key].detach())
            if self._binding.shards is not None:
                self._binding.shards.load(state)
        self.filled(state)

    def filled(self, names: Iterable[str]) -> None:
        """Records that these tensors of this process's share have their values."""
        self._binding.share.filled(names)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Clips this process's gradients by the norm of all ranks', and returns that."""
        self._optimizers.require_whole_gradients("clip_grad_norm_")
        self._parts.take_gradients()
        binding, parameters = self._binding, self._binding.parameters
        with self._ranks.watch.region("clip_grad_norm_"):
            rows = frozenset(binding.shards.own) if binding.shards else frozenset()
            norm = total_norm(
                self.program,
                binding.trained,
                rows,
                parameters,
                self._ranks,
                norm_type,
                error_if_nonfinite,
            )
        local = [parameters[name] for name in binding.local_names]
        nn.utils.clip_grads_with_norm_(local, max_norm, norm)
        return norm

    def _wait(self) -> None:
        """Blocks until the last update is complete. Raises PipelineError before compiling."""
        self.program  # noqa: B018
        self._optimizers.wait()


def _is_share(state: Mapping[str, Any], share: Mapping[str, Any]) -> bool:
    """Returns True for this process's part, as torch.distributed.checkpoint has read it."""
    if state.keys() != share.keys():
        return False
    tensors = {key: value for key, value in share.items() if isinstance(value, torch.Tensor)}
    return all(
        value.shape == state[key].shape and chunk_of(value) == chunk_of(state[key])
        for key, value in tensors.items()
    )


def _check_keys(target: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    missing, unexpected = sorted(set(target) - set(state)), sorted(set(state) - set(target))
    if missing or unexpected:
        raise PipelineError(
            f"the state dict does not fit the model: missing {missing or 'nothing'}, unexpected"
            f" {unexpected or 'nothing'}. load_state_dict takes the full dict, as"
            " model.state_dict() or pipe.state_dict(full=True) makes it."
        )
    for key, value in target.items():
        if isinstance(value, torch.Tensor) and value.shape != state[key].shape:
            raise PipelineError(
                f"{key} has shape {list(state[key].shape)} in the state dict and"
                f" {list(value.shape)} in the model."
            )
