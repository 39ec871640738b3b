"""A mixture of experts that drops no token, over the ranks of a mesh and in one process, with
routers as hostile as its inputs say."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)

import zbcompile

WIDTH, EXPERTS, CHOSEN, LAYERS = 16, 8, 2, 2
SHARDED = {"*.up": {"ep": "shard"}, "*.down": {"ep": "shard"}}


class Layer(nn.Module):
    """Dense computation, normed over the batch, then experts; `exchange` moves tokens to them."""

    def __init__(self, group: Any, factor: float, norm: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.route = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 6)
        self.exchange = zbcompile.ExpertExchange(EXPERTS, group, factor)

    def keep(self, rank: int) -> None:
        """Keep the experts of a rank."""
        for name in ("up", "down"):
            part = getattr(self, name).detach().chunk(self.exchange.ranks)[rank].clone()
            setattr(self, name, nn.Parameter(part))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.mix(x)))
        weights, chosen = self.choose(x, bias)
        rows, ends, route = self.exchange.dispatch(x.repeat_interleave(CHOSEN, 0), chosen.flatten())
        return self.join(x, self.exchange.combine(self.compute(rows, ends), route), weights)

    def choose(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.route(x).softmax(-1)
        chosen = (scores + bias).topk(CHOSEN).indices
        return scores.gather(1, chosen), chosen

    def compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(F.silu(F.grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)

    def join(self, x: Tensor, created: Tensor, weights: Tensor) -> Tensor:
        return x + (created.view(-1, CHOSEN, WIDTH) * weights.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    def __init__(
        self,
        group: Any = None,
        factor: float = 1.0,
        norm: bool = False,
        kind: type[Layer] = Layer,
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(group, factor, norm) for _ in range(layers))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, bias)
        return x


def mixture_of(rank: int, *inputs: Any, **options: Any) -> Mixture:
    """One rank's part of a `Mixture`, whose arguments follow."""
    model = Mixture(*inputs, **options)
    for layer in model.layers:
        layer.keep(rank)
    return model


def everywhere(
    models: Sequence[Mixture], xs: list[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    """Returns what all ranks compute, in one process, with all experts of the first of `models`: rows
    sorted by expert, those of one expert by rank."""
    for at, first in enumerate(models[0].layers):
        layers = [model.layers[at] for model in models]
        xs = [torch.tanh(layer.norm(layer.mix(x))) for layer, x in zip(layers, xs, strict=True)]
        routed = [layer.choose(x, bias) for layer, x, bias in zip(layers, xs, biases, strict=True)]
        rows = torch.cat([x.repeat_interleave(CHOSEN, 0) for x in xs])
        experts = torch.cat([chosen.flatten() for _, chosen in routed])
        order = experts.argsort(stable=True)
        ends = torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()
        created = first.compute(rows[order], ends)
        back = torch.zeros_like(created).index_copy(0, order, created).chunk(len(models))
        parts = zip(layers, xs, back, routed, strict=True)
        xs = [layer.join(x, rows, weights) for layer, x, rows, (weights, _) in parts]
    return xs


def bias_of(router: str, microbatch: int, rows: int) -> Tensor:
    """Returns what is added to the scores: nothing ("even"); much, so that each expert gets equally many
    ("balanced"), or two experts of one rank get all, always or in turn."""
    bias = torch.zeros(rows, EXPERTS)
    if router == "balanced":
        for token in range(rows):
            bias[token, [token % EXPERTS, (token + EXPERTS // 2) % EXPERTS]] = 9
    if router == "one":
        bias[:, :CHOSEN] = 9
    elif router == "turns":
        first = CHOSEN * (microbatch % (EXPERTS // CHOSEN))
        bias[:, first : first + CHOSEN] = 9
    return bias


class LayerOfCounts(Layer):
    """As torchtitan writes it: functional all-to-alls whose parts have sizes that the host reads.
    `exchange` is not used."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.mix(x)))
        weights, chosen = self.choose(x, bias)
        if self.exchange.ranks == 1:
            return super().forward(x, bias)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(
            0, chosen.flatten(), torch.ones_like(order)
        )
        ranks, group = self.exchange.ranks, self.exchange.group
        with torch.no_grad():
            come = wait_tensor(all_to_all_single(counts, None, None, group))
            sent = counts.view(ranks, -1).sum(1).to(torch.device("cpu"), non_blocking=True).tolist()
            arriving = come.view(ranks, -1).sum(1).to(torch.device("cpu")).tolist()
        rows = all_to_all_single_autograd(x[order // CHOSEN], arriving, sent, group)
        places = self.by_expert(come.view(ranks, -1), rows.shape[0])
        ends = come.view(ranks, -1).sum(0).cumsum(0).int()
        created = self.compute(rows[places, :], ends)
        back = created.new_empty(rows.shape)
        back[places, :] = created
        back = all_to_all_single_autograd(back, sent, arriving, group)
        return self.join(x, torch.zeros_like(back).index_copy(0, order, back), weights)

    def by_expert(self, counts: Tensor, total: int) -> Tensor:
        """Of the rows sorted by expert the places where they have arrived, sorted by rank."""
        begins = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).t().reshape(-1)
        lengths = counts.t().reshape(-1)
        group = torch.arange(lengths.shape[0]).repeat_interleave(lengths, output_size=total)
        return begins[group] + torch.arange(group.shape[0]) - (lengths.cumsum(0) - lengths)[group]
