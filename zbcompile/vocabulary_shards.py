"""The parameters of the output layer, sharded by rows: what each rank trains, and what a step needs of it.

A shard is a view of the model's own parameter. In one process all shards are there, so the model's parameter itself is
what an optimizer sees; as one rank of a group it sees a parameter of its own that holds this rank's rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.gradients import Gradients
from zbcompile.passes.slots import Slot
from zbcompile.passes.vocabulary_program import VocabularyProgram
from zbcompile.preparation import CompiledPasses
from zbcompile.transport import Transport
from zbcompile.vocabulary_collectives import Collectives, GroupCollectives, SharedCollectives, VocabularyTransport
from zbcompile.vocabulary_run import CompiledShard, ShardRun, prepare_shard


@dataclass
class VocabularyShards:
    """The shards that live in this process. `rank` is None where all do; `own` are the parameters of its rows."""

    bounds: tuple[tuple[int, int], ...]
    whole: Mapping[str, nn.Parameter]
    rank: int | None
    own: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rank is not None:
            self.own = {name: nn.Parameter(self.rows(self.rank, name)) for name in self.whole}

    def rows(self, rank: int, name: str) -> torch.Tensor:
        """The rows of a rank, as a view of the whole parameter."""
        low, high = self.bounds[rank]
        return self.whole[name].detach()[low:high]

    def accumulator(self, rank: int, gradients: Gradients, name: str) -> torch.Tensor:
        """What T of a rank adds the gradient of its rows into."""
        whole = gradients.buffer(name, stage=-1)
        low, high = self.bounds[rank]
        return whole if name in self.own else whole[low:high]

    def gather(self, group: dist.ProcessGroup) -> None:
        """Bring the rows of all ranks into the whole parameters of this process."""
        for name in self.own:
            for rank in range(len(self.bounds)):
                rows = self.rows(rank, name)
                if rows.numel():
                    dist.broadcast(rows, group=group, group_src=rank)

    def share_lookups(self, gradients: Gradients, tied: Mapping[str, int], group: dist.ProcessGroup) -> None:
        """Add the gradient of a tied embedding, which the rank of its stage has, to the rows of every rank."""
        for name, source in sorted(tied.items()):
            own = gradients.buffer(name, stage=-1)
            if self.rank == source:
                found = gradients.lookups.pop(name)
                for rank, (low, high) in enumerate(self.bounds):
                    if rank != source and high > low:
                        dist.send(found[low:high].contiguous(), group=group, group_dst=rank)
                low, high = self.bounds[source]
                own.add_(found[low:high])
            elif own.numel():
                rows = torch.empty_like(own)
                dist.recv(rows, group=group, group_src=source)
                own.add_(rows)

    def sharded_state(
        self, state: dict[str, Any], names: Mapping[str, str], group: dist.ProcessGroup
    ) -> dict[str, Any]:
        """`state` with this rank's rows as DTensors under the original names, as torch.distributed.checkpoint reads
        them."""
        return {
            key: self._distributed(names.get(key, key), group) if names.get(key, key) in self.own else value
            for key, value in state.items()
        }

    def _distributed(self, name: str, group: dist.ProcessGroup) -> Any:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        whole = self.whole[name]
        mesh = DeviceMesh.from_group(group, whole.device.type)
        own = self.own[name].detach()
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


@dataclass(frozen=True)
class VocabularyExecutable:
    """The shards of one program that run in this process. `group` is the collectives' own, None in one process, and
    `stream` theirs on CUDA."""

    program: VocabularyProgram
    shards: Mapping[int, CompiledShard]
    accumulators: Mapping[int, Callable[[Gradients, str], torch.Tensor]]
    root: int
    device: torch.device
    group: dist.ProcessGroup | None
    rows: VocabularyShards
    stream: torch.cuda.Stream | None

    def begin_step(self, gradients: Gradients, tied: Mapping[str, int]) -> None:
        """A rank that looks up a tied embedding needs all rows as the optimizers have left them."""
        if self.group is not None and tied:
            gradients.whole = {name: self.rows.whole[name] for name in tied}
            self.rows.gather(self.group)

    def end_step(self, gradients: Gradients, tied: Mapping[str, int]) -> None:
        """Every rank gets the gradients of its rows of a tied embedding."""
        if self.group is not None and tied:
            self.rows.share_lookups(gradients, tied, self.group)

    def collectives(self) -> Collectives:
        """The collectives of one step."""
        if self.group is None:
            return SharedCollectives(len(self.shards), self.root, self.program.barriers)
        return GroupCollectives(self.group, self.root, self.device, self.stream)

    def begin(
        self,
        rank: int,
        gradients: Gradients,
        inputs: list[dict[str, torch.Tensor]],
        factor: torch.Tensor,
        messages: Transport,
        collectives: Collectives,
    ) -> VocabularyTransport:
        """The shard of `rank` in a step, and its way to the others."""
        run = ShardRun(self.shards[rank], partial(self.accumulators[rank], gradients), inputs, factor)
        collectives.join(rank, run)
        return VocabularyTransport(rank, messages, run, collectives)


def make_executable_shards(
    program: VocabularyProgram,
    shards: VocabularyShards,
    root: int,
    resident: Mapping[Slot, torch.Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None,
    passes: CompiledPasses,
) -> VocabularyExecutable:
    """Bind the graphs of this process's shards, as `passes` has them, to their rows."""
    ranks = range(len(shards.bounds)) if shards.rank is None else [shards.rank]
    compiled = {}
    for rank in ranks:
        rows = {Slot("parameter", name): shards.rows(rank, name) for name in program.parameters}
        compiled[rank] = prepare_shard(program, rank, {**resident, **rows}, passes.shard(rank))
    accumulators = {rank: partial(shards.accumulator, rank) for rank in ranks}
    stream = torch.cuda.Stream(device) if group is not None and device.type == "cuda" else None
    return VocabularyExecutable(program, compiled, accumulators, root, device, group, shards, stream)
