"""Pairs whose passes a backend has compiled: the halves in turn, or each on a stream of its own."""

from typing import Any

import pytest
import torch

from tests.runtime.training import Case, assert_bitwise, pipeline_of, reference, train
from zbcompile import pairs


def compiled_elsewhere(module: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend from outside: its functions are opaque, so that a pair cannot be one graph."""
    return module.forward


@pytest.mark.parametrize("name", ["dualpipe-v", "1f1b-overlap"])
def test_halves_in_turn(name: str) -> None:
    case = Case("small-tied", name, 2, 8)
    assert_bitwise(train(pipeline_of(case, backend=compiled_elsewhere), case), reference(case))


@pytest.mark.parametrize("name", ["dualpipe-v", "1f1b-overlap"])
def test_halves_on_two_streams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that CUDA takes, with the CPU's streams, which are there for code like this and order nothing."""
    cpu = torch.device("cpu")
    taken: list[str] = []

    def on_two_streams(forward: Any, backward: Any) -> Any:
        taken.append(name)
        return pairs.on_two_streams(forward, backward, cpu, torch.cpu.Stream())

    monkeypatch.setattr(pairs, "in_turn", on_two_streams)
    case = Case("small-tied", name, 2, 8)
    assert_bitwise(train(pipeline_of(case, backend=compiled_elsewhere), case), reference(case))
    assert taken
