"""Models of transformers, parallelised by their own plans."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from gpt import next_byte_loss
from huggingface_parallel import apply_tensor_parallel_plan
from llama import Llama, parallelised
from tests.support.meshes import group_without_peers, mesh_of
from tests.support.pool import Pool
from zbcompile import Example
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import compile_program, export_step
from zbcompile.model.distributed_tensors import Parts
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.schedules import build

BOUND = 1e-6  # of the largest entry of each gradient, fp32
MICROBATCHES = 2


SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 16,
    "intermediate_size": 12,
    "head_dim": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def qwen(layers: int = 1) -> Any:
    """Norms of single heads, a tied head, an odd vocabulary."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(**SIZES, num_hidden_layers=layers, tie_word_embeddings=True)
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(**SIZES, num_hidden_layers=1, num_local_experts=2)
    torch.manual_seed(0)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "ranks"), [(qwen, 2), pytest.param(mixtral, 2, marks=pytest.mark.beyond_sample)]
)
def test_gradients_are_those_of_one_process(
    make: Callable[[], Any], ranks: int, pool: Pool
) -> None:
    """On two ranks each has the whole pipeline."""
    make()  # imports transformers for all ranks
    outcome = pool.run(trained, make, ranks=ranks)
    for loss, far in outcome:
        assert loss <= BOUND
        assert max(far.values()) <= BOUND, far
    assert {name for _, far in outcome for name in far} == {
        name for name, _ in make().named_parameters()
    }


_KNOWN = """
colwise colwise_gather_output colwise_rep embedding_colwise embedding_rowwise replicate
replicated_with_grad_allreduce rowwise rowwise_rep rowwise_split_input
"""


def test_every_style_is_taken_or_refused_by_name() -> None:
    parallel = pytest.importorskip("transformers.integrations.tensor_parallel")
    for style in parallel.ALL_PARALLEL_STYLES.keys() - set(_KNOWN.split()):
        with pytest.raises(
            ValueError, match=f"the plan has '{style}' for 0; expected styles among colwise"
        ):
            apply_tensor_parallel_plan(nn.Sequential(nn.Linear(2, 2)), None, {"0": style})
    with pytest.raises(ValueError, match="Sequential brings no tensor-parallel plan along"):
        apply_tensor_parallel_plan(nn.Sequential(), None)


def test_a_plan_for_experts_is_refused_whole() -> None:
    model = mixtral()
    with pytest.raises(
        ValueError, match="Pass plan= without these: such modules stay whole"
    ) as raised:
        apply_tensor_parallel_plan(model, None)
    refused = {pattern for pattern in model.tp_plan if pattern in str(raised.value)}
    assert refused == {pattern for pattern in model.tp_plan if "experts" in pattern}


def originals(
    model: nn.Module, example: Example, first_layers: tuple[str, ...], labels: dict[str, str]
) -> list[int]:
    """For each of four stages, one a layer, the stage whose graphs it has, on the first of two
    ranks."""
    Parts(model, labels)
    microbatch = one_microbatch(example)
    exported = export_step(model, microbatch, example.loss, process_groups=labels)
    cuts = CompileOptions(balance=first_layers)
    program = compile_program(model, microbatch, exported, build("1f1b", 4, 4), cuts)
    return [stage.original for stage in program.stages]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hooked", "expected"),
    [
        pytest.param(False, [0, 1, 1, 3], id="equal", marks=pytest.mark.beyond_sample),
        pytest.param(True, [0, 1, 2, 3], id="hook", marks=pytest.mark.beyond_sample),
    ],
)
def test_equal_stages_of_parts_have_one_graph(hooked: bool, expected: list[int]) -> None:
    with group_without_peers(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = apply_tensor_parallel_plan(qwen(layers=4), mesh)
        labels = {mesh.get_group().group_name: "tp"}
        if hooked:
            model.model.layers[1].mlp.up_proj.register_forward_hook(_doubled)
        example = Example(model, (), {"input_ids": batch(), "labels": batch()})
        cuts = tuple(f"model.layers.{i}" for i in (1, 2, 3))
        assert originals(model, example, cuts, labels) == expected


@pytest.mark.slow
def test_stages_have_one_graph_whose_layers_have_buffers_and_get_dtensors() -> None:
    """Attention with its own tables, and layers whose norms give parts of a sequence to it. Tables
    of other numbers are inputs of the same graph."""
    with group_without_peers(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, labels = parallelised(Llama(4, 16, 2, 8), mesh), {mesh.get_group().group_name: "tp"}
        model.blocks[1].attention.cos.add_(1)
        tokens = torch.randint(256, (2, 8))
        example = Example(model, (tokens,), loss=next_byte_loss, target=tokens)
        cuts = tuple(f"blocks.{i}" for i in (1, 2, 3))
        assert originals(model, example, cuts, labels) == [0, 1, 1, 3]


def _doubled(module: nn.Module, options: Any, result: Any) -> Any:
    return result * 2
