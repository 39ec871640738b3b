"""A process's share of a model: its tensors under the model's own names, tied ones only under the first name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from zbcompile.distributed.ranks import LocalRanks, Ranks
from zbcompile.errors import PipelineError
from zbcompile.frontend.pipeline import Pipeline
from zbcompile.model.model_info import ModelFacts, facts_of
from zbcompile.model.placements import SHARD, along
from zbcompile.program.program import Program
from zbcompile.torch_private import offset_of, with_offset, without_offset


@dataclass(frozen=True)
class Holding:
    """The share of one process.

    `tensors` are the entries of eager's state dict that live here, `parameters` what an optimizer trains here. A rank's
    rows of a sharded output layer are a DTensor in `tensors`. `writes(name)` says whether this process writes the
    tensor: of several that hold the same one, exactly one does; of rows every rank.
    """

    model: ModelFacts
    tensors: Mapping[str, torch.Tensor]
    parameters: Mapping[str, nn.Parameter]
    writes: Callable[[str], bool]
    ranks: Ranks

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the whole model's state dict, tied ones once."""
        return {m.name: m.shape for m in self.model.members if m.saved and m.first == m.name}

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
    return Holding(facts, tensors, dict(source.named_parameters()), lambda _: True, LocalRanks(1, device))


def _of_pipeline(pipe: Pipeline) -> Holding:
    facts, ranks, program = pipe.program.model, pipe.ranks, pipe.program
    _refuse_parts(program, ranks)
    tensors = _once(pipe.state_dict(), facts)
    rows = {name for name, tensor in tensors.items() if is_sharded(tensor)}

    def writes(name: str) -> bool:
        owns = program.holders(facts.names.get(name, name))[0] in ranks.local
        return ranks.leads and (name in rows or owns)

    return Holding(facts, tensors, dict(pipe.named_parameters()), writes, ranks)


def _refuse_parts(program: Program, ranks: Ranks) -> None:
    """Refuse parameters of which ranks beside the pipeline hold different parts."""
    for name in program.homes:
        split = [f'"{each}"' for each in along(program.placement(name), SHARD) if ranks.mesh.size(each) > 1]
        if split:
            raise PipelineError(
                f"{name} is sharded along {split[0]} of the mesh; checkpoints know the shares of pipeline ranks only. "
                "Save pipe.state_dict() of every rank, for DTensors with torch.distributed.checkpoint."
            )


def _once(state: Mapping[str, Any], facts: ModelFacts) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and facts.names.get(k, k) == k}


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a rank's rows of something larger, a DTensor."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` in this process's memory."""
    return without_offset(tensor.to_local()) if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def like_rows(local: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`local` as this process's part of a tensor that is sharded as `rows` is."""
    from torch.distributed.tensor import DTensor

    assert isinstance(rows, DTensor)
    offset = offset_of(rows.to_local())
    local = local if offset is None else with_offset(local, offset)
    shape, stride = rows.shape, rows.stride()
    return DTensor.from_local(local, rows.device_mesh, rows.placements, run_check=False, shape=shape, stride=stride)
