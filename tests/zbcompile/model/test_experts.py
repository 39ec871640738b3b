"""Mixtures of experts that drop no token."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.training import AsEager
from tests.support.zoo import SMALL


class Dropless(nn.Module):
    """Sorts tokens by their two of four experts and multiplies all of them at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(16, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 16, 32) / 4)
        self.down = nn.Parameter(torch.randn(4, 32, 16) / 6)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(4, dtype=torch.int64)
        ends = counts.scatter_add(0, chosen.flatten(), torch.ones_like(order)).cumsum(0).int()
        built = F.silu(F.grouped_mm(x[order // 2], self.up, offs=ends))
        built = F.grouped_mm(built, self.down, offs=ends)
        rows = torch.zeros_like(built).index_copy(0, order, built)
        return x + (rows.view(-1, 2, 16) * weights.unsqueeze(-1)).sum(1)


@pytest.mark.slow
def test_a_layer_without_dropped_tokens() -> None:
    """Bitwise, split into B and W, and its FLOPs are those of the rows: three products of 32 by 16
    for each."""
    torch.manual_seed(0)
    model, rows = nn.Sequential(*(Dropless() for _ in range(4))), 6
    compared = AsEager(model, 4, schedule="zb-v", ranks=2)
    compared.step(torch.randn(4 * rows, 16), target=torch.randn(4 * rows, 16))
    stages = compared.pipe.program.stages
    layer = 2 * (2 * 2 * rows * 16 * 32) + 2 * rows * 16 * 4
    assert [stage.flops["F"] for stage in stages] == [layer * 4 // len(stages)] * len(stages)
    assert all(stage.flops["W"] == stage.flops["F"] for stage in stages)


@pytest.mark.beyond_sample
@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), [("Qwen3Moe", "zb-h1"), ("DeepseekV3", "zb-v")])
def test_grouped_products_of_transformers(name: str, schedule: str) -> None:
    """In float32, of which torch cannot infer the shape on a CPU."""
    x = torch.randint(0, 96, (8, 12))
    model = transformers_model(name)
    AsEager(model, 4, None, schedule=schedule, ranks=2).step(input_ids=x, labels=x)


def transformers_model(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "Qwen3Moe": {"num_experts": 8, "head_dim": 8, "num_key_value_heads": 2},
        "DeepseekV3": {
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16},
            **{"num_key_value_heads": 4, "kv_lora_rank": 16, "n_routed_experts": 8, "n_group": 2},
            **{"topk_group": 1, "first_k_dense_replace": 1},
        },
    }
    rest = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "use_cache": False}
    config = getattr(transformers, f"{name}Config")(**SMALL, **rest, **sizes[name])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_experts_implementation("grouped_mm")
    return model
