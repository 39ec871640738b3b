"""Mixtures of experts that drop no token."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import Batch, eager_step
from tests.support.training import assert_same_tensors, gradients_of

MICROBATCHES = 4


class Dropless(nn.Module):
    """Sorts tokens by their experts and multiplies all of them at the same time."""

    def __init__(self, width: int = 16, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.route = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 6)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x).softmax(-1).topk(self.chosen)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.experts, dtype=torch.int64).scatter_add(
            0, chosen.flatten(), torch.ones_like(order)
        )
        ends = counts.cumsum(0).int()
        built = F.grouped_mm(
            F.silu(F.grouped_mm(x[order // self.chosen], self.up, offs=ends)), self.down, offs=ends
        )
        rows = torch.zeros_like(built).index_copy(0, order, built)
        return x + (rows.view(-1, self.chosen, x.shape[-1]) * weights.unsqueeze(-1)).sum(1)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_layer_without_dropped_tokens(schedule: str) -> None:
    """Bitwise, split into B and W, and its FLOPs are those of the rows: three products of 32 by 16
    for each."""
    torch.manual_seed(0)
    model, x, y = (
        nn.Sequential(*(Dropless() for _ in range(4))),
        torch.randn(24, 16),
        torch.randn(24, 16),
    )
    eager = nn.Sequential(*(Dropless() for _ in range(4)))
    eager.load_state_dict(model.state_dict())
    expected = eager_step(eager, F.mse_loss, Batch((x,), {}, y), MICROBATCHES, 0)
    pipe = zbcompile.pipeline(
        model, schedule=schedule, ranks=2, microbatches=MICROBATCHES, loss=F.mse_loss, exact=True
    )
    assert torch.equal(pipe.step(x, target=y), expected)
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
    stages = pipe.program.stages
    rows = 2 * 24 // MICROBATCHES
    layer = 2 * (2 * rows * 16 * 32) + 2 * (24 // MICROBATCHES) * 16 * 4
    assert [stage.flops["F"] for stage in stages] == [layer * 4 // len(stages)] * len(stages)
    assert all(stage.flops["W"] == stage.flops["F"] for stage in stages)


def transformers_model(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
    }
    layers = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "use_cache": False,
    }
    if name == "Qwen3Moe":
        local = {"num_experts": 8, "head_dim": 8, "num_key_value_heads": 2}
    else:
        heads = {
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        }
        experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        local = {**heads, **experts, "q_lora_rank": 16, "kv_lora_rank": 16}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **layers, **local)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_experts_implementation("grouped_mm")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("Qwen3Moe", "zb-h1"), pytest.param("DeepseekV3", "zb-v", marks=pytest.mark.beyond_sample)],
)
def test_grouped_products_of_transformers(name: str, schedule: str) -> None:
    """In float32, of which torch cannot infer the shape on a CPU."""
    model, eager = transformers_model(name), transformers_model(name)
    x = torch.randint(0, 96, (8, 12))
    expected = eager_step(eager, None, Batch((), {"input_ids": x, "labels": x}), MICROBATCHES, 0)
    pipe = zbcompile.pipeline(
        model, schedule=schedule, ranks=2, microbatches=MICROBATCHES, exact=True
    )
    assert torch.equal(pipe.step(input_ids=x, labels=x), expected)
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
