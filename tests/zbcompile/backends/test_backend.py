"""The code that runs the graphs: functions from outside, and what is refused. For inductor see
test_inductor.py."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch._inductor import config
from torch.fx import GraphModule

import zbcompile
from tests.support.training import (
    Case,
    assert_bitwise,
    interpreted,
    pipeline_of,
    problem_of,
    reference,
    train,
)
from zbcompile.passes.torch_private import boxed

CASE = Case("mlp", "zb-h1", 2, 4, steps=2)


def boxed_backend(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """One whose functions take a list."""
    run = boxed(graph)

    def call(values: list[Tensor]) -> Any:
        result = run(values)
        assert not values
        return result

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize("backend", [interpreted, boxed_backend])
def test_a_function_as_backend(backend: Any) -> None:
    assert_bitwise(train(pipeline_of(CASE, backend=backend), CASE), reference(CASE))


def test_a_function_sees_each_distinct_graph_once() -> None:
    seen: list[tuple[GraphModule, Sequence[Tensor]]] = []

    def counting(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        seen.append((graph, inputs))
        return graph

    pipe = pipeline_of(CASE, backend=counting)
    train(pipe, CASE)
    (done,) = pipe.compilations
    assert done.backend.endswith("counting")
    assert done.compiled == done.distinct == len(seen) <= done.graphs
    for graph, inputs in seen:
        assert len(graph.graph.find_nodes(op="placeholder")) == len(inputs)
        assert all(isinstance(value, Tensor) for value in inputs)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("triton", 'backend=\'triton\'; expected "fx", "inductor", or a function'),
        (lambda graph, inputs: None, "returned a NoneType for F.; expected a function"),
        (lambda graph, inputs: 1 / 0, "failed on F.: ZeroDivisionError"),
        (
            lambda graph, inputs: lambda *values: values[0],
            "returned a Parameter; the graph returns",
        ),
    ],
    ids=["name", "no function", "fails", "one tensor"],
)
def test_what_is_refused(backend: Any, message: str) -> None:
    with pytest.raises((zbcompile.PipelineError, zbcompile.CompileError), match=message):
        train(pipeline_of(CASE, backend=backend), CASE)


def test_inductor_is_not_exact() -> None:
    with pytest.raises(zbcompile.PipelineError, match="exact=True cannot use it"):
        pipeline_of(CASE, backend="inductor")


def test_inductor_without_a_compiler() -> None:
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(zbcompile.PipelineError, match="needs a C\\+\\+ compiler"),
    ):
        zbcompile.pipeline(problem_of("mlp").model(), ranks=2, backend="inductor")


@pytest.mark.slow
def test_a_program_does_not_hold_a_function(tmp_path: Path) -> None:
    """It must be passed again, or another backend."""
    pipe = pipeline_of(CASE, backend=interpreted)
    train(pipe, CASE)
    pipe.program.save(tmp_path)
    state = problem_of(CASE.problem).model().state_dict()
    with pytest.raises(zbcompile.PipelineError, match=r"custom backend, .* Pass backend="):
        zbcompile.load(tmp_path, state)
    with pytest.raises(zbcompile.PipelineError, match="exact=True cannot use it"):
        zbcompile.load(tmp_path, state, backend="inductor")
    for backend in (interpreted, "fx"):
        loaded = zbcompile.load(tmp_path, state, backend=backend)
        assert_bitwise(train(loaded, CASE), reference(CASE))
