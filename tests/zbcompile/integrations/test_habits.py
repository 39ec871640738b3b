"""What users of peft, transformers and Lightning do around training, by two processes, beside the
same in eager mode: adapters that take turns, evaluations before the first step, saving, and the
model that is whole again.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors
from tests.zbcompile.examples.test_lightning_loop import eager

pytest.importorskip("transformers")
pytest.importorskip("lightning")

import lightning
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_loop import CLIP, LEARNING_RATE, MICROBATCHES, WIDTH, Pipelined, loader, model

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
    return zbcompile.pipeline(net, schedule="1f1b", microbatches=2, exact=True)


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
    found = peft.get_peft_model(gpt2(), kind, adapter_name="one")
    found.add_adapter("two", kind)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return found.train()


def adapters_take_turns() -> None:
    from peft.tuners.lora import LoraLayer

    ours, theirs = adapted(), adapted()
    pipe = pipe_of(ours)
    for name in ("one", "two", "one"):
        for net in (ours, theirs):
            net.set_adapter(name)
        with ours.disable_adapter(), theirs.disable_adapter():
            assert_alike(pipe, theirs)  # a reference, before the first step already
        assert_alike(pipe, theirs)
        compare_step(pipe, theirs)
    for scale in ("scale_layer", "unscale_layer"):
        for layer in (*ours.modules(), *theirs.modules()):
            if isinstance(layer, LoraLayer):
                getattr(layer, scale)(2.0)
        assert_alike(pipe, theirs)
        compare_step(pipe, theirs)
    assert_same_tensors(pipe.state_dict(full=True), theirs.state_dict(), "trained")
    other = adapted()
    close_into(pipe, other)
    for net in (other, theirs):
        net.merge_adapter()
    assert_same_tensors(other.state_dict(), theirs.state_dict(), "merged")


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
    other = gpt2()
    close_into(pipe, other)
    one, two = (
        net.generate(IDS[:, :4], max_new_tokens=4, do_sample=False) for net in (other, theirs)
    )
    assert torch.equal(one, two)


class Validated(Pipelined):
    """Keeps what its validation computes, and saves a checkpoint after every epoch."""

    def __init__(self, pipe: zbcompile.Pipeline, folder: str) -> None:
        super().__init__(pipe)
        self.folder = folder
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, index: int) -> None:
        self.outputs.append(self.held[0].eval(batch[0]))

    def on_train_epoch_end(self) -> None:
        optimizer: Any = self.optimizers()
        zbcompile.save_checkpoint(self.folder, self.held[0], optimizer.optimizer)


def fitted_by_lightning(folder: str) -> tuple[list[float], list[Tensor], dict[str, Tensor]]:
    """The losses, what was validated, and the parameters as they were saved."""
    options: dict[str, Any] = {
        "microbatches": MICROBATCHES,
        "loss": torch.nn.functional.cross_entropy,
        "exact": True,
    }
    pipe = zbcompile.pipeline(model(), schedule="zb-h1", **options)
    module = Validated(pipe, folder)
    quiet = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "logger": False,
        "devices": 1,
    }
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", num_sanity_val_steps=1, **quiet)  # type: ignore[arg-type]
    trainer.fit(module, loader(0), loader(1))
    later = zbcompile.pipeline(model(), schedule="1f1b", **options)
    optimizer = later.optimizer(torch.optim.AdamW, lr=LEARNING_RATE, clip=CLIP)
    later.compile(torch.zeros(8, WIDTH), target=torch.zeros(8, dtype=torch.long))
    zbcompile.load_checkpoint(folder, later, optimizer)
    return module.losses, module.outputs, later.state_dict(full=True)


def assert_as_eager(fitted: Sequence[tuple[list[float], list[Tensor], dict[str, Tensor]]]) -> None:
    net = model()
    first = copy.deepcopy(net)
    losses = eager(net)
    for found, outputs, state in fitted:
        assert found == losses
        inputs = [batch[0] for batch in loader(1)]
        for output, by, rows in zip(
            outputs, (first, *[net] * 6), (inputs[0], *inputs), strict=True
        ):
            torch.testing.assert_close(output, by(rows).detach())
        assert_same_tensors(state, net.state_dict(), "saved")


def test_adapters_take_turns(pool: Pool) -> None:
    pytest.importorskip("peft")
    pool.run(adapters_take_turns, timeout=240)


def test_saving_and_generation(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved_as_transformers_does, str(tmp_path), timeout=240)


def test_lightning_validates_and_saves(pool: Pool, tmp_path: Path) -> None:
    assert_as_eager(pool.run(fitted_by_lightning, str(tmp_path), timeout=240))


SCRIPT = """
import sys
import torch
from tests.zbcompile.integrations import test_habits

test_habits.adapters_take_turns()
test_habits.saved_as_transformers_does(f"{sys.argv[1]}/saved")
found = test_habits.fitted_by_lightning(f"{sys.argv[1]}/fitted")
torch.save(found, f"{sys.argv[1]}/{torch.distributed.get_rank()}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.beyond_sample
@pytest.mark.several_processes
def test_all_of_it_in_a_script_that_torchrun_starts(tmp_path: Path) -> None:
    """Processes that share nothing, and no process group before the first pipeline."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert_as_eager([torch.load(tmp_path / f"{rank}.pt") for rank in range(2)])
