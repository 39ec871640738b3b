"""Replicas of a pipeline with a sharded output layer train as one process does on the concatenated
batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.oracle import eager_step
from tests.support.pool import Pool
from tests.support.replicated import REPLICAS, mesh_of_replicas
from tests.support.vocabulary_training import VocabularyCase, batches_of, distance

CASE = VocabularyCase("gpt-tied", "1f1b", 2, ranks=2)
OPTIONS: Any = {
    "schedule": CASE.schedule,
    "microbatches": CASE.microbatches,
    "loss": next_byte_loss,
    "vocab": CASE.vocab,
}
WHOLE = batches_of(replace(CASE, microbatches=REPLICAS * CASE.microbatches))[0]


def model() -> nn.Module:
    """The output layer has the weight of the embedding, which the first rank looks up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(layers=1, width=32, heads=2, length=16, tied=True).double()


def replicated() -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Returns the results of a step on its replica's half of a batch: loss, gradients, norm of all
    gradients."""
    mesh = mesh_of_replicas()
    pipe = zbcompile.pipeline(model(), mesh=mesh, **OPTIONS)
    local = list(WHOLE.parts(REPLICAS))[mesh["dp"].get_local_rank()]
    loss = pipe.step(*local.args, target=local.target)
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    return loss, gradients, pipe.clip_grad_norm_(1.0)


@pytest.mark.slow
def test_gradients_are_those_of_the_concatenated_batch(pool: Pool) -> None:
    """In float64, within 1e-12; the rows of a tied weight are reduced once, after the lookups have
    been added."""
    expected = model()
    loss = eager_step(expected, next_byte_loss, WHOLE, REPLICAS * CASE.microbatches, 0)
    norm = nn.utils.get_total_norm([p.grad for p in expected.parameters() if p.grad is not None])
    ranks = pool.run(replicated, ranks=4)
    for replica in (ranks[:2], ranks[2:]):
        for its_loss, _, its_norm in replica:
            assert distance(its_loss, loss) < 1e-12
            assert (
                distance(its_norm.double(), norm.double()) < 1e-6
            )  # norms of gradients are float32
        for name, parameter in expected.named_parameters():
            parts = [results[name] for _, results, _ in replica if name in results]
            full = parts[0] if parts[0].shape == parameter.shape else torch.cat(parts)
            assert parameter.grad is not None
            assert distance(full, parameter.grad) < 1e-12, name
