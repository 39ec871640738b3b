"""Tests of what PipelineTrainer refuses, in one line and when it is made."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zbcompile

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.zbcompile.integrations.test_trainer import TWO, arguments, gpt2
from zbcompile.integrations import PipelineTrainer


class Own(PipelineTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


OF_ARGUMENTS = {
    **{"fsdp": "full_shard", "neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1},
    **{"auto_find_batch_size": True, "fp16": True, "bf16_full_eval": True, "torch_compile": True},
    **{"ddp_find_unused_parameters": True, "accelerator_config": {"dispatch_batches": True}},
}
OPTIMIZERS = (torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), None)
OF_TRAINER: list[tuple[dict[str, Any], str]] = [
    ({"made": Own}, r"Own\.compute_loss: pass compute_loss_func="),
    ({"model_init": gpt2, "model": None}, "model_init="),
    ({"pipeline": {**TWO, "loss": len}}, r"pipeline=\{'loss': \.\.\.\}"),
    ({"pipeline": {"model": 1}}, r"pipeline=\{'model': \.\.\.\}: pass model= to the trainer"),
    ({"optimizers": OPTIMIZERS}, r"optimizers=: pass optimizer_cls_and_kwargs="),
    ({"model": "gpt2"}, "model=.*: pass an nn.Module"),
    ({"model": None}, "model=.*: pass an nn.Module"),
]


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_arguments_that_cannot_work_are_refused(name: str, tmp_path: Path) -> None:
    said = "dispatch_batches" if name == "accelerator_config" else name
    with pytest.raises(zbcompile.PipelineError, match=f"PipelineTrainer does not support {said}="):
        PipelineTrainer(gpt2(), arguments(tmp_path, **{name: OF_ARGUMENTS[name]}), pipeline=TWO)


@pytest.mark.parametrize(("options", "message"), OF_TRAINER, ids=lambda value: str(value)[:20])
def test_what_the_trainer_decides_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    options = {"model": gpt2(), "args": arguments(tmp_path), "pipeline": TWO, **options}
    with pytest.raises(zbcompile.PipelineError, match=f"^PipelineTrainer.*{message}"):
        options.pop("made", PipelineTrainer)(**options)


def test_where_it_cannot_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun without a GPU, and without use_cpu=True, every process would save. A library
    that is not installed is named."""
    args = arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = r"2 processes that Accelerate takes for one each.*use_cpu=True"
    with pytest.raises(zbcompile.PipelineError, match=said):
        PipelineTrainer(gpt2(), args, pipeline={"schedule": "1f1b"})
    monkeypatch.setitem(sys.modules, "accelerate", None)
    said = r"needs accelerate.*pip install 'zbcompile\[huggingface\]'"
    with pytest.raises(zbcompile.PipelineError, match=said):
        zbcompile.integrations.PipelineTrainer  # noqa: B018
