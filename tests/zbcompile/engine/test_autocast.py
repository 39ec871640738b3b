"""Dropout under autocast: scaled in the low precision, forward and backward, as eager's
kernels do."""

import copy

import pytest
import torch

import zbcompile
from tests.support.oracle import microbatch_loss
from tests.support.training import gradients_of
from tests.support.zoo import SMALL, ZOO


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "error:warm-up"
)  # attention saves float32 where fake tensors say bfloat16
def test_bert_with_dropout() -> None:
    """Every gradient of BERT bit for bit; its head is not tied, since eager casts a tied weight
    once for both uses."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SMALL, tie_word_embeddings=False))
    eager, (batch,) = copy.deepcopy(model), ZOO["bert"].batches(1, 4)
    assert model.config.hidden_dropout_prob > 0
    pipe = zbcompile.pipeline(model, schedule="zb-h1", ranks=2, microbatches=2, exact=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = pipe.step(*batch.args, **batch.kwargs)
    expected = torch.tensor(0.0)
    for i, part in enumerate(batch.parts(2)):
        torch.manual_seed(zbcompile.microbatch_seed(0, i))
        with torch.autocast(
            "cpu", dtype=torch.bfloat16
        ):  # its backward stands outside, as torch recommends
            scaled = microbatch_loss(eager, None, part) / 2
        scaled.backward()
        expected = expected + scaled.detach()
    theirs, ours = gradients_of(eager), gradients_of(pipe)
    assert torch.equal(loss, expected)
    assert len(ours) == len(theirs) > 40
    assert [
        name
        for name, value in theirs.items()
        if value is not None and not torch.equal(ours[name], value)
    ] == []


@pytest.mark.slow
def test_a_program_without_parameters_on_the_last_stage() -> None:
    """The last stage has only casts and the loss under autocast, and the loss alone without."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 64)
    )
    eager, x = copy.deepcopy(model), torch.arange(8).view(4, 2)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())

    pipe = zbcompile.pipeline(
        model, schedule="zb-h1", ranks=2, microbatches=2, loss=loss, exact=True
    )
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            results = pipe.step(x, target=x)
            losses = [loss(eager(part), part) / 2 for part in x.chunk(2)]
        for item in losses:
            item.backward()
        assert torch.equal(results, losses[0].detach() + losses[1].detach())
    theirs, ours = gradients_of(eager), gradients_of(pipe)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
