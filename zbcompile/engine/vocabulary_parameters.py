"""The parameters of an output layer that is sharded by rows.

In one process all shards are views of the model's parameter, which an optimizer sees. A process
that is one rank of a group has a separate parameter with the rows of that rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zbcompile.backends.backend import Owner
from zbcompile.backends.types import Run
from zbcompile.distributed.transport import Transport
from zbcompile.engine.stage import LOOKUPS, SHARD, CompiledStage, prepare_stage
from zbcompile.engine.vocabulary import Collectives, EndRanks, GroupCollectives, LocalCollectives
from zbcompile.model.distributed_tensors import Chunk
from zbcompile.model.materialize import Share
from zbcompile.passes import gpu
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram
from zbcompile.program.program import Program


@dataclass
class VocabularyShards:
    """The shards in this process.

    Attributes:
        whole: The model's parameters. One on the meta device stays there, and only the rows of
            this rank get memory.
        rank: This process's rank; None if it has all shards.
        own: The parameters with the rows of this rank.
    """

    bounds: tuple[tuple[int, int], ...]
    whole: Mapping[str, nn.Parameter]
    rank: int | None
    device: torch.device
    own: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rank is not None:
            self.own = {name: self._own(self.rank, name) for name in self.whole}

    def _own(self, rank: int, name: str) -> nn.Parameter:
        whole, (low, high) = self.whole[name], self.bounds[rank]
        if len(self.bounds) == 1 and not whole.is_meta:
            return whole  # ZeRO-1 moves parameters, which the model has to see
        rows = whole.detach()[low:high]
        memory = torch.empty_like(rows, device=self.device) if rows.is_meta else rows.clone()
        return nn.Parameter(memory, whole.requires_grad)

    def rows(self, rank: int, name: str) -> Tensor:
        """Returns the rows of a rank; in one process a view of the whole parameter."""
        low, high = self.bounds[rank]
        return self.own[name] if rank == self.rank else self.whole[name].detach()[low:high]

    def fill(self, share: Share) -> None:
        """Fills rows on a model that is on the meta device."""
        for name, parameter in self.own.items():
            if self.whole[name].is_meta:
                share.fill_rows(
                    name, self.whole[name], parameter.detach(), self.bounds[self.rank or 0][0]
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads this rank's rows of the whole parameters in `state`."""
        low, high = self.bounds[self.rank or 0]
        for name, parameter in self.own.items():
            parameter.detach().copy_(state[name][low:high])

    def gathered(self, name: str, group: ProcessGroup) -> Tensor:
        """Returns a whole parameter with the rows of all ranks."""
        tensor = torch.empty_like(self.whole[name].detach(), device=self.device)
        low, high = self.bounds[self.rank or 0]
        tensor[low:high] = self.own[name].detach()
        for rank, (low, high) in enumerate(self.bounds):
            if high > low:
                dist.broadcast(tensor[low:high], group=group, group_src=rank)
        return tensor

    def sharded_state(
        self, state: dict[str, Any], names: Mapping[str, str], group: ProcessGroup
    ) -> dict[str, Any]:
        """Returns `state` with this rank's rows as DTensors, as torch.distributed.checkpoint reads
        them. `names` are the first names of tied parameters."""
        rows = {
            name: self.distributed(name, parameter.detach(), group)
            for name, parameter in self.own.items()
        }
        return {key: rows.get(names.get(key, key), value) for key, value in state.items()}

    def chunk(self, name: str) -> Chunk:
        """Returns where this rank's rows are in a parameter."""
        shape = tuple(self.whole[name].shape)
        return shape, (self.bounds[self.rank or 0][0], *(0 for _ in shape[1:]))

    def distributed(self, name: str, rows: Tensor, group: ProcessGroup) -> Any:
        """Returns this rank's `rows` of a parameter, or of a tensor with its shape such as a
        moment of Adam, as a DTensor."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        parameter = self.whole[name]
        mesh = DeviceMesh.from_group(group, self.device.type)
        return DTensor.from_local(
            rows,
            mesh,
            [Shard(0)],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


@dataclass(frozen=True)
class VocabularyExecutable:
    """The shards of a program in this process, by rank and by SHARD or LOOKUPS. Collectives have a
    `group` of their own, None in one process, and on CUDA a stream."""

    program: VocabularyProgram
    shards: Mapping[int, Mapping[int, CompiledStage]]
    ends: EndRanks
    group: ProcessGroup | None
    rows: VocabularyShards
    stream: gpu.Stream | None

    def collectives(self, transport: Transport) -> Collectives:
        """Returns the collectives of one step, still without its shards."""
        backend: LocalCollectives | GroupCollectives = LocalCollectives(len(self.shards))
        if self.group is not None:
            backend = GroupCollectives(self.group, self.rows.device, self.stream)
        return Collectives(self.program, self.ends, backend, transport)


def make_executable_shards(
    program: Program,
    shards: VocabularyShards,
    resident: Mapping[Slot, Tensor],
    group: ProcessGroup | None,
    runs: Mapping[Owner, Mapping[str, Run]],
) -> VocabularyExecutable:
    """Binds the compiled graphs of this process's shards to their rows."""
    vocabulary, last = program.vocabulary, program.schedule.stages - 1
    assert vocabulary is not None
    compiled, device = {}, shards.device
    for rank in range(len(shards.bounds)) if shards.rank is None else [shards.rank]:
        rows = {Slot("parameter", n): shards.rows(rank, n) for n in vocabulary.parameters}
        stages = zip((SHARD, LOOKUPS), vocabulary.stages_of(rank), strict=False)
        code = runs.get(("shard", rank))
        compiled[rank] = {
            number: prepare_stage(stage, {**resident, **rows}, device, SHARD, code)
            for number, stage in stages
        }
    ends = EndRanks(program.rank_of(0), program.rank_of(last), last)
    stream = gpu.new_stream(device) if group is not None and gpu.is_gpu(device) else None
    return VocabularyExecutable(vocabulary, compiled, ends, group, shards, stream)
