"""backend="inductor": within its bound of eager, compiled once per distinct graph, in place, and
from the cache."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import zbcompile
from tests.support.pool import Pool
from tests.support.training import (
    Case,
    Trained,
    assert_bitwise,
    assert_close,
    join,
    pipeline_of,
    problem_of,
    reference,
    train,
)
from zbcompile.backends.backend import Compilation
from zbcompile.backends.inductor import compile_by_inductor
from zbcompile.backends.types import Run
from zbcompile.errors import PipelineError
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.stage.anonymous_graph import bare
from zbcompile.passes.torch_private import make_fx

pytestmark = [
    pytest.mark.beside_ranks,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
    ),
    pytest.mark.timeout(900),  # compilers take seconds per graph, and on a busy machine many
]
aten = torch.ops.aten
# of the largest entry of each gradient, fp32: other orders of summation, vectorised functions
BOUND = 2e-6
# One step each: an optimizer such as Adam makes much of small differences, and the next step starts
# from them.
CASE = Case("mlp", "zb-v", 2, 4, exact=False, steps=1)
GLOO = [
    pytest.param(Case(problem, name, 2, 4, exact=False, steps=1), marks=marks)
    for problem, name, marks in (
        ("short-mlp", "zb-h1", pytest.mark.beyond_sample),
        ("mlp", "zb-v", ()),
        ("mlp", "dualpipe-v", pytest.mark.beyond_sample),
    )
]


def pipe_of(case: Case, **options: Any) -> zbcompile.Pipeline:
    """Two layers on each stage: then all cases have the same first, middle and last stage."""
    layers = len(problem_of(case.problem).model().layers)  # type: ignore[arg-type]
    return pipeline_of(case, balance=[f"layers.{i}" for i in range(2, layers, 2)], **options)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder of compiled graphs for all tests of this file."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


def entries(folder: Path) -> int:
    """The graphs in a cache."""
    return len(list(folder.glob("fxgraph/*/*")))


@pytest.fixture(scope="module")
def first(cache: Path) -> tuple[Trained, Compilation]:
    """The first training with these graphs, and what was compiled for it."""
    before = entries(cache)
    pipe = pipe_of(CASE, backend="inductor")
    trained = train(pipe, CASE)
    assert entries(cache) - before == pipe.compilations[0].compiled
    return trained, pipe.compilations[0]


def test_gradients_are_within_the_bound(first: tuple[Trained, Compilation]) -> None:
    assert_close(first[0], reference(CASE), BOUND)


def test_each_distinct_graph_is_compiled_once(
    first: tuple[Trained, Compilation], cache: Path
) -> None:
    """Stages with equal layers share their graphs; a second pipeline finds them all."""
    done = first[1]
    assert done.compiled == done.distinct < done.graphs
    pipe = pipe_of(CASE, backend="inductor")
    assert_bitwise(train(pipe, CASE), first[0])
    again = pipe.compilations[0]
    assert (again.compiled, again.loaded, again.distinct) == (0, done.distinct, done.distinct)


def run_here(case: Case, folder: str) -> tuple[Trained, Compilation]:
    """One rank's share of a training through the cache in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        pipe = pipe_of(case, backend="inductor")
        return train(pipe, case), pipe.compilations[0]


@pytest.mark.parametrize("case", GLOO, ids=str)
def test_zero_bubble_schedules_with_inductor_over_gloo(case: Case, cache: Path, pool: Pool) -> None:
    """torch's own refuse compiled modules. The ranks share what there is to compile: under
    dualpipe-v its pairs."""
    before = entries(cache)
    shares, done = zip(*pool.run(run_here, case, str(cache), ranks=2, timeout=800), strict=True)
    assert_close(join(shares), reference(case), BOUND)
    assert sum(item.compiled for item in done) >= entries(cache) - before
    assert all(item.compiled + item.loaded == item.distinct for item in done)


def test_a_saved_program_is_compiled_through_the_cache(
    first: tuple[Trained, Compilation], cache: Path, tmp_path: Path
) -> None:
    pipe = pipe_of(CASE, backend="inductor")
    batch = problem_of(CASE.problem).batches(1, CASE.microbatches * 2)[0]
    pipe.compile(*batch.args, target=batch.target).program.save(tmp_path / "program")
    loaded = zbcompile.load(tmp_path / "program", problem_of(CASE.problem).model().state_dict())
    assert_bitwise(train(loaded, CASE), first[0])
    assert loaded.compilations[0].compiled == 0
    plain = zbcompile.load(
        tmp_path / "program", problem_of(CASE.problem).model().state_dict(), backend="fx"
    )
    assert_close(train(plain, CASE), reference(CASE), BOUND)


def test_gradients_accumulate_in_place(first: tuple[Trained, Compilation], cache: Path) -> None:
    model: nn.Module = problem_of(CASE.problem).model()
    batch = problem_of(CASE.problem).batches(1, CASE.microbatches * 2)[0]
    pipe = pipe_of(CASE, backend="inductor")
    pipe.step(*batch.args, target=batch.target)
    once = {
        name: (p.grad.data_ptr(), p.grad.clone())
        for name, p in pipe.named_parameters()
        if p.grad is not None
    }
    assert set(once) == {name for name, _ in model.named_parameters()}
    pipe.step(*batch.args, target=batch.target)
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == once[name][0]
        torch.testing.assert_close(parameter.grad, 2 * once[name][1], rtol=1e-5, atol=1e-7)


class Penalized(nn.Module):
    """A weight that a product and a penalty read: GPT-2's layout, weight decay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = self.weight.pow(3).sum()
        return self.head(torch.tanh(x @ self.weight)).square().mean() + penalty


def test_all_uses_of_a_weight_add_up(cache: Path) -> None:
    model, batch = Penalized(), torch.linspace(-1, 1, 64).view(8, 8)
    (sum(model(part) for part in batch.split(2)) / 4).backward()
    expected, model.weight.grad = model.weight.grad, None
    assert expected is not None
    pipe = zbcompile.pipeline(model, schedule="1f1b", ranks=1, microbatches=4, backend="inductor")
    pipe.step(batch)
    torch.testing.assert_close(
        model.weight.grad, expected, rtol=0, atol=BOUND * expected.abs().max()
    )


def compiled(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Run, GraphModule]:
    """A function of ATen operations compiled, and its graph."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return compile_by_inductor(bare(graph))[0], graph


def random_mask(like: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return aten.bernoulli.p(aten.empty_like.default(like), 0.5)


def sums_of_rows(like: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    index = torch.arange(3) // 2
    return aten.index_add_.default(aten.zeros_like.default(like), 0, index, rows)


@pytest.mark.parametrize("written", [random_mask, sums_of_rows])
def test_a_kernel_reads_what_is_written_in_place(written: Callable[..., Any], cache: Path) -> None:
    """inductor alone fuses the division with the normalization, before the tensor is written."""

    def function(table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
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


def test_a_view_of_a_single_tensor_that_is_not_empty(cache: Path) -> None:
    """A cache of transformers begins so. The result has the strides of eager mode."""

    def function(keys: torch.Tensor) -> list[torch.Tensor]:
        dense = aten.cat.default([torch.empty(0), aten.transpose.int(keys, 1, 2)], -2)
        return [aten.view.default(dense, [2, -1, 8]), dense]

    keys = torch.randn(2, 3, 4, 8)
    run, graph = compiled(function, keys)
    for ours, theirs in zip(run([keys]), graph(keys), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_results_have_the_strides_that_other_passes_expect(cache: Path) -> None:
    """A rule of inductor may give others than the operation did when the step was exported."""

    def function(prediction: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        return [aten.mse_loss_backward.default(torch.ones(()), prediction, target, 1)]

    images = torch.randn(2, 3, 4, 4)
    inputs = images.to(memory_format=torch.channels_last), images + 1
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    (result,) = output_values(graph.graph)
    result.meta["val"] = images
    run, _ = compile_by_inductor(bare(graph))
    ours = run(list(inputs))[0]
    torch.testing.assert_close(ours, graph(*inputs)[0])
    assert ours.stride() == images.stride() != inputs[0].stride()


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [("bfloat16", 2**-6), pytest.param("float64", 1e-14, marks=pytest.mark.beyond_sample)],
)
def test_gradients_in_other_dtypes(dtype: str, bound: float, cache: Path) -> None:
    """The gradient of the loss has its dtype; `bound` is a few units in the last place."""
    case = Case(f"loop-3-{dtype}", "1f1b", 1, 2, exact=False, steps=1)
    assert_close(train(pipeline_of(case, backend="inductor"), case), reference(case), bound)


def test_a_value_of_another_dtype_is_refused(cache: Path) -> None:
    """Compiled code would take the bytes of one dtype for those of the other."""
    run, _ = compiled(lambda x: [x + 1], torch.zeros(2))
    assert torch.equal(run([torch.zeros(2)])[0], torch.ones(2))
    with pytest.raises(
        PipelineError, match=r"input 0 .* is torch.bfloat16, and was compiled as torch.float32"
    ):
        run([torch.zeros(2, dtype=torch.bfloat16)])
