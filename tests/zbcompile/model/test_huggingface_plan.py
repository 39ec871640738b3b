"""Models of transformers, parallelised by their own plans."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.pool import Pool

BOUND = 1e-6  # of the largest entry of each gradient, fp32
MICROBATCHES = 2


def qwen() -> Any:
    """Norms of single heads, a tied head, an odd vocabulary."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        **{"vocab_size": 17, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "head_dim": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "use_cache": False},
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        **{"vocab_size": 17, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "head_dim": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "use_cache": False},
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(17, (4, 6))


def trained(make: Callable[[], Any]) -> tuple[float, dict[str, float]]:
    """By how much loss and gradients differ from those of one process; experts, if any, stay whole."""
    mesh, whole = mesh_of(pp=dist.get_world_size() // 2, tp=2), make()
    plan = {pattern: style for pattern, style in whole.tp_plan.items() if "experts" not in pattern}
    model = zbcompile.apply_tensor_parallel_plan(make(), mesh["tp"], plan)
    loss = torch.zeros(())
    for rows in batch().chunk(MICROBATCHES):
        part = whole(input_ids=rows, labels=rows).loss / MICROBATCHES
        part.backward()
        loss = loss + part.detach()
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="zb-h1", microbatches=MICROBATCHES)
    ours = pipe.step(input_ids=batch(), labels=batch())
    expected = dict(whole.named_parameters())
    far = {}
    for name, parameter in pipe.named_parameters():
        gradient, other = parameter.grad, expected[name].grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[union-attr]
        far[name] = float((gradient - other).abs().max() / other.abs().max())
    pipe.close()
    return float((ours - loss).abs() / loss), far


@pytest.mark.slow
@pytest.mark.parametrize(("make", "ranks"), [(qwen, 2), (mixtral, 2)])
def test_gradients_are_those_of_one_process(make: Callable[[], Any], ranks: int, pool: Pool) -> None:
    """On two ranks each has the whole pipeline."""
    pool.rehearse(qwen)  # imports transformers for all ranks
    found = pool.run(trained, make, ranks=ranks)
    for loss, far in found:
        assert loss <= BOUND
        assert max(far.values()) <= BOUND, far
    assert {name for _, far in found for name in far} == {name for name, _ in make().named_parameters()}


KNOWN = {
    *("colwise", "colwise_gather_output", "colwise_rep", "embedding_colwise", "embedding_rowwise", "replicate"),
    *("replicated_with_grad_allreduce", "rowwise", "rowwise_rep", "rowwise_split_input"),
}


def test_every_style_is_taken_or_refused_by_name() -> None:
    parallel = pytest.importorskip("transformers.integrations.tensor_parallel")
    for style in parallel.ALL_PARALLEL_STYLES.keys() - KNOWN:
        with pytest.raises(
            zbcompile.PipelineError, match=f"the plan has '{style}' for 0; expected styles among colwise"
        ):
            zbcompile.apply_tensor_parallel_plan(nn.Sequential(nn.Linear(2, 2)), None, {"0": style})
    with pytest.raises(zbcompile.PipelineError, match="Sequential brings no tensor-parallel plan along"):
        zbcompile.apply_tensor_parallel_plan(nn.Sequential(), None)


def test_a_plan_for_experts_is_refused_whole() -> None:
    model = mixtral()
    with pytest.raises(zbcompile.PipelineError, match="Pass plan= without these: such modules stay whole") as raised:
        zbcompile.apply_tensor_parallel_plan(model, None)
    refused = {pattern for pattern in model.tp_plan if pattern in str(raised.value)}
    assert refused == {pattern for pattern in model.tp_plan if "experts" in pattern}
