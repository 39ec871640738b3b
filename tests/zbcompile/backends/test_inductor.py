"""backend="inductor": within its bound of eager, compiled once per distinct graph, in place, and
from the cache."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch.fx import GraphModule

import zbcompile
from tests.support.training import (
    Case,
    assert_bitwise,
    assert_close,
    pipeline_of,
    problem_of,
    reference,
    train,
)
from zbcompile.backends.inductor import compile_by_inductor
from zbcompile.backends.types import Run
from zbcompile.errors import PipelineError
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.stage.anonymous_graph import bare
from zbcompile.passes.torch_private import make_fx

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
    ),
    pytest.mark.timeout(900),  # compilers take seconds per graph, and on a busy machine many
]
RARE = pytest.mark.beyond_sample
aten = torch.ops.aten
# of the largest entry of each gradient, fp32: other orders of summation, vectorised functions
BOUND = 2e-6
# One step: an optimizer makes much of small differences, from which the next step starts.
# In processes: `examples/benchmarks/backend_sweep.py`.
CASE = Case("mlp", "zb-v", 2, 4, exact=False, steps=1)
TWO_EACH = ["layers.2", "layers.4", "layers.6"]  # layers of a stage


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder of compiled graphs for all tests of this file. inductor believes what the processor
    says of its instructions: it would compile a program for each kind of them to see."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch, config.patch({"cpp.vec_isa_ok": True}):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


def entries(folder: Path) -> int:
    """The graphs in a cache."""
    return len(list(folder.glob("fxgraph/*/*")))


def test_each_distinct_graph_is_compiled_once(cache: Path, tmp_path: Path) -> None:
    """Stages with equal layers share their graphs; a second pipeline, in whose memory gradients add
    up, and a saved program find them all."""
    before, pipe, problem = (
        entries(cache),
        pipeline_of(CASE, backend="inductor", balance=TWO_EACH),
        problem_of("mlp"),
    )
    first = train(pipe, CASE)
    assert_close(first, reference(CASE), BOUND)
    (done,) = pipe.compilations
    assert entries(cache) - before == done.compiled == done.distinct < done.graphs
    pipe, batch = pipeline_of(CASE, backend="inductor", balance=TWO_EACH), problem.batches(1, 8)[0]
    seen: list[dict[str, tuple[int, Tensor]]] = []
    for _ in range(2):
        pipe.step(*batch.args, target=batch.target)
        grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        seen.append({name: (grad.data_ptr(), grad.clone()) for name, grad in grads.items()})
    for name, gradient in first.gradients[0].items():
        assert seen[0][name][0] == seen[1][name][0]
        assert torch.equal(seen[0][name][1], gradient)  # type: ignore[arg-type]
        torch.testing.assert_close(seen[1][name][1], 2 * gradient, rtol=1e-5, atol=1e-7)  # type: ignore[operator]
    again = pipe.compilations[0]
    assert (again.compiled, again.loaded, again.distinct) == (0, done.distinct, done.distinct)
    pipe.program.save(tmp_path / "program")
    loaded = zbcompile.load(tmp_path / "program", problem.model().state_dict())
    assert_bitwise(train(loaded, CASE), first)
    assert loaded.compilations[0].compiled == 0
    plain = zbcompile.load(tmp_path / "program", problem.model().state_dict(), backend="fx")
    assert_close(train(plain, CASE), reference(CASE), BOUND)


def compiled(function: Callable[..., Any], *inputs: Tensor) -> tuple[Run, GraphModule]:
    """A function of ATen operations compiled, and its graph."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return compile_by_inductor(bare(graph))[0], graph


def random_mask(like: Tensor, rows: Tensor) -> Tensor:
    return aten.bernoulli.p(aten.empty_like.default(like), 0.5)


def sums_of_rows(like: Tensor, rows: Tensor) -> Tensor:
    return aten.index_add_.default(aten.zeros_like.default(like), 0, torch.arange(3) // 2, rows)


@pytest.mark.parametrize("written", [random_mask, pytest.param(sums_of_rows, marks=RARE)])
def test_a_kernel_reads_what_is_written_in_place(written: Callable[..., Any], cache: Path) -> None:
    """inductor alone fuses the division with the normalization, before the tensor is written."""

    def function(table: Tensor, ids: Tensor, rows: Tensor) -> list[Tensor]:
        x = aten.add.Tensor(aten.embedding.default(table, ids), 1)
        norm, mean, scale = aten.native_layer_norm.default(x, [8], table[0], table[1], 1e-5)
        divided = aten.div.Scalar(written(norm, rows), 0.9)
        product = aten.view.default(aten.mul.Tensor(norm, divided), [12, 8])
        return [x, mean, scale, divided, product, aten.mm.default(product, table[:8])]

    inputs = torch.randn(10, 8), torch.arange(12).view(2, 6) % 10, torch.randn(3, 6, 8)
    run, graph = compiled(function, *inputs)
    torch.manual_seed(0)
    expected = graph(*inputs)
    torch.manual_seed(0)
    torch.testing.assert_close(list(run(list(inputs))), expected)


@RARE
def test_results_have_the_strides_that_other_passes_expect(cache: Path) -> None:
    """A rule of inductor may give others than the operation did when the step was exported; and a
    view of a single tensor that is not empty, as a cache of transformers begins, those of eager."""

    def loss(prediction: Tensor, target: Tensor) -> list[Tensor]:
        return [aten.mse_loss_backward.default(torch.ones(()), prediction, target, 1)]

    def dense(keys: Tensor) -> list[Tensor]:
        joined = aten.cat.default([torch.empty(0), aten.transpose.int(keys, 1, 2)], -2)
        return [aten.view.default(joined, [2, -1, 8]), joined]

    images = torch.randn(2, 3, 4, 4)
    inputs = images.to(memory_format=torch.channels_last), images + 1
    graph = make_fx(loss, tracing_mode="fake")(*inputs)
    (result,) = output_values(graph.graph)
    result.meta["val"] = images
    run, _ = compile_by_inductor(bare(graph))
    ours = run(list(inputs))[0]
    torch.testing.assert_close(ours, graph(*inputs)[0])
    assert ours.stride() == images.stride() != inputs[0].stride()
    run, graph = compiled(dense, keys := torch.randn(2, 3, 4, 8))
    for ours, theirs in zip(run([keys]), graph(keys), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_a_value_of_another_dtype_is_refused(cache: Path) -> None:
    """Compiled code would take the bytes of one dtype for those of the other."""
    run, _ = compiled(lambda x: [x + 1], torch.zeros(2))
    assert torch.equal(run([torch.zeros(2)])[0], torch.ones(2))
    refused = r"input 0 .* is torch.bfloat16, and was compiled as torch.float32"
    with pytest.raises(PipelineError, match=refused):
        run([torch.zeros(2, dtype=torch.bfloat16)])
