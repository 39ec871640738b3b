"""Models of transformers, parallelised by their own plans."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from huggingface_parallel import apply_tensor_parallel_plan
from tests.support.meshes import mesh_of
from tests.support.pool import Pool

transformers = pytest.importorskip("transformers")
BOUND = 1e-6  # of the largest entry of each gradient, fp32
MICROBATCHES = 2


SIZES: dict[str, Any] = {
    **{"vocab_size": 17, "hidden_size": 16, "intermediate_size": 12, "head_dim": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1},
    "use_cache": False,
}


def qwen() -> Any:
    """Norms of single heads, a tied head, an odd vocabulary."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)
    return transformers.Qwen3ForCausalLM(config)


def mixtral() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2)
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(17, (4, 6))


def trained(make: Callable[[], Any]) -> tuple[float, dict[str, float]]:
    """By how much loss and gradients differ from those of one process; experts, if any,
    stay whole."""
    mesh, full = mesh_of(pp=dist.get_world_size() // 2, tp=2), make()
    plan = {pattern: style for pattern, style in full.tp_plan.items() if "experts" not in pattern}
    model = apply_tensor_parallel_plan(make(), mesh["tp"], plan)
    loss = torch.zeros(())
    for rows in batch().chunk(MICROBATCHES):
        part = full(input_ids=rows, labels=rows).loss / MICROBATCHES
        part.backward()
        loss = loss + part.detach()
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="zb-h1", microbatches=MICROBATCHES)
    ours = pipe.step(input_ids=batch(), labels=batch())
    expected = dict(full.named_parameters())
    far = {}
    for name, parameter in pipe.named_parameters():
        gradient, second = parameter.grad, expected[name].grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[union-attr]
        far[name] = float((gradient - second).abs().max() / second.abs().max())
    pipe.close()
    return float((ours - loss).abs() / loss), far


@pytest.mark.beyond_sample
@pytest.mark.slow
@pytest.mark.parametrize("make", [qwen, mixtral])
def test_gradients_are_those_of_one_process(make: Callable[[], Any], pool: Pool) -> None:
    """On two ranks each has the whole pipeline."""
    outcome = pool.run(trained, make, ranks=2)
    for loss, far in outcome:
        assert max(loss, *far.values()) <= BOUND, far
    names = {name for name, _ in make().named_parameters()}
    assert {name for _, far in outcome for name in far} == names


_KNOWN = """
colwise colwise_gather_output colwise_rep embedding_colwise embedding_rowwise replicate
replicated_with_grad_allreduce rowwise rowwise_rep rowwise_split_input
"""


def test_what_a_plan_cannot_have_is_refused_by_name() -> None:
    parallel = pytest.importorskip("transformers.integrations.tensor_parallel")
    for style in parallel.ALL_PARALLEL_STYLES.keys() - set(_KNOWN.split()):
        said = f"the plan has '{style}' for 0; expected styles among colwise"
        with pytest.raises(ValueError, match=said):
            apply_tensor_parallel_plan(nn.Sequential(nn.Linear(2, 2)), None, {"0": style})
    with pytest.raises(ValueError, match="Sequential brings no tensor-parallel plan along"):
        apply_tensor_parallel_plan(nn.Sequential(), None)
    with pytest.raises(ValueError, match="Pass plan= without these: such modules stay") as raised:
        apply_tensor_parallel_plan(model := mixtral(), None)
    refused = {pattern for pattern in model.tp_plan if pattern in str(raised.value)}
    assert refused == {pattern for pattern in model.tp_plan if "experts" in pattern}
