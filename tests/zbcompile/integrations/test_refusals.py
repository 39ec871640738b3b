"""What PipelineTrainer refuses, in one line and when it is made."""

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

REFUSED = {
    "fsdp": "full_shard",
    "neftune_noise_alpha": 5.0,
    "label_smoothing_factor": 0.1,
    "auto_find_batch_size": True,
    "fp16": True,
    "bf16_full_eval": True,
    "ddp_find_unused_parameters": True,
    "torch_compile": True,
    "accelerator_config": {"dispatch_batches": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str, tmp_path: Path) -> None:
    said = "dispatch_batches" if name == "accelerator_config" else name
    with pytest.raises(zbcompile.PipelineError, match=f"PipelineTrainer does not support {said}="):
        PipelineTrainer(gpt2(), arguments(tmp_path, **{name: REFUSED[name]}), pipeline=TWO)


def test_processes_that_accelerate_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun without a GPU, and without use_cpu=True, every process would save."""
    args = arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        zbcompile.PipelineError,
        match=r"2 processes that Accelerate takes for one each.*use_cpu=True",
    ):
        PipelineTrainer(gpt2(), args, pipeline={"schedule": "1f1b"})


def test_what_the_trainer_decides_is_refused(tmp_path: Path) -> None:
    class Own(PipelineTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    args = arguments(tmp_path)
    with pytest.raises(
        zbcompile.PipelineError, match=r"Own\.compute_loss: pass compute_loss_func="
    ):
        Own(gpt2(), args, pipeline=TWO)
    with pytest.raises(zbcompile.PipelineError, match="model_init="):
        PipelineTrainer(model_init=gpt2, args=args, pipeline=TWO)
    with pytest.raises(zbcompile.PipelineError, match=r"pipeline=\{'loss': \.\.\.\}"):
        PipelineTrainer(gpt2(), args, pipeline={**TWO, "loss": len})
    optimizer = torch.optim.AdamW(gpt2().parameters())
    with pytest.raises(
        zbcompile.PipelineError, match=r"optimizers=: pass optimizer_cls_and_kwargs="
    ):
        PipelineTrainer(gpt2(), args, pipeline=TWO, optimizers=(optimizer, None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": {"model": 1}}, r"pipeline=\{'model': \.\.\.\}: pass model= to the trainer"),
        *(({"model": model}, "model=.*: pass an nn.Module") for model in ("gpt2", None)),
    ],
)
def test_wrong_arguments_are_one_kind_of_error(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(zbcompile.PipelineError, match=f"^PipelineTrainer.*{message}"):
        PipelineTrainer(**{"model": torch.nn.Linear(2, 2), "args": arguments(tmp_path), **options})


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        zbcompile.PipelineError, match=r"needs accelerate.*pip install 'zbcompile\[huggingface\]'"
    ):
        zbcompile.integrations.PipelineTrainer  # noqa: B018
