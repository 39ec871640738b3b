"""Small models parallelised by hand over dimensions of a mesh, next to the same model in one process
(`mesh=None`).

Each takes [rows, LENGTH, WIDTH] and gives what `loss` makes a scalar of. Weights are drawn whole,
so that every rank's part is a part of the one-process model; `whole_gradient` says which part a
gradient is.
"""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, LENGTH, WIDTH, HEADS = 2, 8, 16, 4


@torch.library.custom_op("parallel_models::enter", mutates_args=())
def enter(x: Tensor, group_name: str) -> Tensor:
    """Megatron's f: the gradients of all ranks are summed."""
    return x.clone()


@torch.library.custom_op("parallel_models::leave", mutates_args=())
def leave(x: Tensor, group_name: str) -> Tensor:
    """Megatron's g: the parts of all ranks are summed."""
    y = x.clone()
    if group_name:
        dist.all_reduce(y, group=dist.distributed_c10d._resolve_process_group(group_name))
    return y


for _each, _other in ((enter, leave), (leave, enter)):
    _each.register_fake(lambda x, group_name: torch.empty_like(x))
    _each.register_autograd(
        lambda ctx, gradient, other=_other: (other(gradient.contiguous(), ctx.group), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "group", inputs[1]),
    )


class Enter(torch.autograd.Function):
    """The same pair as Megatron writes it, with the calls of torch.distributed, which work in
    place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        dist.all_reduce(gradient.contiguous(), group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x.contiguous(), group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class Along:
    """One dimension of a mesh; without a mesh one rank."""

    def __init__(self, mesh: Any, name: str) -> None:
        self.size, self.rank, self.group, self.processes = 1, 0, "", None
        if mesh is not None:
            self.processes = mesh[name].get_group()
            self.size, self.rank = mesh[name].size(), mesh[name].get_local_rank()
            self.group = mesh[name].get_group().group_name

    def part(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.size, dim)[self.rank]

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return self.through(collectives.all_gather_tensor_autograd, x, dim)

    def scatter_sum(self, x: Tensor, dim: int) -> Tensor:
        return self.through(collectives.reduce_scatter_tensor_autograd, x, "sum", dim)

    def exchange(self, x: Tensor) -> Tensor:
        return self.through(collectives.all_to_all_single_autograd, x, None, None)

    def through(self, collective: Any, x: Tensor, *args: Any) -> Tensor:
        return x if self.size == 1 else collective(x.contiguous(), *args, self.group)


class Gather(torch.autograd.Function):
    """Gathers, and hands back this rank's slice of its own gradient: right if all ranks have one
    loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, along: Along, dim: int) -> Tensor:
        ctx.along, ctx.dim = along, dim
        return collectives.all_gather_tensor(x.contiguous(), dim, along.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.along.part(gradient, ctx.dim).contiguous(), None, None


class ParallelMlp(nn.Module):
    """Columns, then rows, with a pair of operators ("plain") or of functions around them;
    "sequence" keeps what is between the layers split by the sequence."""

    def __init__(self, along: Along, form: str) -> None:
        super().__init__()
        self.along, self.form = along, form
        self.norm = nn.RMSNorm(WIDTH)
        self.columns = nn.Parameter(along.part(torch.randn(2 * WIDTH, WIDTH) / 4, 0).clone())
        self.rows = nn.Parameter(along.part(torch.randn(WIDTH, 2 * WIDTH) / 6, 1).clone())

    def forward(self, x: Tensor) -> Tensor:
        y, along = self.norm(x), self.along
        if self.form == "sequence":
            return x + along.scatter_sum(self.between(along.gather(y, 1)), 1)
        if self.form == "functions" and along.size > 1:
            y = self.between(Enter.apply(y, along.processes))
            return x + Leave.apply(y, along.processes)
        return x + leave(self.between(enter(y, along.group)), along.group)

    def between(self, y: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(y, self.columns)), self.rows)


class TensorParallel(nn.Module):
    """ "sequence": the input is cut along the sequence, and the loss is that of the gathered output
    on every rank."""

    PLACEMENTS: ClassVar = {"*.columns": {"tp": "shard"}, "*.rows": {"tp": "shard"}}

    def __init__(self, mesh: Any, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along, self.sequence = Along(mesh, "tp"), form == "sequence"
        self.layers = nn.ModuleList(ParallelMlp(self.along, form) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output of all ranks, of which each differentiates its own part."""
        x = self.along.part(x, 1) if self.sequence else x
        for layer in self.layers:
            x = layer(x)
        if not self.sequence:
            return x
        before = self.along.rank * x.shape[1]
        ahead = (0, 0, before, LENGTH - before - x.shape[1])
        return self.along.gather(x.detach(), 1) + F.pad(x - x.detach(), ahead)


class Attention(nn.Module):
    """Causal attention over a sequence that is split over the ranks of "cp"."""

    def __init__(self, along: Along, form: str) -> None:
        super().__init__()
        self.along, self.form = along, form
        self.norm, self.qkv, self.out = (
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        y: Tensor = getattr(self, self.form)(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))

    def gather(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.along.gather(k, 2), self.along.gather(v, 2)
        return self.weights(q, k, self.along.rank * q.shape[2]).softmax(-1) @ v

    def weights(self, q: Tensor, k: Tensor, ahead: int) -> Tensor:
        """The scores of queries that are `ahead` positions further on than the keys."""
        positions = torch.arange(q.shape[2])[:, None] + ahead
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores.masked_fill(positions < torch.arange(k.shape[2]), -1e30)

    def ulysses(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All of the sequence for some heads, and back."""
        q, k, v = (self.swap(part, 1, 2) for part in (q, k, v))
        return self.swap(self.weights(q, k, 0).softmax(-1) @ v, 2, 1)

    def swap(self, x: Tensor, split: int, joined: int) -> Tensor:
        """From all of one dimension for a part of another to a part of it for all of the other."""
        parts = x.unflatten(split, (self.along.size, -1)).movedim(split, 0)
        return self.along.exchange(parts).movedim(0, joined).flatten(joined, joined + 1)

    def ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values travel round; the softmax is put together from their parts."""
        rank, size, kv = self.along.rank, self.along.size, torch.stack((k, v))
        top = torch.full((*q.shape[:3], 1), -1e30)
        total, sums = torch.zeros_like(q), torch.zeros_like(top)
        for step in range(size):
            source = (rank - step) % size
            scores = self.weights(q, kv[0], (rank - source) * q.shape[2])
            new = torch.maximum(top, scores.amax(-1, keepdim=True).detach())
            shares, saved = (scores - new).exp() * (scores > -1e29), (top - new).exp()
            total, top = total * saved + shares @ kv[1], new
            sums = sums * saved + shares.sum(-1, keepdim=True)
            kv = self.onward(kv) if step < size - 1 else kv
        return total / sums

    def onward(self, kv: Tensor) -> Tensor:
        """To the next rank, as an all-to-all in which every rank sends to one."""
        rank, size, count = self.along.rank, self.along.size, kv.shape[0]
        sent = [count if i == (rank + 1) % size else 0 for i in range(size)]
        received = [count if i == (rank - 1) % size else 0 for i in range(size)]
        return self.along.through(collectives.all_to_all_single_autograd, kv, received, sent)


class ContextParallel(nn.Module):
    """Takes its part of the sequence; its loss is that of the part."""

    PLACEMENTS: ClassVar[dict[str, dict[str, str]]] = {}

    def __init__(self, mesh: Any, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = Along(mesh, "cp")
        self.layers = nn.ModuleList(Attention(self.along, form) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.along.part(x, 1)
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, self.along.part(target, 1))


class Dispatched(nn.Module):
    """Experts on all ranks, each of which gets as many tokens of every rank."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = Along(mesh, "ep")
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        experts = torch.randn(self.along.size, WIDTH, WIDTH) / 4
        self.expert = nn.Parameter(self.along.part(experts, 0).clone())

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        created = F.gelu(self.along.exchange(tokens) @ self.expert[0])
        return x + (self.along.exchange(created) * self.router(tokens).sigmoid()).view_as(x)
