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

CASE = Case("short-mlp", "zb-h1", 2, 4, steps=2)


def test_a_function_as_backend_sees_each_distinct_graph_once() -> None:
    """One whose functions take a list."""
    seen: list[tuple[GraphModule, Sequence[Tensor]]] = []

    def counting(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        seen.append((graph, inputs))
        run = boxed(graph)

        def call(values: list[Tensor]) -> Any:
            result = run(values)
            assert not values
            return result

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    pipe = pipeline_of(CASE, backend=counting)
    assert_bitwise(train(pipe, CASE), reference(CASE))
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
        ("inductor", "exact=True cannot use it"),
        (lambda graph, inputs: None, "returned a NoneType for F.; expected a function"),
        (lambda graph, inputs: 1 / 0, "failed on F.: ZeroDivisionError"),
        (lambda graph, inputs: lambda *args: args[0], "returned a Parameter; the graph returns"),
    ],
    ids=["name", "exact", "no function", "fails", "one tensor"],
)
def test_what_is_refused(backend: Any, message: str) -> None:
    with pytest.raises((zbcompile.PipelineError, zbcompile.CompileError), match=message):
        train(pipeline_of(CASE, backend=backend), CASE)


def test_inductor_without_a_compiler() -> None:
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(zbcompile.PipelineError, match="needs a C\\+\\+ compiler"),
    ):
        zbcompile.pipeline(problem_of("mlp").model(), ranks=2, backend="inductor")


def test_a_program_does_not_hold_a_function(tmp_path: Path) -> None:
    """It must be passed again, or another backend."""
    pipe = pipeline_of(CASE, backend=interpreted)
    assert_bitwise(train(pipe, CASE), reference(CASE))
    pipe.program.save(tmp_path)
    state = problem_of(CASE.problem).model().state_dict()
    with pytest.raises(zbcompile.PipelineError, match=r"custom backend, .* Pass backend="):
        zbcompile.load(tmp_path, state)
    with pytest.raises(zbcompile.PipelineError, match="exact=True cannot use it"):
        zbcompile.load(tmp_path, state, backend="inductor")
    loaded = zbcompile.load(tmp_path, state, backend="fx")
    assert_bitwise(train(loaded, CASE), reference(CASE))
