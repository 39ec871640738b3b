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

MICROBATCHES, RANKS = 4, 2


def batch_of(rank: int) -> Tensor:
    torch.manual_seed(10 + rank)
    return torch.randint(0, 96, (MICROBATCHES * 2, 12))


def trained(name: str, schedule: str, factor: float) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Of a rank along "ep": the loss of a step and its gradients."""
    mesh = mesh_of(ep=RANKS, pp=dist.get_world_size() // RANKS)
    model, placements = divide_experts(transformers_model(name), mesh["ep"], factor)
    pipe = zbcompile.pipeline(
        model,
        mesh=mesh,
        schedule=schedule,
        microbatches=MICROBATCHES,
        exact=True,
        placements=placements,
    )
    rank = mesh["ep"].get_local_rank()
    loss = pipe.step(input_ids=batch_of(rank), labels=batch_of(rank))
    result = gradients_of(pipe)
    pipe.close()
    return rank, loss, result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [pytest.param("Qwen3Moe", "zb-h1", marks=pytest.mark.beyond_sample), ("DeepseekV3", "1f1b")],
)
def test_transformers_experts_on_two_ranks_beside_two_of_a_pipeline(
    name: str, schedule: str, pool: Pool
) -> None:
    """Loss and gradients of one process, within 1e-6 of the largest entry of each."""
    model, loss = transformers_model(name), torch.zeros(())
    for part in torch.cat([batch_of(rank) for rank in range(RANKS)]).chunk(RANKS * MICROBATCHES):
        scaled = model(input_ids=part, labels=part).loss / (RANKS * MICROBATCHES)
        scaled.backward()
        loss += scaled.detach()
    for rank, ours, gradients in pool.run(trained, name, schedule, 2.0, ranks=2 * RANKS):
        torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
        for item, gradient in gradients.items():
            full = model.get_parameter(item).grad
            local = full.chunk(RANKS)[rank] if gradient.shape != full.shape else full
            assert (gradient - local).abs().max() <= 1e-6 * local.abs().max(), item


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="has no layer of experts"):
        divide_experts(torch.nn.Linear(2, 2), None)
