"""Models of transformers, parallelised by their own plans."""

from typing import Any

import pytest
import torch
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


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(17, (4, 6))


def trained() -> tuple[float, dict[str, float]]:
    """By how much loss and gradients differ from those of one process."""
    mesh, whole = mesh_of(pp=2, tp=2), qwen()
    model = zbcompile.apply_tensor_parallel_plan(qwen(), mesh["tp"])
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
def test_gradients_are_those_of_one_process(pool: Pool) -> None:
    pool.rehearse(qwen)  # imports transformers for all ranks
    found = pool.run(trained, ranks=4)
    for loss, far in found:
        assert loss <= BOUND
        assert max(far.values()) <= BOUND, far
    assert {name for _, far in found for name in far} == {name for name, _ in qwen().named_parameters()}


def test_a_style_that_is_not_known() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(zbcompile.PipelineError, match="the plan has 'moe_tp_experts' for 0; expected one of colwise, "):
        zbcompile.apply_tensor_parallel_plan(model, None, {"0": "moe_tp_experts"})
    with pytest.raises(zbcompile.PipelineError, match="Sequential brings no tensor-parallel plan along"):
        zbcompile.apply_tensor_parallel_plan(model, None)
