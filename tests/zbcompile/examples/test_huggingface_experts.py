"""Mixtures of experts of transformers whose experts are on several ranks."""

import threading
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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


def dropless(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' grouped experts with a stable sort, so that tokens of an expert are added up in
    their order."""
    count, flat = chosen.shape[1], chosen.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=module.num_experts).cumsum(0).int()
    result = F.grouped_mm(hidden[order // count], module.gate_up_proj.transpose(1, 2), offs=ends)
    result = F.grouped_mm(module._apply_gate(result), module.down_proj.transpose(1, 2), offs=ends)
    result = result * weights.flatten()[order].unsqueeze(1)
    return result[order.argsort()].view(len(chosen), count, -1).sum(1)


class Everywhere:
    """One process that plays all ranks, a thread for each: eager experts of the first model, of the
    tokens of all ranks in their order. All threads make the same operations, so that autograd
    numbers them alike; what the first one has computed counts."""

    def __init__(self) -> None:
        self.barrier, self.inputs = threading.Barrier(RANKS), [(torch.empty(0),) * 3] * RANKS
        self.outputs: Tensor = torch.empty(0)
        self.ranks: dict[int, int] = {}  # of threads
        self.modules: dict[tuple[int, int], Any] = {}

    def experts(self, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rank = self.ranks[threading.get_ident()]
        self.inputs[rank] = hidden, chosen, weights
        self.barrier.wait()
        result = dropless(module, *(torch.cat(parts) for parts in zip(*self.inputs, strict=True)))
        if rank == 0:
            self.outputs = result
        self.barrier.wait()
        local = self.outputs.chunk(RANKS)[rank]
        self.barrier.wait()
        return local

    def losses(self, models: list[Any], inputs: list[Tensor]) -> list[Tensor]:
        result: list[Any] = [None] * RANKS

        def run(rank: int) -> None:
            self.ranks[threading.get_ident()] = rank
            result[rank] = models[rank](input_ids=inputs[rank], labels=inputs[rank]).loss

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
        for item in threads:
            item.start()
        for item in threads:
            item.join()
        return result


def oracle(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process that has all experts, and the batches of all ranks."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    everywhere, models = Everywhere(), [transformers_model(name) for _ in range(RANKS)]
    ALL_EXPERTS_FUNCTIONS.register("everywhere", everywhere.experts)
    for model in models:
        model.config._experts_implementation = "everywhere"
    scaled: list[list[Tensor]] = [[] for _ in range(RANKS)]
    parts = [batch_of(rank).chunk(MICROBATCHES) for rank in range(RANKS)]
    for inputs in zip(*parts, strict=True):
        computed = everywhere.losses(models, [*inputs])
        losses = [item / (MICROBATCHES * RANKS) for item in computed]
        torch.autograd.backward(losses)
        for rank, loss in enumerate(losses):
            scaled[rank].append(loss.detach())
    gradients = {}
    for name_, parameter in models[0].named_parameters():
        rest = [model.get_parameter(name_).grad for model in models[1:]]
        full = ".experts." in name_ and "shared" not in name_
        gradients[name_] = parameter.grad if full else reduce(torch.add, rest, parameter.grad)
    return reduce(torch.add, [loss for rank in scaled for loss in rank]), gradients


CASES = [("DeepseekV3", "1f1b", 2), ("DeepseekV3", "zb-v", 4), ("Qwen3Moe", "zb-h1", 4)]


@pytest.mark.beyond_sample
@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule", "ranks"), CASES)
def test_transformers_experts_on_two_ranks(
    name: str, schedule: str, ranks: int, pool: Pool
) -> None:
    """Of four, two are in a pipeline. Bit for bit those of one process, which adds what the experts
    compute in the order of the ranks."""
    loss, expected = oracle(name)
    for rank, ours, gradients in pool.run(trained, name, schedule, ranks=ranks):
        assert torch.equal(ours, loss)
        for item, gradient in gradients.items():
            full = expected[item]
            local = full if gradient.shape == full.shape else full.chunk(RANKS)[rank]
            assert torch.equal(gradient, local), item


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="has no layer of experts"):
        divide_experts(torch.nn.Linear(2, 2), None)
