"""Models that people train, pipelined, against eager gradient accumulation: two steps with AdamW
between them; losses, every gradient, and the state dict with all buffers bit by bit.

Each model runs under one schedule here, and all of (schedule, ranks) occur. What those of RARELY
have, others have: they run with `pytest --every-case`; all combinations:
`examples/benchmarks/oracle_sweep.py --problems llama bert ...`.
"""

from dataclasses import replace

import pytest
import torch

import zbcompile
from tests.support.pool import Pool
from tests.support.training import (
    Case,
    assert_bitwise,
    compiled_for,
    on_ranks,
    pipeline_of,
    pipelined,
    problem_of,
    quickly,
    reference,
)
from tests.support.zoo import ZOO
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.program.program import Program

CASES = (
    Case("llama", "zb-h1", 4, 4, steps=2),
    Case("llama-unpadded", "zb-v", 2, 4, steps=2),
    Case("llama-half-padded", "zb-v", 2, 4, steps=2),
    Case("gpt2-full", "zb-v", 2, 4, steps=2),
    Case("bert-full", "zb-h1", 2, 4, steps=2),
    Case("gpt2", "zb-h1", 3, 4, steps=2),
    Case("bert", "1f1b", 2, 4, steps=2),
    Case("vit", "zb-v", 4, 4, steps=2),
    Case("t5", "1f1b", 4, 4, steps=2),
    Case("whisper", "zb-v", 3, 4, steps=2),
    Case("mixtral", "zb-h1", 3, 4, steps=2),
    Case("qwen-moe", "zb-v", 2, 4, steps=2),
    Case("gemma2", "1f1b", 3, 4, steps=2),
    Case("mamba", "zb-h1", 4, 4, steps=2),
    Case("resnet", "zb-h1", 2, 4, steps=2),
    Case("unet", "1f1b", 3, 4, steps=2),
    Case("custom-op", "zb-v", 3, 4, steps=2),
)
RARELY = {
    "llama-unpadded",
    "llama-half-padded",
    "gpt2-full",
    "bert-full",
    "t5",
    "whisper",
    "gemma2",
}
PROCESSES = (Case("gpt2", "zb-h1", 2, 4, steps=2), Case("resnet", "zb-v", 2, 4, steps=2))


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    """A group of its own: two workers share the models."""
    rarely = [pytest.mark.beyond_sample] if case.problem in RARELY else []
    return [pytest.mark.xdist_group(case.problem), *rarely]


ONE_BY_ONE = [pytest.param(case, id=str(case), marks=marks_of(case)) for case in CASES]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("case", ONE_BY_ONE)
def test_in_one_process(case: Case) -> None:
    """Every operation of the graphs that ran says which line of the model, or which pass of the
    compiler, made it."""
    assert_bitwise(quickly(case), reference(case))
    assert operations_from_nowhere(compiled_for(case)) == []


def operations_from_nowhere(program: Program) -> list[str]:
    """Returns the nodes of which `python -m zbcompile.inspect --graph` names no origin."""
    pieces = [piece for stage in program.stages for piece in stage.pieces.values()]
    calls = [
        (piece.kind, node)
        for piece in pieces
        for node in piece.module.graph.nodes
        if node.op == "call_function"
    ]
    return [
        f"{name}: {node.name}"
        for name, node in calls
        if not (origin_of(node) or node.meta.get("pass"))
    ]


@pytest.mark.beyond_sample
@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_in_processes(case: Case, pool: Pool) -> None:
    problem_of(case.problem).model()  # imports transformers for all ranks
    assert_bitwise(on_ranks(pool, pipelined, case), reference(case))


@pytest.mark.slow
def test_an_lstm_is_refused_with_exact_and_near_without() -> None:
    """torch.export traces a recurrent layer as other operations than eager's kernels."""
    case = Case("lstm", "zb-v", 2, 4, steps=1)
    with pytest.raises(zbcompile.CompileError, match=r"exact=True: an LSTM .* Use exact=False"):
        pipelined(case)
    ours, theirs = pipelined(replace(case, exact=False)), reference(case)
    for name, gradient in theirs.gradients[0].items():
        torch.testing.assert_close(ours.gradients[0][name], gradient, rtol=0, atol=1e-6)


def test_the_zoo_is_tested() -> None:
    assert {case.problem for case in CASES} | {"lstm"} == set(ZOO)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("name", ["mixtral", "t5", "unet", "mamba"])
def test_recomputed(name: str) -> None:
    """Routes of experts and masks are those of the forward."""
    (case,) = (case for case in CASES if case.problem == name)
    assert_bitwise(
        quickly(replace(case, recompute="full", steps=1)), reference(replace(case, steps=1))
    )


@pytest.mark.slow
def test_eval_returns_the_models_own_output() -> None:
    """transformers' output object with its cache, the loss on the whole batch."""
    problem, pipe = ZOO["gpt2"], pipeline_of(Case("gpt2", "1f1b", 2, 4))
    batch = problem.batches(1, 8)[0]
    pipe.compile(**batch.kwargs)
    ours = pipe.eval(**batch.kwargs)
    with torch.no_grad():
        theirs = problem.model().eval()(**batch.kwargs)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.logits, theirs.logits)
    assert type(ours.past_key_values) is type(theirs.past_key_values)
