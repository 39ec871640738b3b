"""Collectives inside the graphs: experts that live on different ranks, two pipelines wide."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from moe import Experts
from tests.support.pool import Pool

LAYERS, WIDTH, EXPERTS, MICROBATCHES, ROWS = 2, 8, 2, 4, 6


class Plain(nn.Module):
    """Exchanges as torch.distributed's own calls do, which autograd does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        dist.all_reduce(y)
        return y


class Branching(nn.Module):
    """Exchanges in a branch that some ranks may not take."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.experts = Experts(WIDTH, group)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.experts(y), lambda y: self.layer(y), (x,))


def refusals() -> list[str]:
    texts = []
    for model in (Plain(), Branching(dist.group.WORLD)):
        x = torch.randn(4, WIDTH)
        with pytest.raises(zbcompile.CaptureError) as refused:
            zbcompile.pipeline(model, schedule="1f1b", microbatches=2, loss=F.mse_loss).step(
                x, target=x
            )
        texts.append(str(refused.value))
    return texts


@pytest.mark.slow
def test_what_cannot_be_part_of_a_graph_is_refused(pool: Pool) -> None:
    plain, branching = pool.run(refusals, ranks=1)[0]
    assert "forward calls torch.distributed.all_reduce on an activation" in plain
    assert "communicates inside of torch.cond" in branching
