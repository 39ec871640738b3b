"""A process's share of a model: its tensors under the model's own names, tied ones only under the first name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.mesh import Mesh
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.model.model_info import ModelFacts, facts_of
from zbcompile.model.placements import SHARD, along
from zbcompile.torch_private import offset_of, with_offset, without_offset

Corner = tuple[int, ...]


@dataclass(frozen=True)
class Holding:
    """The share of one process.

    `tensors` are the entries of eager's state dict that live here, `parameters` what an optimizer trains here, `shapes`
    those of everything that a checkpoint of the whole model holds, None if only another rank knows. Parts of DTensors,
    and a rank's rows of a sharded output layer, are DTensors; what is sharded by hand has a name of its own on each
    rank. `writes(name)` says whether this process writes the tensor: of several that hold the same, exactly one does.
    """

    model: ModelFacts
    shapes: Mapping[str, tuple[int, ...] | None]
    tensors: Mapping[str, torch.Tensor]
    parameters: Mapping[str, nn.Parameter]
    writes: Callable[[str], bool]
    ranks: Ranks

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter that an optimizer has. Raises PipelineError for one that is not the model's."""
        if id(parameter) in self._names:
            return self._names[id(parameter)]
        raise PipelineError(
            f"the optimizer has a parameter of shape {list(parameter.shape)} that is not one of this process's. Make "
            "it with pipe.parameters(), or model.parameters() for a plain model, after compiling or loading."
        )


def holding_of(source: Pipeline | nn.Module) -> Holding:
    """The share of this process in a pipeline; of a plain model, all of it."""
    if isinstance(source, Pipeline):
        return _of_pipeline(source)
    if not isinstance(source, nn.Module):
        raise PipelineError(f"expected a pipeline or an nn.Module, received {type(source).__name__}.")
    facts = facts_of(source, {})
    device = next((tensor.device for tensor in source.parameters()), torch.device("cpu"))
    tensors = _once(source.state_dict(), facts)
    return Holding(facts, _shapes(facts), tensors, dict(source.named_parameters()), lambda _: True, Ranks(1, device))


def _shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model's state dict, tied ones once."""
    return {m.name: m.shape for m in facts.members if m.saved and m.first == m.name}


def _of_pipeline(pipe: Pipeline) -> Holding:
    facts, ranks, mesh = pipe.program.model, pipe.ranks, pipe.ranks.mesh
    shapes: dict[str, tuple[int, ...] | None] = {}
    stored: dict[str, str] = {}  # the name in a checkpoint by the model's own
    # along which dimensions every rank has another part
    split = {n: tuple(d for d in along(pipe.program.placement(n), SHARD) if mesh.size(d) > 1) for n in facts.names}
    for name, shape in _shapes(facts).items():
        by_hand = () if name in pipe.parts else split[name]
        for place in product(*(range(mesh.size(each)) for each in by_hand)):
            shapes[_of_place(name, by_hand, place, mesh)] = None
        stored[name] = _of_place(name, by_hand, tuple(map(mesh.index, by_hand)), mesh)
        shapes[stored[name]] = tuple(pipe.parts[name].whole.shape) if name in pipe.parts else shape
    state, parameters = pipe.state_dict(), dict(pipe.named_parameters())
    own = {stored[name]: tensor for name, tensor in _once(state, facts).items()}
    rows = {name for name, tensor in own.items() if is_distributed(tensor) and name not in pipe.parts}
    names = {each: name for name, each in stored.items()}

    def writes(name: str) -> bool:
        same = [each for each in mesh.beside("pp") if each not in split[names[name]]]
        owns = name in rows or pipe.program.holders(names[name])[0] in ranks.local
        return owns and mesh.index(*same) == 0

    trained = {stored[name]: parameter for name, parameter in parameters.items()}
    return Holding(facts, shapes, own, trained, writes, ranks)


def _of_place(name: str, by_hand: tuple[str, ...], place: tuple[int, ...], mesh: Mesh) -> str:
    """The name of one place's part of a tensor sharded by hand: only the model knows how it would become whole."""
    where = [f"{each} {index} of {mesh.size(each)}" for each, index in zip(by_hand, place, strict=True)]
    return f"{name} ({', '.join(where)})" if where else name


def _once(state: Mapping[str, Any], facts: ModelFacts) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and facts.names.get(k, k) == k}


def require_names(path: Path, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise PipelineError if what was saved lacks names of the model, or has others."""
    if missing or unexpected:
        raise PipelineError(
            f"{path} is of another model: missing {missing[:4] or 'nothing'}, unexpected {unexpected[:4] or 'nothing'}."
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` in this process's memory."""
    return without_offset(tensor.to_local()) if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def like_rows(local: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`local` as this process's part of a tensor that is sharded as `rows` is."""
    from torch.distributed.tensor import DTensor

    assert isinstance(rows, DTensor)
    offset = offset_of(rows.to_local())
    local = local if offset is None else with_offset(local, offset)
    shape, stride = rows.shape, rows.stride()
    return DTensor.from_local(local, rows.device_mesh, rows.placements, run_check=False, shape=shape, stride=stride)


class Pieces(torch.Tensor):
    """A tensor of which this process has `parts`, by their offsets. Its size is that of the whole; it has no memory."""

    parts: Mapping[Corner, torch.Tensor]

    @classmethod
    def made(cls, shape: Sequence[int], dtype: torch.dtype, parts: Mapping[Corner, torch.Tensor]) -> "Pieces":
        made = torch.empty((), dtype=dtype, device="cpu").expand(tuple(shape)).as_subclass(cls)
        made.parts = parts
        return made

    @classmethod
    def copied(cls, tensor: torch.Tensor) -> "Pieces":
        """This process's part of a tensor, copied to the CPU."""
        if isinstance(tensor, Pieces):
            parts = tensor.parts
        elif is_distributed(tensor):
            (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
            parts = {tuple(chunk.offsets): local_part(tensor)}
        else:
            parts = {(0,) * tensor.dim(): tensor}
        copies = {
            at: torch.empty(part.shape, dtype=part.dtype, device="cpu").copy_(part.detach())
            for at, part in parts.items()
        }
        return cls.made(tensor.shape, tensor.dtype, copies)

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offset), part.shape) for offset, part in self.parts.items()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        found = []
        for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.size())
            found.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return found

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.parts[tuple(index.offset)]
