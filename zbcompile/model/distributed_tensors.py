"""DTensors in a model: the pipeline trains this rank's parts, as plain tensors; users see DTensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zbcompile.errors import PipelineError
from zbcompile.model.placements import REPLICATE, SHARD
from zbcompile.passes.torch_private import tensor_tables

PART = "part_of"  # the attribute of a plain tensor that is a part of a DTensor


@dataclass(frozen=True)
class Part:
    """What a plain tensor is a part of: `whole` as the model had it."""

    whole: Any

    def wrap(self, local: torch.Tensor) -> Any:
        """The DTensor of which `local` is this rank's part; gradients pass."""
        from torch.distributed.tensor import DTensor

        whole = self.whole
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(
            local, whole.device_mesh, whole.placements, run_check=False, shape=shape, stride=stride
        )

    def cut(self, name: str, given: torch.Tensor) -> torch.Tensor:
        """This rank's part of a value for the tensor: a DTensor, or the whole."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        if given.shape != self.whole.shape:
            raise PipelineError(f"{name} has shape {list(given.shape)}; the model's has {list(self.whole.shape)}.")
        if not isinstance(given, DTensor):
            given = distribute_tensor(given.detach(), self.whole.device_mesh, self.whole.placements, src_data_rank=None)
        return given.redistribute(self.whole.device_mesh, self.whole.placements).to_local()

    def placement(self, name: str) -> dict[str, str]:
        """What the parameter is along each dimension of its mesh."""
        words = {"Shard": SHARD, "_StridedShard": SHARD, "Replicate": REPLICATE}
        found = {}
        for dimension, each in zip(self.whole.device_mesh.mesh_dim_names, self.whole.placements, strict=True):
            if type(each).__name__ not in words:
                raise PipelineError(f'{name} is {each} along "{dimension}"; expected Shard or Replicate.')
            found[dimension] = words[type(each).__name__]
        return found


class Parts:
    """The DTensors of a model, by first names; in the model, plain tensors that share their memory replace them."""

    def __init__(self, model: nn.Module, labels: Mapping[str, str]) -> None:
        made: dict[int, torch.Tensor] = {}
        full = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        for table, name, tensor in tensor_tables(model):
            if is_distributed(tensor):
                _require_usable(labels, full[id(tensor)], tensor)
                made.setdefault(id(tensor), _part(tensor))
                table[name] = made[id(tensor)]
        named = [*model.named_parameters(), *model.named_buffers()]
        self.locals = {name: tensor for name, tensor in named if hasattr(tensor, PART)}
        self.parts: dict[str, Part] = {name: getattr(tensor, PART) for name, tensor in self.locals.items()}

    @property
    def parameters(self) -> dict[str, Any]:
        """The DTensors that train."""
        return {name: self.parts[name].whole for name, _ in self._trained()}

    @property
    def placements(self) -> dict[str, dict[str, str]]:
        """As `placements=` of `zbcompile.pipeline` would say it."""
        return {name: part.placement(name) for name, part in self.parts.items()}

    def take_gradients(self) -> None:
        """Let the plain parameters have what the user has done to the DTensors: gradients, freezing."""
        for name, local in self._trained():
            whole = self.parts[name].whole
            local.requires_grad_(whole.requires_grad)
            given = None if whole.grad is None else whole.grad.to_local()
            if given is None or local.grad is None or given.data_ptr() != local.grad.data_ptr():
                local.grad = given

    def give_gradients(self) -> None:
        """Let the DTensors have the gradients of the plain parameters, in the same memory."""
        for name, local in self._trained():
            part = self.parts[name]
            part.whole.grad = None if local.grad is None else part.wrap(local.grad)

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, local) for name, local in self.locals.items() if isinstance(local, nn.Parameter))

    def shown(self, state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """A state dict of plain parts as one of DTensors."""
        firsts = {key: self.parts.get(names.get(key, key)) for key in state}
        return {key: value if firsts[key] is None else firsts[key].wrap(value) for key, value in state.items()}  # type: ignore[union-attr]

    def cut(self, state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """A state dict of whole tensors or DTensors as one of plain parts."""
        firsts = {key: self.parts.get(names.get(key, key)) for key in state}
        return {key: value if firsts[key] is None else firsts[key].cut(key, value) for key, value in state.items()}  # type: ignore[union-attr]


def is_distributed(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor with that of its gradient, in the same memory; a plain tensor itself."""
    if not is_distributed(tensor):
        return tensor  # type: ignore[no-any-return]
    local = tensor.to_local().detach()
    local.grad = None if tensor.grad is None else tensor.grad.to_local()
    return local  # type: ignore[no-any-return]


def _part(tensor: Any) -> torch.Tensor:
    local = tensor.to_local().detach()
    made = nn.Parameter(local, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else local
    setattr(made, PART, Part(tensor))
    return made


def _require_usable(labels: Mapping[str, str], name: str, tensor: Any) -> None:
    """Refuse a DTensor without memory, and one on ranks that are no dimension of the pipeline's mesh."""
    if tensor.is_meta:
        raise PipelineError(f"{name} is a DTensor on the meta device; give the model memory before.")
    mesh = tensor.device_mesh
    for dimension in mesh.mesh_dim_names or ("",):
        group = mesh.get_group(dimension) if dimension else mesh.get_group()
        if labels.get(group.group_name) != dimension:
            raise PipelineError(
                f'{name} is a DTensor on the dimension "{dimension}" of another mesh than mesh=, which has '
                f"{sorted(labels.values()) or 'none'}. Make one mesh of all ranks, parallelise the model over a part "
                'of it (mesh["tp"]), and pass the whole to zbcompile.pipeline.'
            )
