"""DTensors in a model: the pipeline trains this rank's parts, as plain tensors, and users see
DTensors. torch.distributed.checkpoint writes and reads parts as rectangles of tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.errors import PipelineError
from zbcompile.model.placements import REPLICATE, SHARD
from zbcompile.passes.torch_private import tensor_tables

PART = "part_of"  # the attribute of a plain tensor that is a part of a DTensor


@dataclass(frozen=True)
class TensorPart:
    """The DTensor `whole` that a plain tensor is the local part of. `dimensions` are the dimensions
    of the pipeline's mesh over which it is distributed, None on a mesh of a single rank."""

    whole: Any
    dimensions: tuple[str | None, ...]

    def wrap(self, local: Tensor) -> Any:
        """Returns the DTensor that has `local` as this rank's part. It is differentiable."""
        from torch.distributed.tensor import DTensor

        full = self.whole
        return DTensor.from_local(
            local,
            full.device_mesh,
            full.placements,
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )

    def cut(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a value for the tensor: a DTensor, or the whole."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        whole = self.whole
        if value.shape != whole.shape:
            raise PipelineError(
                f"{name} has shape {list(value.shape)}; the model's has {list(whole.shape)}."
            )
        if not isinstance(value, DTensor):
            value = distribute_tensor(
                value.detach(), whole.device_mesh, whole.placements, src_data_rank=None
            )
        return value.redistribute(whole.device_mesh, whole.placements).to_local()

    def placement(self) -> dict[str, str]:
        """The placement of the tensor along each dimension of the pipeline's mesh."""
        return {
            dimension: SHARD if "Shard" in type(kind).__name__ else REPLICATE
            for dimension, kind in zip(self.dimensions, self.whole.placements, strict=True)
            if dimension
        }


class Parts:
    """The DTensors of a model, by first names; in the model, plain tensors that share their memory
    replace them. Its state dicts show DTensors as before, and take them."""

    def __init__(self, model: nn.Module, labels: Mapping[str, str]) -> None:
        local_tensors: dict[int, Tensor] = {}
        modules = [
            module
            for module in model.modules()
            if any(is_distributed(tensor) for _, tensor in _own(module))
        ]
        full = {
            id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        for table, name, tensor in tensor_tables(model):
            if not is_distributed(tensor):
                continue
            if id(tensor) not in local_tensors:
                local = local_of(tensor).detach()
                if isinstance(tensor, nn.Parameter):
                    local = nn.Parameter(local, tensor.requires_grad)
                vars(local).update(vars(tensor))  # attributes that a user has set
                dimensions = _dimensions(labels, full[id(tensor)], tensor)
                setattr(local, PART, TensorPart(tensor, dimensions))
                local_tensors[id(tensor)] = local
            table[name] = local_tensors[id(tensor)]
        for module in modules:
            module.register_state_dict_post_hook(_show_wholes)
            module.register_load_state_dict_pre_hook(_take_parts)
        self._model = model
        self._read()

    def _read(self) -> None:
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        self.locals = {name: tensor for name, tensor in named if hasattr(tensor, PART)}
        self.parts: dict[str, TensorPart] = {
            name: getattr(tensor, PART) for name, tensor in self.locals.items()
        }

    def renew(self) -> None:
        """Let users see this process's share of a model that was built on the meta device, once it
        has memory."""
        if any(part.whole.is_meta for part in self.parts.values()):
            self._read()
            for name, tensor in self.locals.items():
                part = self.parts[name]
                if part.whole.is_meta and not tensor.is_meta:
                    whole = part.wrap(tensor.detach())
                    if isinstance(tensor, nn.Parameter):
                        whole = nn.Parameter(whole, tensor.requires_grad)
                    setattr(tensor, PART, replace(part, whole=whole))
            self._read()

    @property
    def parameters(self) -> dict[str, Any]:
        """The DTensors that train."""
        return {name: self.parts[name].whole for name, _ in self._trained()}

    @property
    def placements(self) -> dict[str, dict[str, str]]:
        """The placements, in the form of `placements=` of `zbcompile.pipeline`."""
        return {name: part.placement() for name, part in self.parts.items()}

    def take_gradients(self) -> None:
        """Copy gradients and `requires_grad` from the user's DTensors to the plain parameters."""
        for name, local in self._trained():
            user_tensor = self.parts[name].whole
            local.requires_grad_(user_tensor.requires_grad)
            gradient = None if user_tensor.grad is None else user_tensor.grad.to_local()
            if (
                gradient is None
                or local.grad is None
                or gradient.data_ptr() != local.grad.data_ptr()
            ):
                local.grad = gradient

    def give_gradients(self) -> None:
        """Let the DTensors have the gradients of the plain parameters, in the same memory."""
        for name, local in self._trained():
            part = self.parts[name]
            part.whole.grad = None if local.grad is None else part.wrap(local.grad)

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return (
            (name, local) for name, local in self.locals.items() if isinstance(local, nn.Parameter)
        )

    def shown(self, state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """Returns a state dict of plain parts as one of DTensors."""
        parts = {key: self.parts.get(names.get(key, key)) for key in state}
        return {key: v if (p := parts[key]) is None else p.wrap(v) for key, v in state.items()}

    def cut(self, state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """Returns a state dict of whole tensors or DTensors as one of plain parts."""
        parts = {key: self.parts.get(names.get(key, key)) for key in state}
        return {key: v if (p := parts[key]) is None else p.cut(key, v) for key, v in state.items()}


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _show_wholes(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a state dict of the model have the DTensors."""
    for name, tensor in _own(module):
        if hasattr(tensor, PART) and prefix + name in state:
            state[prefix + name] = getattr(tensor, PART).wrap(state[prefix + name])


def _take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let the model load such a state dict, or one of whole tensors."""
    for name, tensor in _own(module):
        if hasattr(tensor, PART) and prefix + name in state:
            state[prefix + name] = getattr(tensor, PART).cut(prefix + name, state[prefix + name])


def is_distributed(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def _dimensions(labels: Mapping[str, str], name: str, tensor: Any) -> tuple[str | None, ...]:
    """The dimensions of the pipeline's mesh over which a DTensor is distributed. Raises
    PipelineError for others."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    dimensions = tuple(labels.get(mesh.get_group(at).group_name) for at in range(mesh.ndim))
    for at, (theirs, ours) in enumerate(zip(names, dimensions, strict=True)):
        if ours is None and mesh.size(at) > 1:
            raise PipelineError(
                f'{name} is a DTensor on the dimension "{theirs}" of another mesh than mesh=, which'
                " has "
                f"{sorted(set(labels.values())) or 'none'}. Make one mesh of all ranks, parallelise"
                " the model over a "
                'part of it (mesh["tp"]), and pass the whole to zbcompile.pipeline.'
            )
        if ours in ("dp", "pp") and mesh.size(at) > 1:
            raise PipelineError(
                f'{name} is a DTensor along "{ours}", over which the pipeline itself distributes'
                " stages and batches. Parallelise the model over the other dimensions alone:"
                ' parallelize_module(model, mesh["tp"], plan).'
            )
        if tensor.placements[at].is_partial():
            raise PipelineError(
                f'{name} is {tensor.placements[at]} along "{theirs}"; expected Shard or Replicate.'
            )
    return tuple(ours if mesh.size(at) > 1 else None for at, ours in enumerate(dimensions))


Chunk = tuple[tuple[int, ...], tuple[int, ...]]  # the shape of a whole tensor, the offset of a part


class TensorShard(Tensor):
    """A tensor that is sharded over processes: this one has the part `local` at `offset`.

    It has the shape of the full tensor and no memory except that of `local`. The methods with
    underscores are the protocol by which torch.distributed.checkpoint plans tensor subclasses.
    """

    local: Tensor
    offset: tuple[int, ...]

    @classmethod
    def of(cls, local: Tensor, chunk: Chunk) -> "TensorShard":
        shape, offset = chunk
        shard = torch.empty((), dtype=local.dtype, device="cpu").expand(shape).as_subclass(cls)
        shard.local, shard.offset = local, offset
        return shard

    def __deepcopy__(self, memo: Any) -> "TensorShard":
        return TensorShard.of(self.local.clone(), (tuple(self.shape), self.offset))

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        (chunk,) = self.__create_chunk_list__()
        properties = TensorProperties.create_from_tensor(self.local)
        data = TensorWriteData(chunk, properties, torch.Size(self.shape))
        index = MetadataIndex(fqn, chunk.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.local


def chunk_of(tensor: Any) -> Chunk | None:
    """Returns where this process's part of a DTensor is in the whole; None for a plain tensor."""
    if not is_distributed(tensor):
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(tensor.shape), tuple(chunk.offsets)


def local_of(tensor: Any) -> Any:
    """Returns the part of a TensorShard or DTensor in this process's memory; another value as it
    is."""
    if isinstance(tensor, TensorShard):
        return tensor.local
    return tensor.to_local() if is_distributed(tensor) else tensor


def shard_of(tensor: Any) -> Any:
    """Returns a DTensor's part as a TensorShard over the same memory, and any other value
    unchanged."""
    chunk = chunk_of(tensor)
    return tensor if chunk is None else TensorShard.of(local_of(tensor).detach(), chunk)
