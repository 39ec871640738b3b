"""The fingerprint of a model: whatever the checks before a step look at changes the fingerprint."""

from typing import Any

import pytest
import torch
from torch import nn

from zbcompile.torch_private import fingerprint


def model_of() -> Any:
    """One module is there twice, one is None."""
    model: Any = nn.Module()
    model.first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.second, model.empty = model.first[0], None
    return model


CHANGES = {
    "mode": lambda m: m.first[1].eval(),
    "frozen": lambda m: m.second.weight.requires_grad_(False),
    "replaced": lambda m: setattr(m.first[0], "bias", nn.Parameter(torch.zeros(2))),
    "replaced buffer": lambda m: setattr(m.first[1], "running_mean", torch.zeros(2)),
    "added": lambda m: m.first.append(nn.Linear(2, 2)),
    "tied": lambda m: setattr(m, "third", m.first[0].weight),
    "dtype": lambda m: m.double(),
    "device": lambda m: m.to("meta"),
    "shape": lambda m: setattr(m.second.bias, "data", torch.zeros(3)),
    "module hook": lambda m: m.first.register_forward_hook(lambda *_: None),
    "tensor hook": lambda m: m.second.weight.register_hook(lambda gradient: None),
    "hook after": lambda m: m.second.weight.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows_and_training_changes_nothing(change: str) -> None:
    model = model_of()
    before = fingerprint(model)
    model.first(torch.randn(4, 2)).sum().backward()
    with torch.no_grad():
        model.second.weight.add_(1.0)
    model.load_state_dict(model.state_dict())
    model.zero_grad()
    assert fingerprint(model) == before
    CHANGES[change](model)
    assert fingerprint(model) != before
