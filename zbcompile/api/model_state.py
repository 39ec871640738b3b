"""The state of a pipeline's model: the parameters that live in this process, and eager's state dict
of all."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zbcompile.api.optimizers import Optimizers
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import Parts, is_distributed
from zbcompile.model.held_elsewhere import state_in_process
from zbcompile.model.placements import SHARD, along
from zbcompile.model.tensor_shard import chunk_of, local_of
from zbcompile.optimizer.gradient_norm import total_norm
from zbcompile.program.program import Program
from zbcompile.program_cache.bound_programs import BoundPrograms
from zbcompile.program_cache.state_dict import stream_state


class ModelState:
    """This process's share of a model, once a program has placed it; `parts` are those of its
    DTensors."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        parts: Parts,
        bound: BoundPrograms,
        optimizers: Optimizers,
    ) -> None:
        self._model, self._ranks, self._parts = model, ranks, parts
        self._bound, self._optimizers = bound, optimizers

    @property
    def program(self) -> Program:
        """The first program. Raises PipelineError before there is one."""
        if self._bound.program is None:
            raise PipelineError(
                "the pipeline is not compiled yet, so it is unknown which parameters are this"
                " rank's. Call pipe.compile(*args, target=..., **kwargs) with a batch, or pass"
                " example=, or run a step first."
            )
        return self._bound.program

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters; of other processes' there may be more."""
        return iter([parameter for _, parameter in self.named()])

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters by name, with the values of the last update."""
        self._arrive()
        return iter(self._named().items())

    def _named(self) -> dict[str, nn.Parameter]:
        self._bound.given_out = True
        found = {**self._bound.parameters, **self._parts.parameters}
        return {name: found[name] for name in self._bound.own_names}

    def share(self) -> dict[str, Any]:
        """This process's part of eager's state dict."""
        self._arrive()
        return self._share()

    def _share(self) -> dict[str, Any]:
        own, names, group = self._bound.own_state(), self.program.model.names, self._ranks.group
        if self._bound.shards is not None and group is not None:
            own = self._bound.shards.sharded_state(own, names, group)  # the rows are DTensors
        return self._parts.shown(own, names)

    def require_named_parts(self) -> None:
        """Raises PipelineError if ranks have different parts of a plain tensor under one name,
        which torch.distributed.checkpoint takes for copies."""
        program, mesh = self.program, self._ranks.mesh
        for name in sorted(program.homes.keys() - self._parts.parts.keys()):
            if any(mesh.size(each) > 1 for each in along(program.placement(name), SHARD)):
                raise PipelineError(
                    f"{name} is sharded by hand, so torch.distributed.checkpoint would take its"
                    " parts for copies. Call zbcompile.save_checkpoint, or make it a DTensor."
                )

    def whole(self, frozen: bool) -> dict[str, Any]:
        """Eager's state dict, on every rank; with or without what is `frozen`."""
        self._arrive()
        with self._ranks.watch.region("state_dict"):
            return self._parts.shown(dict(self._stream(frozen)), self.program.model.names)

    def stream(self) -> Iterator[tuple[str, Any]]:
        """Eager's state dict, tensor by tensor."""
        stream = self._stream()
        while (found := self._next_whole(stream)) is not None:
            yield found

    def load(self, state: Mapping[str, Any]) -> None:
        """Copy this process's share out of eager's state dict, in place.

        Strict over the whole model: raises PipelineError, before anything is copied, for keys that
        it lacks or has in addition, and for tensors of another shape. What `share` returned is
        taken too.
        """
        self._arrive()
        if self._load_share(state):
            return
        state, target = (
            self._parts.cut(state, self.program.model.names),
            state_in_process(self._model),
        )
        _check_keys(target, state)
        with torch.no_grad():
            for key, value in self._bound.own_state().items():
                if isinstance(value, torch.Tensor):
                    value.copy_(state[key])
        if self._bound.shards is not None:
            self._bound.shards.load(state)
        self.loaded(state)

    def _load_share(self, state: Mapping[str, Any]) -> bool:
        """Copies this process's part, as torch.distributed.checkpoint has read it, and returns
        True; returns False for another state dict."""
        own = {
            key: value for key, value in self._share().items() if isinstance(value, torch.Tensor)
        }
        if any(key not in state or value.shape != state[key].shape for key, value in own.items()):
            return False
        if state.keys() != self._share().keys() or any(
            chunk_of(own[key]) != chunk_of(state[key]) for key in own
        ):
            return False
        with torch.no_grad():
            for key, value in own.items():
                local_of(value).copy_(local_of(state[key]))
        self.loaded(own)
        return True

    def loaded(self, names: Iterable[str]) -> None:
        """These tensors of this process's share have got their values."""
        self._bound.share.filled(names)
        self._bound.withhold()

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip this process's gradients by the norm of all ranks', and return that."""
        self._optimizers.require_whole_gradients("clip_grad_norm_")
        self._parts.take_gradients()
        bound, held = self._bound, self._bound.parameters
        with self._ranks.watch.region("clip_grad_norm_"):
            rows = frozenset(bound.shards.own) if bound.shards else frozenset()
            norm = total_norm(
                self.program, bound.trained, rows, held, self._ranks, norm_type, error_if_nonfinite
            )
        nn.utils.clip_grads_with_norm_([held[name] for name in bound.own_names], max_norm, norm)
        return norm

    def _arrive(self) -> None:
        """Raise before compiling; wait for the values of the last update."""
        self.program  # noqa: B018
        self._optimizers.arrive()

    def _next_whole(self, stream: Iterator[tuple[str, Any]]) -> tuple[str, Any] | None:
        with self._ranks.watch.region("stream_state_dict"):
            for name, tensor in stream:
                shown = self._parts.shown({name: tensor}, self.program.model.names)[name]
                return name, shown.full_tensor() if is_distributed(shown) else shown
        return None

    def _stream(self, frozen: bool = True) -> Iterator[tuple[str, Any]]:
        self._optimizers.arrive()
        return stream_state(
            self._model, self._ranks, self.program.holders, self._bound.shards, frozen
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
