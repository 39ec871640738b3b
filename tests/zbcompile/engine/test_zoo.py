"""Models that people train, pipelined, against eager gradient accumulation: two steps with AdamW
between them; losses, every gradient, and the state dict with all buffers bit by bit.

Each model runs under one schedule here; all combinations:
`examples/benchmarks/oracle_sweep.py --problems llama bert ...`.
"""

from dataclasses import replace

import pytest
import torch

import zbcompile
from tests.support.training import (
    AsEager,
    Case,
    assert_bitwise,
    compiled_for,
    pipeline_of,
    pipelined,
    quickly,
    reference,
)
from tests.support.zoo import ZOO, half_padded_text
from zbcompile.passes.graph.source_location import origin_of

CASES = {  # model: schedule, ranks
    "mixtral": ("zb-h1", 3),
    "bert": ("1f1b", 2),
    "unet": ("1f1b", 3),
    "custom-op": ("zb-v", 3),
    "resnet": ("zb-h1", 2),
    "llama": ("zb-h1", 4),
    "vit": ("zb-v", 4),
    "mamba": ("zb-h1", 4),
    "gpt2": ("zb-h1", 3),
    "qwen-moe": ("zb-v", 2),
    "llama-unpadded": ("zb-v", 2),
    "t5": ("1f1b", 4),
    "whisper": ("zb-v", 3),
    "gemma2": ("1f1b", 3),
}
SAMPLE = list(CASES)[:6]  # what the others have, these have, or the sample of transformers


def case_of(name: str, steps: int = 2) -> Case:
    return Case(name, *CASES[name], microbatches=4, steps=steps)


def beyond(names: list[str], sample: list[str]) -> list[object]:
    marks = {name: [] if name in sample else [pytest.mark.beyond_sample] for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", beyond(list(CASES), SAMPLE))
def test_in_one_process(name: str) -> None:
    """Every operation of the graphs that ran says which line of the model, or which pass of the
    compiler, made it."""
    case = case_of(name)
    assert_bitwise(quickly(case), reference(case))
    stages = compiled_for(case).stages
    graphs = [piece.module.graph for stage in stages for piece in stage.pieces.values()]
    calls = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    assert [node for node in calls if not (origin_of(node) or node.meta.get("pass"))] == []


@pytest.mark.slow
def test_padded_and_full_microbatches_in_one_step() -> None:
    """Llama attends without a mask where nothing is padded."""
    options = {"schedule": "zb-v", "ranks": 2, "static_inputs": ("attention_mask",)}
    compared = AsEager(ZOO["llama"].model(), 4, None, **options)
    compared.step(**half_padded_text(8).kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("name", beyond(["mixtral", "t5", "unet", "mamba"], ["unet"]))
def test_recomputed(name: str) -> None:
    """Routes of experts and masks are those of the forward."""
    case = case_of(name, steps=1)
    assert_bitwise(quickly(replace(case, recompute="full")), reference(case))


@pytest.mark.slow
def test_an_lstm_is_refused_with_exact_and_near_without() -> None:
    """torch.export traces a recurrent layer as other operations than eager's kernels."""
    case = Case("lstm", "1f1b", 2, 4, steps=1)
    with pytest.raises(zbcompile.CompileError, match=r"exact=True: an LSTM .* Use exact=False"):
        pipelined(case)
    ours, theirs = pipelined(replace(case, exact=False)), reference(case)
    for name, gradient in theirs.gradients[0].items():
        torch.testing.assert_close(ours.gradients[0][name], gradient, rtol=0, atol=1e-6)


def test_the_zoo_is_tested() -> None:
    assert {*CASES, "lstm"} == set(ZOO)


@pytest.mark.slow
def test_eval_returns_the_models_own_output() -> None:
    """transformers' output object with its cache, the loss on the whole batch."""
    problem, pipe = ZOO["gpt2"], pipeline_of(Case("gpt2", "1f1b", 2, 4))
    batch = problem.batches(1, 8)[0]
    ours = pipe.eval(**batch.kwargs)
    with torch.no_grad():
        theirs = problem.model().eval()(**batch.kwargs)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.logits, theirs.logits)
    assert type(ours.past_key_values) is type(theirs.past_key_values)
