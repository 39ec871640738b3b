"""The state of a pipeline's model: this process's parameters, and eager's state dict of all."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbcompile.api.optimizers import Optimizers
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import chunk_of, is_distributed, local_of
from zbcompile.model.model_info import first_names
from zbcompile.model.module_tensors import local_state_dict
from zbcompile.model.placements import SHARD, along
from zbcompile.program.program import Program
from zbcompile.program_cache.binding import ModelBinding


class ModelState:
    """The parameters and the state dicts of a pipeline's model.

    Of each process they are its share, once a program has placed it. Every method first completes
    the last update of the optimizers.
    """

    step_index: int = 0
    _binding: ModelBinding
    _optimizers: Optimizers
    _ranks: Ranks

    @property
    def program(self) -> Program:
        """The compiled program (of the first shapes that were compiled). Raises PipelineError
        before there is one."""
        if self._binding.program is None:
            raise PipelineError(
                "the pipeline is not compiled yet, so it is unknown which parameters are this"
                " rank's. Call pipe.compile(*args, target=..., **kwargs) with a batch, or pass"
                " example=, or run a step first."
            )
        return self._binding.program

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer. Tied parameters appear once.

        `torch.nn.utils.clip_grad_norm_` of them is refused where other processes have gradients
        too.
        """
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the model's own names; DTensors if the model had them as
        such."""
        self._complete_updates()
        parameters = {**self._binding.parameters, **self._binding.parts.parameters}
        return ((name, parameters[name]) for name in self._binding.local_names)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this process's parameters, like `model.zero_grad`."""
        for parameter in self.parameters():
            if parameter.grad is not None and not set_to_none:
                parameter.grad.zero_()
            elif set_to_none:
                parameter.grad = None

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips the gradients of the whole model, like `torch.nn.utils.clip_grad_norm_`.

        Every rank clips its share by the norm of all gradients, with tied parameters counted once,
        and returns that norm."""
        self._optimizers.require_whole_gradients("clip_grad_norm_")
        binding = self._binding
        binding.parts.take_gradients()
        with self._ranks.watch.region("clip_grad_norm_"):
            norm = self._total_norm(norm_type)
            if error_if_nonfinite and not torch.isfinite(norm):
                text = f"the norm of the gradients is {norm.item()}, so they cannot be clipped."
                raise self._ranks.watch.on_all_ranks(RuntimeError(text))
        local = [binding.parameters[name] for name in binding.local_names]
        nn.utils.clip_grads_with_norm_(local, max_norm, norm)
        return norm

    def _total_norm(self, norm_type: float) -> Tensor:
        """Returns on every rank the norm of the gradients of the trained parameters: for the same
        gradients bit for bit that of `torch.nn.utils.get_total_norm` over the whole model.

        Each rank contributes the norms of the parameters that it is the first to hold, and zeros
        for all others; so the sum over the ranks is the list of all norms in the model's order. A
        sharded parameter has a norm per part: along dimensions of the mesh, and per pipeline rank
        for rows of an output layer.
        """
        binding, ranks, mesh = self._binding, self._ranks, self._ranks.mesh
        rows = binding.shards.own if binding.shards else {}
        trained = (p.dtype for name, p in binding.parameters.items() if name in binding.trained)
        dtype = torch.float64 if torch.float64 in trained else torch.float32
        norms = list[Tensor]()
        for name in (name for name in binding.parameters if name in binding.trained):
            split = along(self.program.placement(name), SHARD)
            gradient = binding.parameters[name].grad
            is_first = mesh.index(*mesh.beside("pp", "dp", *split)) == 0
            for rank in range(ranks.count) if name in rows else self.program.holders(name)[:1]:
                for part in range(mesh.size(*split)):
                    norm = torch.zeros((), dtype=dtype, device=ranks.device)
                    here = rank in ranks.local and mesh.index(*split) == part and is_first
                    if here and gradient is not None:
                        norm = torch.linalg.vector_norm(gradient, norm_type).to(norm)
                    norms.append(norm)
        total = torch.stack(norms) if norms else torch.zeros(0, device=ranks.device)
        if ranks.group is not None:  # of all ranks that train on this batch
            with ranks.waiting("the norm of all gradients"):
                beside = mesh.group(*mesh.beside("dp"))
                dist.all_reduce(total, group=beside or ranks.group)
        return torch.linalg.vector_norm(total, norm_type)

    def state_dict(self, full: bool = False, frozen: bool = True) -> dict[str, Any]:
        """Eager's state dict: this process's share, or with `full=True` all of it, on every rank;
        `frozen=False` then leaves out what is not trained, such as the base of adapters.

        Of an output layer sharded over several processes the share is a DTensor of this process's
        rows. torch.distributed.checkpoint calls this for `{"model": pipe}`.
        """
        if not (full or frozen):
            raise PipelineError(
                "state_dict(frozen=False) is for the whole model: pass full=True as well."
            )
        caller = (frame := inspect.currentframe()) and frame.f_back
        if caller is not None and str(caller.f_globals.get("__name__")).startswith(
            "torch.distributed.checkpoint."
        ):
            self._require_named_parts()
        if not full:
            return self._share()
        with self._ranks.watch.region("state_dict"):
            return self._binding.parts.shown(dict(self._stream(frozen)), self.program.model.names)

    def stream_state_dict(self) -> Iterator[tuple[str, Any]]:
        """The names and whole tensors of eager's state dict, one after the other on every rank: an
        engine that generates takes them without the memory for all. Every rank must take all of
        them.

        >>> for name, tensor in pipe.stream_state_dict():  # doctest: +SKIP
        ...     engine.load(name, tensor)
        """
        stream = self._stream()
        while True:
            with self._ranks.watch.region("stream_state_dict"):
                item = next(stream, None)
                if item is None:
                    return
                shown = self._binding.parts.shown(dict([item]), self.program.model.names)
                ((name, tensor),) = shown.items()
                tensor = tensor.full_tensor() if is_distributed(tensor) else tensor
            yield name, tensor

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copies this process's share out of eager's state dict, in place.

        Strict over the whole model: raises PipelineError, before anything is copied, for keys that
        it lacks or has in addition, and for tensors of another shape. The result of `state_dict()`
        on this rank is accepted too.
        """
        binding, share = self._binding, self._share()
        tensors = {key: value for key, value in share.items() if isinstance(value, Tensor)}
        if state.keys() == share.keys() and all(
            value.shape == state[key].shape and chunk_of(value) == chunk_of(state[key])
            for key, value in tensors.items()
        ):  # as torch.distributed.checkpoint has read it
            for key, value in tensors.items():
                local_of(value).detach().copy_(local_of(state[key]).detach())
        else:
            state = binding.parts.cut(state, self.program.model.names)
            _check_keys(local_state_dict(binding.model), state)
            for key, value in binding.local_state().items():
                if isinstance(value, Tensor) and not value.is_meta:
                    value.detach().copy_(state[key].detach())
            if binding.shards is not None:
                binding.shards.load(state)
        binding.share.filled(state)

    def resume(self, step: int, filled: Iterable[str]) -> None:
        """Continues with step number `step`, now that the tensors `filled` of this process's share
        have their values; `zbcompile.load_checkpoint` writes them in place."""
        self.step_index = step
        self._binding.share.filled(filled)

    def _share(self) -> dict[str, Any]:
        """Returns this process's part of eager's state dict."""
        self._complete_updates()
        state, names = self._binding.local_state(), self.program.model.names
        shards, group = self._binding.shards, self._ranks.group
        if shards is not None and group is not None:
            state = shards.sharded_state(state, names, group)  # the rows are DTensors
        return self._binding.parts.shown(state, names)

    def _require_named_parts(self) -> None:
        """Raises PipelineError if ranks have different parts of a plain tensor under one name,
        which torch.distributed.checkpoint takes for copies."""
        program, mesh = self.program, self._ranks.mesh
        for name in sorted(program.homes.keys() - self._binding.parts.parts.keys()):
            if any(mesh.size(dim) > 1 for dim in along(program.placement(name), SHARD)):
                raise PipelineError(
                    f"{name} is sharded by hand, so torch.distributed.checkpoint would take its"
                    " parts for copies. Call zbcompile.save_checkpoint, or make it a DTensor."
                )

    def _stream(self, frozen: bool = True) -> Iterator[tuple[str, Any]]:
        """Yields eager's whole state dict, tensor by tensor on every rank, from the ranks that hold
        them. Frozen parameters are left out if `frozen` is False."""
        self._complete_updates()
        model, ranks, shards = self._binding.model, self._ranks, self._binding.shards
        names = first_names(model)
        parameters = dict(model.named_parameters())
        excluded = {n for n, p in parameters.items() if not (frozen or p.requires_grad)}
        group = None if shards is None else ranks.collective_group()
        for key, value in local_state_dict(model).items():
            name = names.get(key, key)
            if name in excluded:
                continue
            with ranks.waiting(key):
                if ranks.group is None:
                    tensor = value
                elif shards is not None and group is not None and name in shards.own:
                    tensor = shards.gathered(name, group).clone()
                elif not isinstance(value, Tensor):
                    tensor = ranks.gather_here(value)[self.program.holders(name)[0]]
                else:
                    tensor = torch.empty(value.shape, dtype=value.dtype, device=ranks.device)
                    if not value.is_meta:
                        tensor.copy_(value.detach())
                    ranks.broadcast(tensor, self.program.holders(name)[0])
            yield key, tensor

    def _complete_updates(self) -> None:
        """Blocks until the last update is complete. Raises PipelineError before compiling."""
        self.program  # noqa: B018
        self._optimizers.wait()


def _check_keys(target: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    missing, unexpected = sorted(set(target) - set(state)), sorted(set(state) - set(target))
    if missing or unexpected:
        raise PipelineError(
            f"the state dict does not fit the model: missing {missing[:4] or 'nothing'}, unexpected"
            f" {unexpected[:4] or 'nothing'}. load_state_dict takes the full dict, as"
            " model.state_dict() or pipe.state_dict(full=True) makes it."
        )
    for key, value in target.items():
        if isinstance(value, Tensor) and value.shape != state[key].shape:
            raise PipelineError(
                f"{key} has shape {list(state[key].shape)} in the state dict and"
                f" {list(value.shape)} in the model."
            )
