"""What models may do in forward: each through the front door, against eager."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zbcompile.passes.canonical import canonicalise
from zbcompile.passes.capture import capture

WIDTH = 6


class Checkpointed(nn.Module):
    """Three regions of recomputation, one of them inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.layers[0](x))
        x = checkpoint(lambda y: torch.tanh(self.layers[1](y)), x, use_reentrant=False)
        x = checkpoint(self.outer, x, use_reentrant=False)
        return x.square().mean()

    def outer(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda y: torch.sigmoid(self.layers[2](y)), x, use_reentrant=False)
        return torch.cos(self.layers[3](inner))


def test_checkpoint_regions_are_numbered() -> None:
    graph = canonicalise(capture(Checkpointed(), (torch.randn(2, WIDTH),), {})).graph
    regions = {node.name: node.meta.get("recompute") for node in graph.nodes if node.op == "call_function"}
    outside = dict.fromkeys(("linear", "sin", "square", "mean"))
    assert regions == {**outside, "linear_1": 0, "tanh": 0, "linear_2": 1, "sigmoid": 1, "linear_3": 1, "cos": 1}
