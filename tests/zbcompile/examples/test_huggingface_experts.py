"""Mixtures of experts of transformers whose experts are on several ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zbcompile
from huggingface_parallel import divide_experts
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from tests.support.training import gradients_of
from tests.zbcompile.model.test_experts import transformers_model

MICROBATCHES, RANKS = 2, 2


def batch_of(rank: int) -> Tensor:
    torch.manual_seed(10 + rank)
    return torch.randint(0, 96, (MICROBATCHES * 2, 12))


def trained(name: str, schedule: str) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Of a rank along "ep": the loss of a step and its gradients."""
    mesh = mesh_of(ep=RANKS, pp=dist.get_world_size() // RANKS)
    model, placements = divide_experts(transformers_model(name), mesh["ep"], 2.0)
    options = {"schedule": schedule, "microbatches": MICROBATCHES, "placements": placements}
    pipe = zbcompile.pipeline(model, mesh=mesh, exact=True, **options)
    rank = mesh["ep"].get_local_rank()
    loss = pipe.step(input_ids=batch_of(rank), labels=batch_of(rank))
    result = gradients_of(pipe)
    pipe.close()
    return rank, loss, result


@pytest.mark.beyond_sample
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "ranks"),
    [("DeepseekV3", "1f1b", 2), ("DeepseekV3", "zb-v", 4), ("Qwen3Moe", "zb-h1", 4)],
)
def test_transformers_experts_on_two_ranks(
    name: str, schedule: str, ranks: int, pool: Pool
) -> None:
    """Of four, two are in a pipeline. Those of one process with the batches of all ranks; bit for bit
    only where experts add in the order of the ranks (`tests/zbcompile/engine`)."""
    model, loss = transformers_model(name), torch.zeros(())
    for parts in zip(*(batch_of(rank).chunk(MICROBATCHES) for rank in range(RANKS)), strict=True):
        for rows in parts:
            part = model(input_ids=rows, labels=rows).loss / (MICROBATCHES * RANKS)
            part.backward()
            loss = loss + part.detach()
    expected = gradients_of(model)
    for rank, ours, gradients in pool.run(trained, name, schedule, ranks=ranks):
        torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
        for item, gradient in gradients.items():
            full = expected[item]
            assert full is not None
            local = full if gradient.shape == full.shape else full.chunk(RANKS)[rank]
            assert float((gradient - local).abs().max() / full.abs().max()) <= 1e-6, item


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="has no layer of experts"):
        divide_experts(torch.nn.Linear(2, 2), None)
