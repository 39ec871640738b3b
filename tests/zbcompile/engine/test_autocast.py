"""Autocast around a step: dropout is scaled in the low precision, forward and backward, as eager's
kernels do."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import Batch, microbatch_loss
from tests.support.training import assert_same_tensors, gradients_of
from tests.support.zoo import SMALL, ZOO


def step_as_eager(
    pipe: zbcompile.Pipeline, eager: nn.Module, loss: Any, batch: Batch, enabled: bool = True
) -> None:
    """Loss and gradients bit by bit; eager's backward stands outside, as torch recommends."""
    target = {} if batch.target is None else {"target": batch.target}
    expected, step = torch.tensor(0.0), pipe.step_index
    for i, part in enumerate(batch.parts(2)):
        torch.manual_seed(zbcompile.microbatch_seed(step, i))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            scaled = microbatch_loss(eager, loss, part) / 2
        scaled.backward()
        expected = expected + scaled.detach()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        assert torch.equal(pipe.step(*batch.args, **batch.kwargs, **target), expected)
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")


@pytest.mark.slow
@pytest.mark.filterwarnings("error:warm-up")  # attention saves float32, fake tensors say bfloat16
def test_bert_with_dropout() -> None:
    """Its head is not tied: eager casts a tied weight once for both uses."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SMALL, tie_word_embeddings=False))
    assert model.config.hidden_dropout_prob > 0
    eager, (batch,) = copy.deepcopy(model), ZOO["bert"].batches(1, 4)
    pipe = zbcompile.pipeline(model, schedule="zb-h1", ranks=2, microbatches=2, exact=True)
    step_as_eager(pipe, eager, None, batch)


class PartlyUncast(nn.Sequential):
    """Opts out of autocast for its first linear layer; without parameters on the last stage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        with torch.autocast("cpu", enabled=False):
            x = self[1](x.float())
        return self[2](x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


@pytest.mark.slow
def test_autocast_is_that_of_each_step() -> None:
    """A step inside autocast and one outside are two programs."""
    torch.manual_seed(0)
    model = PartlyUncast(nn.Embedding(64, 4), nn.Linear(4, 4), nn.Linear(4, 64))
    eager, x = copy.deepcopy(model), torch.arange(8).view(4, 2)
    options = {"schedule": "zb-h1", "ranks": 2, "microbatches": 2, "exact": True}
    pipe = zbcompile.pipeline(model, loss=loss_of, **options)
    for enabled in (False, True, False):
        step_as_eager(pipe, eager, loss_of, Batch((x,), {}, x), enabled)
