"""What the canonical graph says of each value: one of equal operations is run for it."""

from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.capture.export import Captured, capture
from zbcompile.passes.graph.fx import like
from zbcompile.passes.graph.storage import storage_key, tensors_of
from zbcompile.passes.pass_list.passes_in_order import canonicalise


class Layer(nn.Module):
    """Views of views, several results, results without a gradient, complex numbers, a cast that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.wide(self.norm(x)).chunk(3, -1)
        top, place = a.sort(-1)
        turned = torch.view_as_complex(b.unflatten(-1, (4, 2))).conj()
        with torch.no_grad():
            scale = c.abs().amax(-1, keepdim=True).float()
        return (
            x
            + top[..., 1:].sum(-1, keepdim=True) * torch.cat([turned.real, turned.imag], -1) / scale
            + (place > 3).to(x.dtype) * x.T.t()
        )


def _captured(layers: int) -> Captured:
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    return capture(model, (torch.randn(4, 8),), {}, torch.randn(4, 8), nn.functional.mse_loss)


class _Each(Interpreter):
    """Runs every operation, and keeps what each makes."""

    def __init__(self, canonical: Canonical) -> None:
        super().__init__(canonical.module, garbage_collect_values=False)
        self.made = list[Any]()
        holders = canonical.graph.find_nodes(op="placeholder")
        with canonical.mode, torch.enable_grad():
            self.run(*(like(n.meta["val"]).requires_grad_(n.meta["differentiable"]) for n in holders))

    def run_node(self, n: Node) -> Any:
        self.made.append(super().run_node(n))
        return self.made[-1]


def _described(values: list[Any]) -> list[Any]:
    """Layouts, and which values share a storage of how many bytes."""
    storages, found = dict[int, int](), list[Any]()
    for value in values:
        for each in tensors_of(value):
            shared = storages.setdefault(storage_key(each), len(storages)), each.untyped_storage().nbytes()
            found.append((each.shape, each.stride(), each.storage_offset(), each.dtype, shared))
    return found


def test_values_are_those_of_a_run_of_every_operation() -> None:
    canonical = canonicalise(_captured(3))
    nodes = [node for node in canonical.graph.nodes if node.op != "output"]
    made = _Each(canonical).made[:-1]
    assert _described([node.meta["val"] for node in nodes]) == _described(made)
    assert [node.meta["differentiable"] for node in nodes] == [
        any(t.requires_grad for t in tensors_of(v)) for v in made
    ]
    assert not any(t.requires_grad for node in nodes for t in tensors_of(node.meta["val"]))


def test_more_equal_layers_run_no_more_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """But complex numbers, whose tensors may be conjugated lazily."""
    runs = list[str]()
    original = Interpreter.call_function

    def counted(self: Interpreter, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not getitem and not any(
            isinstance(each, torch.Tensor) and (each.is_complex() or each.is_neg()) for each in args
        ):
            runs.append(str(target))
        return original(self, target, args, kwargs)

    captured = [_captured(layers) for layers in (2, 6)]
    monkeypatch.setattr(Interpreter, "call_function", counted)
    canonicalise(captured[0])
    few = runs.copy()
    runs.clear()
    canonicalise(captured[1])
    assert runs == few
