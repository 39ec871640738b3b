"""The fingerprint of a model: whatever the checks before a step look at changes the
fingerprint."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zbcompile.torch_private import fingerprint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.second = self.first[0]  # the same module twice
        self.empty = None


def _replace(model: Model) -> None:
    model.first[0].bias = nn.Parameter(torch.zeros(2))


def _replace_buffer(model: Model) -> None:
    model.first[1].running_mean = torch.zeros(2)


def _add(model: Model) -> None:
    model.first.append(nn.Linear(2, 2))


def _tie(model: Model) -> None:
    model.first.append(nn.Linear(2, 2))
    model.first[2].weight = model.first[0].weight


def _hook(tensor: Tensor) -> None:
    tensor.register_post_accumulate_grad_hook(lambda parameter: None)


CHANGES: dict[str, Callable[[Model], object]] = {
    "mode": lambda model: model.first[1].eval(),
    "frozen": lambda model: model.second.weight.requires_grad_(False),
    "replaced": _replace,
    "replaced buffer": _replace_buffer,
    "added": _add,
    "tied": _tie,
    "dtype": lambda model: model.double(),
    "device": lambda model: model.to("meta"),
    "shape": lambda model: setattr(model.second.bias, "data", torch.zeros(3)),
    "module hook": lambda model: model.first.register_forward_hook(lambda *_: None),
    "tensor hook": lambda model: model.second.weight.register_hook(lambda gradient: None),
    "hook after accumulation": lambda model: _hook(model.second.weight),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_change_shows(change: str) -> None:
    model = Model()
    before = fingerprint(model)
    assert fingerprint(model) == before
    CHANGES[change](model)
    assert fingerprint(model) != before


def test_training_changes_nothing() -> None:
    model = Model()
    before = fingerprint(model)
    model.first(torch.randn(4, 2)).sum().backward()
    with torch.no_grad():
        model.second.weight.add_(1.0)
    model.load_state_dict(model.state_dict())
    model.zero_grad()
    assert fingerprint(model) == before
