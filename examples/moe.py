"""A model whose experts are on different ranks: a token is computed by the experts that choose it,
wherever they are.

Each expert chooses the tokens that score highest for it, always equally many (Zhou et al. 2022,
arXiv:2202.09368), so shapes are static and the exchange is an all-to-all of equal parts. It goes
through the functional collectives of torch.distributed, so it becomes part of the compiled graphs,
where it can hide behind computation.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    """One expert of as many as `group` has ranks; all tokens of the group's ranks can reach it."""

    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.count = group.size()
        self.group = group.group_name  # a module that holds a name can be copied
        self.route = nn.Linear(width, self.count, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is [tokens, width], as is the result."""
        sent, chosen, weights = self.choose(x)
        results = self.exchange(self.expert(self.exchange(sent)))
        return self.combine(x, results, chosen, weights)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens of every expert, [experts * capacity, width], indices and weights."""
        scores = self.route(x).softmax(dim=-1)
        weights, chosen = scores.t().topk(x.shape[0] // self.count)
        return x[chosen.flatten()], chosen.flatten(), weights.flatten()

    def exchange(self, tokens: Tensor) -> Tensor:
        """Sends part i of `tokens` to rank i of the group; part i of the result is from rank i."""
        return collectives.all_to_all_single(tokens, None, None, self.group)

    def expert(self, tokens: Tensor) -> Tensor:
        """Applies this rank's expert."""
        return self.down(F.gelu(self.up(tokens)))

    def combine(self, x: Tensor, results: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`x` plus the experts' results."""
        return x.index_add(0, chosen, results * weights.unsqueeze(1))


class MoE(nn.Module):
    """Layers of experts, with dense computation in between."""

    def __init__(self, layers: int, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, group) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for mixer, experts in zip(self.mixers, self.experts, strict=True):
            x = experts(torch.tanh(mixer(x)))
        return x
