"""Adapters of PEFT that take turns, are switched off, scaled and merged, beside the same in eager."""

from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from tests.support.training import assert_same_tensors, gradients_of

pytest.importorskip("peft")

import peft
from peft.tuners.lora import LoraLayer

X, Y = torch.linspace(-1, 1, 64).view(2, 4, 8)


def adapted() -> Any:
    """With two adapters, neither of which is zero."""
    torch.manual_seed(1)
    kind = peft.LoraConfig(r=2, target_modules=["0", "2"])
    body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = peft.get_peft_model(body, kind, adapter_name="one")
    model.add_adapter("two", kind)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return model.train()


@pytest.mark.slow
def test_adapters_take_turns() -> None:
    ours, theirs = adapted(), adapted()
    options = {"schedule": "1f1b", "ranks": 2, "microbatches": 2, "exact": True}
    pipe = zbcompile.pipeline(ours, loss=nn.functional.mse_loss, **options)

    def compare() -> None:
        with torch.no_grad():
            torch.testing.assert_close(pipe.eval(X), theirs(X))
        losses = []
        for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
            losses.append(nn.functional.mse_loss(theirs(x), y) / 2)
            losses[-1].backward()
        assert torch.equal(pipe.step(X, target=Y), losses[0].detach() + losses[1].detach())
        assert_same_tensors(gradients_of(pipe), gradients_of(theirs), "gradient of")
        for net in (ours, theirs):
            net.zero_grad()

    with ours.disable_adapter(), theirs.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(pipe.eval(X), theirs(X))  # a reference, before the first step
    for name in ("two", "one"):
        for net in (ours, theirs):
            net.set_adapter(name)
        compare()
    layers = [m for net in (ours, theirs) for m in net.modules() if isinstance(m, LoraLayer)]
    for layer in layers:
        layer.scale_layer(2.0)
    compare()
    for layer in layers:
        layer.unscale_layer(2.0)
    (second := adapted()).load_state_dict(pipe.state_dict(full=True))
    pipe.close()
    for net in (second, theirs):
        net.merge_adapter()
    assert_same_tensors(second.state_dict(), theirs.state_dict(), "merged")
