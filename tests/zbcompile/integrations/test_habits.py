"""What users of peft, transformers and Lightning do around training, next to the same in eager mode:
adapters that take turns, evaluations before the first step, saving, and the model that is whole
again.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbcompile
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

pytest.importorskip("transformers")
pytest.importorskip("lightning")

from transformers import GPT2Config, GPT2LMHeadModel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
IDS = torch.arange(48).view(4, 12) * 7 % 32


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0, use_cache=False)
    )


def pipe_of(net: nn.Module) -> zbcompile.Pipeline:
    ranks = None if dist.is_initialized() else 2
    return zbcompile.pipeline(net, schedule="1f1b", ranks=ranks, microbatches=2, exact=True)


def assert_alike(pipe: zbcompile.Pipeline, net: nn.Module) -> None:
    """An evaluation, whose last bits depend on the number of rows."""
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval(input_ids=IDS).logits, net(input_ids=IDS).logits)
    net.train()


def compare_step(pipe: zbcompile.Pipeline, net: nn.Module) -> None:
    """A step and an update of both."""
    ours = pipe.step(input_ids=IDS, labels=IDS)
    losses = [net(input_ids=part, labels=part).loss / 2 for part in IDS.chunk(2)]
    for loss in losses:
        loss.backward()
    assert torch.equal(ours, sum(loss.detach() for loss in losses))  # type: ignore[arg-type]
    for parameters in (pipe.parameters(), net.parameters()):
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        optimizer.step()
        optimizer.zero_grad()


def close_into(pipe: zbcompile.Pipeline, net: nn.Module) -> None:
    """Another module gets the trained weights in every process, and needs no pipeline."""
    net.load_state_dict(pipe.state_dict(full=True))
    pipe.close()


def adapted() -> Any:
    """With two adapters, neither of which is zero."""
    peft = pytest.importorskip("peft")
    kind = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    result = peft.get_peft_model(gpt2(), kind, adapter_name="one")
    result.add_adapter("two", kind)
    for name, parameter in result.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return result.train()


def test_adapters_take_turns() -> None:
    pytest.importorskip("peft")
    from peft.tuners.lora import LoraLayer

    ours, theirs = adapted(), adapted()
    pipe = pipe_of(ours)
    for name in ("two", "one"):
        for net in (ours, theirs):
            net.set_adapter(name)
        with ours.disable_adapter(), theirs.disable_adapter():
            assert_alike(pipe, theirs)  # a reference, before the first step already
        assert_alike(pipe, theirs)
        compare_step(pipe, theirs)
    layers = [m for m in (*ours.modules(), *theirs.modules()) if isinstance(m, LoraLayer)]
    for layer in layers:
        layer.scale_layer(2.0)
    assert_alike(pipe, theirs)
    compare_step(pipe, theirs)
    for layer in layers:
        layer.unscale_layer(2.0)
    assert_same_tensors(pipe.state_dict(full=True), theirs.state_dict(), "trained")
    second = adapted()
    close_into(pipe, second)
    for net in (second, theirs):
        net.merge_adapter()
    assert_same_tensors(second.state_dict(), theirs.state_dict(), "merged")


def saved_as_transformers_does(folder: str) -> None:
    ours, theirs = gpt2(), gpt2()
    pipe = pipe_of(ours)
    assert_alike(pipe, theirs)
    for _ in range(2):
        compare_step(pipe, theirs)
    assert_alike(pipe, theirs)
    for refused in (
        lambda: ours.generate(IDS[:, :4], max_new_tokens=2),
        lambda: ours.save_pretrained(folder),
    ):
        with pytest.raises(RuntimeError):
            refused()
    state = pipe.state_dict(full=True)
    if dist.get_rank() == 0:
        ours.save_pretrained(folder, state_dict=state)
        assert_same_tensors(
            GPT2LMHeadModel.from_pretrained(folder).state_dict(), theirs.state_dict(), "saved"
        )
    second = gpt2()
    close_into(pipe, second)
    one, two = (
        net.generate(IDS[:, :4], max_new_tokens=4, do_sample=False) for net in (second, theirs)
    )
    assert torch.equal(one, two)


def test_saving_and_generation(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved_as_transformers_does, str(tmp_path), timeout=240)
