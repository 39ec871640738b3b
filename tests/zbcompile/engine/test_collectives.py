"""Collectives inside the graphs: experts that live on different ranks, two pipelines wide."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from moe import Experts, MoE
from tests.support.pool import Pool

LAYERS, WIDTH, EXPERTS, MICROBATCHES, ROWS = 2, 8, 2, 4, 6


def model_of(expert: int, group: Any) -> MoE:
    """Everything but the expert is the same on all ranks."""
    torch.manual_seed(7)
    model = MoE(LAYERS, WIDTH, group)
    torch.manual_seed(expert)
    for item in model.experts:
        item.up.reset_parameters()  # type: ignore[union-attr, operator]
        item.down.reset_parameters()  # type: ignore[union-attr, operator]
    return model


def batch_of(expert: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + expert)
    return torch.randn(2, MICROBATCHES * ROWS, WIDTH).unbind()


def everywhere(models: list[MoE], xs: list[Tensor]) -> list[Tensor]:
    """What the ranks compute together, in one process: the exchange is an exchange of parts of
    tensors."""
    for layer in range(LAYERS):
        experts = [model.experts[layer] for model in models]
        xs = [torch.tanh(model.mixers[layer](x)) for model, x in zip(models, xs, strict=True)]
        sent = [item.choose(x) for item, x in zip(experts, xs, strict=True)]
        built = [
            item.expert(x) for item, x in zip(experts, swapped([s[0] for s in sent]), strict=True)
        ]
        parts = zip(experts, xs, swapped(built), sent, strict=True)
        xs = [
            item.combine(x, back, chosen, weights) for item, x, back, (_, chosen, weights) in parts
        ]
    return xs


def swapped(tensors: list[Tensor]) -> list[Tensor]:
    parts = [tensor.chunk(EXPERTS) for tensor in tensors]
    return [torch.cat(received) for received in zip(*parts, strict=True)]


def oracle() -> tuple[list[Tensor], list[MoE], list[Tensor]]:
    """The losses of both batches, models with gradients and outputs, without pipelines and without
    collectives."""
    group = SimpleNamespace(size=lambda: EXPERTS, group_name="")
    models = [model_of(expert, group) for expert in range(EXPERTS)]
    batches = [batch_of(expert) for expert in range(EXPERTS)]
    parts = [[tensor.chunk(MICROBATCHES) for tensor in batch] for batch in batches]
    totals, outputs = [torch.zeros(()) for _ in models], []
    for i in range(MICROBATCHES):
        results = everywhere(models, [inputs[i] for inputs, _ in parts])
        losses = [
            F.mse_loss(y, targets[i]) / (MICROBATCHES * EXPERTS)
            for y, (_, targets) in zip(results, parts, strict=True)
        ]
        torch.autograd.backward(losses)
        totals = [total + loss.detach() for total, loss in zip(totals, losses, strict=True)]
        outputs.append([result.detach() for result in results])
    return totals, models, [torch.cat(item) for item in zip(*outputs, strict=True)]


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
