"""Asserts, and ifs that only raise, about the values of activations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.asserting import DECISIONS, FORMS, WIDTH, Requiring
from zbcompile.passes.capture.export import capture, capture_inference
from zbcompile.passes.errors import CaptureError


def holds(model: Requiring, x: Tensor) -> bool:
    """Whether eager accepts a batch."""
    try:
        model(x)
    except (AssertionError, ValueError):
        return False
    return True


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_graph_checks_what_eager_asserts(form: Callable[[Tensor], None]) -> None:
    torch.manual_seed(0)
    model = Requiring(form)
    captured = capture_inference(model, (torch.full((1, WIDTH), torch.nan),), {})  # capturing asks for no answer
    held = {"parameter": dict(model.named_parameters())}
    found = set()
    for value in (0.0, 1.0, -1.0, 9.0, -9.0, torch.inf, torch.nan):
        x = torch.full((1, WIDTH), value)
        given = [held[slot.kind][slot.name] if slot.kind in held else x for slot in captured.inputs]
        results = zip(captured.outputs, captured.module(*given), strict=True)
        accepted = all(bool(result) for slot, result in results if slot.kind == "check")
        assert accepted == holds(model, x)
        found.add(accepted)
    assert found == {True, False}


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: decision.__name__)
def test_whatever_else_a_statement_decides_is_refused(decision: Callable[[Tensor], None]) -> None:
    with pytest.raises(CaptureError, match=r"asserting\.py:\d+: .*makes a Python number, or a decision"):
        capture(Requiring(decision), (torch.ones(2, WIDTH),), {}, torch.ones(2, WIDTH), torch.nn.functional.mse_loss)
