"""PipelineTrainer next to transformers.Trainer: the same data, the same losses."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from tests.support.live_storages import leave_aside
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from zbcompile.engine.step_agreement import require_same_batch
from zbcompile.integrations import PipelineTrainer
from zbcompile.persistence.checkpoint_directory import checkpoints_in
from zbcompile.persistence.checkpoint_files import CheckpointReader

Found = tuple[list[dict[str, Any]], float]  # what was logged, and the loss of an evaluation
TWO = {"ranks": 2, "schedule": "zb-h1", "microbatches": 4}


@pytest.fixture(scope="module", autouse=True)
def _little_to_search() -> None:
    """accelerate collects garbage before every training: that need not walk through what other
    tests left."""
    leave_aside()


def samples(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences of which a part, another one each time, has no labels."""
    source, result = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        ids = torch.randint(0, 32, (12,), generator=source)
        labels = ids.clone()
        labels[: int(torch.randint(0, 10, (), generator=source))] = -100
        result.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return result


def gpt2(vocabulary: int = 32) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    sizes = {"vocab_size": vocabulary, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0))


def adapted(model: GPT2LMHeadModel) -> Any:
    """With LoRA, of which nothing is zero, and a head of its own that is trained whole."""
    peft = pytest.importorskip("peft")
    kind = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["lm_head"]
    )
    result = peft.get_peft_model(model, kind)
    for name, parameter in result.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return result


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    usual = {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "learning_rate": 1e-2,
    }
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    return TrainingArguments(str(folder), **{**usual, **quiet, "save_strategy": "no", **options})


def trained(
    folder: Path | str,
    pipeline: Mapping[str, Any] | None,
    resume: str | None = None,
    **options: Any,
) -> Trainer:
    """A trainer that has trained, as a pipeline if there are options for one. It evaluates batches
    of 8: of 20 samples (`evaluated`) the last one has another size."""
    choices: dict[str, Any] = {
        "train_dataset": samples(96),
        "eval_dataset": samples(options.pop("evaluated", 16), seed=3),
    }
    choices |= {
        name: options.pop(name) for name in ("compute_loss_func", "callbacks") if name in options
    }
    if stage := options.pop("zero", 0):
        choices["optimizer_cls_and_kwargs"] = torch.optim.AdamW, {"lr": 1e-2, "zero": stage}
    model = adapted(gpt2()) if options.pop("adapters", False) else gpt2()
    created = PipelineTrainer if pipeline else Trainer
    trainer = created(
        model,
        arguments(folder, **options),
        **choices,
        **({"pipeline": pipeline} if pipeline else {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(history: list[dict[str, Any]], key: str = "loss") -> list[float]:
    return [entry[key] for entry in history if key in entry]


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def on_a_rank(folder: str, options: dict[str, Any]) -> Found:
    """A process's log and the loss of its evaluation; Accelerate finds the processes as torchrun's.
    Four of them are two replicas."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    pipeline: dict[str, Any] = {"schedule": "zb-h1", "microbatches": 4}
    if world == "4":
        pipeline["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with patch.dict(
        os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world
    ):
        trainer = trained(folder, pipeline, **options)
        result = trainer.state.log_history, trainer.evaluate()["eval_loss"]
        trainer.pipe.close()
        AcceleratorState._reset_state(reset_partial_state=True)
    return result


def found_on_both(result: list[Found]) -> Found:
    """Returns what both ranks found, which is the same."""
    (first, evaluated), (second, other) = result
    assert all(
        logged(first, key) == logged(second, key) for key in ("loss", "grad_norm", "learning_rate")
    )
    assert evaluated == other
    return first, evaluated


@pytest.mark.slow
def test_twelve_steps_in_two_processes(tmp_path: Path, pool: Pool) -> None:
    """The losses of the plain Trainer in one process; what is resumed at step 4 has the bits of
    what is not."""
    plain = trained(tmp_path / "plain", None, max_steps=12, evaluated=20)
    saving = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 3}
    resuming = {"resume": str(tmp_path / "checkpoint-4")}
    (complete, evaluated), (resumed, _) = (
        found_on_both(
            pool.run(
                on_a_rank, str(tmp_path), {"max_steps": 12, "evaluated": 20, **item}, timeout=240
            )
        )
        for item in (saving, resuming)
    )
    for key in ("loss", "grad_norm"):
        assert (
            largest_difference(logged(complete, key), logged(plain.state.log_history, key)) <= 1e-6
        )
        assert logged(resumed, key) == logged(complete, key)
    assert abs(evaluated - plain.evaluate()["eval_loss"]) <= 1e-6
    assert logged(complete, "total_flos") == logged(plain.state.log_history, "total_flos")
    plain.model.load_state_dict(
        GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-12").state_dict()
    )
    assert abs(plain.evaluate()["eval_loss"] - evaluated) <= 1e-6


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_two_replicas(tmp_path: Path, pool: Pool) -> None:
    """Of two ranks each; a replica takes the samples that DistributedDataParallel would give it:
    together they train on batches of twice the size, with an optimizer whose state is sharded over
    replicas."""
    options = {"data_seed": 7, "gradient_accumulation_steps": 2, "max_steps": 3}
    twice = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
    plain = trained(tmp_path / "plain", None, **options, **twice)
    expected = plain.evaluate()["eval_loss"]
    for log, evaluated in pool.run(
        on_a_rank, str(tmp_path), {"zero": 1, **options}, ranks=4, timeout=240
    ):
        assert largest_difference(logged(log), logged(plain.state.log_history)) <= 2e-6
        assert abs(evaluated - expected) <= 2e-6


@pytest.mark.slow
def test_adapters_in_two_processes(tmp_path: Path, pool: Pool) -> None:
    """PEFT: the losses of the plain Trainer, also where it goes on from adapters alone; PEFT reads
    what was saved."""
    peft = pytest.importorskip("peft")
    options = {
        "adapters": True,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_only_model": True,
    }
    options |= {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 1e-3,
    }
    plain = trained(tmp_path / "plain", None, **options)
    expected = plain.evaluate()["eval_loss"]
    for log, evaluated in pool.run(on_a_rank, str(tmp_path), options, timeout=240):
        for key in ("loss", "grad_norm", "eval_loss"):
            theirs = logged(plain.state.log_history, key)
            assert largest_difference(logged(log, key)[: len(theirs)], theirs) <= 2e-6, key
        assert abs(evaluated - expected) <= 2e-6
    names = {file.name for file in (tmp_path / "checkpoint-4").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert not {"model.safetensors", "model.safetensors.index.json", "pipeline"} & names
    read = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "checkpoint-4")
    again = PipelineTrainer(
        adapted(gpt2()), arguments(tmp_path), eval_dataset=samples(16, seed=3), pipeline=TWO
    )
    again._load_from_checkpoint(str(tmp_path / "checkpoint-4"))
    plain = Trainer(read, arguments(tmp_path), eval_dataset=samples(16, seed=3))
    assert abs(again.evaluate()["eval_loss"] - plain.evaluate()["eval_loss"]) <= 2e-6
    local = again.pipe.state_dict(full=True, frozen=False)
    assert local.keys() == {
        name for name, item in again.model.named_parameters() if item.requires_grad
    }
    with pytest.raises(
        zbcompile.PipelineError, match=r"weights= of a model with adapters: load its base"
    ):
        PipelineTrainer(adapted(gpt2()), arguments(tmp_path), pipeline=TWO, weights=tmp_path)


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_adapters_go_on_with_the_same_bits(tmp_path: Path, pool: Pool) -> None:
    """A checkpoint of two processes, resumed in one, has no base model in it, and needs none but
    that of the model."""
    options = {
        "adapters": True,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-3,
    }
    (log, evaluated), _ = pool.run(on_a_rank, str(tmp_path), options, timeout=240)
    resumed = trained(tmp_path, TWO, resume=str(tmp_path / "checkpoint-2"), **options)
    assert logged(resumed.state.log_history) == logged(log)
    assert resumed.evaluate()["eval_loss"] == evaluated
    (saved,) = checkpoints_in(tmp_path / "checkpoint-2" / "pipeline")
    trains = {name for name, item in resumed.model.named_parameters() if item.requires_grad}
    assert {f"model.{name}" for name in trains} == {
        n for n in CheckpointReader(saved).metadata.state_dict_metadata if n.startswith("model.")
    }


@pytest.mark.slow
def test_accumulation_and_clipping(tmp_path: Path) -> None:
    """Losses and norms of the plain Trainer, evaluation and predictions, callbacks, and the best
    model at the end."""

    class Noted(TrainerCallback):
        def __init__(self) -> None:
            self.events: list[tuple[str, int]] = []

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.events.append(("update", state.global_step))

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.events.append(("evaluate", state.global_step))

    options = {
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "warmup_steps": 2,
    }
    options |= {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    options |= {"load_best_model_at_end": True, "eval_on_start": True, "evaluated": 20}
    runs = [(kind, Noted()) for kind in (None, TWO)]
    plain, piped = (
        trained(tmp_path / str(bool(kind)), kind, callbacks=[noted], **options)
        for kind, noted in runs
    )
    for key in ("loss", "grad_norm", "eval_loss"):
        ours, theirs = (logged(item.state.log_history, key) for item in (piped, plain))
        assert largest_difference(ours, theirs) <= 2e-6, key
    assert runs[0][1].events == runs[1][1].events
    assert (
        largest_difference([piped.evaluate()["eval_loss"]], [plain.evaluate()["eval_loss"]]) <= 2e-6
    )
    ours, theirs = (item.predict(samples(13, seed=9)) for item in (piped, plain))
    torch.testing.assert_close(
        torch.tensor(ours.predictions), torch.tensor(theirs.predictions), rtol=0, atol=1e-5
    )
    assert (ours.label_ids == theirs.label_ids).all()


@pytest.mark.slow
def test_losses_of_ones_own(tmp_path: Path) -> None:
    """A loss function that counts items, and one that does not: the mean over the accumulated
    batches."""

    def counted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"][:, :-1].reshape(-1, 32)
        return (
            torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum")
            / num_items_in_batch
        )

    options = {"gradient_accumulation_steps": 2, "compute_loss_func": counted, "max_steps": 2}
    plain, piped = (trained(tmp_path, kind, **options) for kind in (None, TWO))
    assert (
        largest_difference(logged(piped.state.log_history), logged(plain.state.log_history)) <= 2e-6
    )
    assert abs(piped.evaluate()["eval_loss"] - plain.evaluate()["eval_loss"]) <= 2e-6


@pytest.mark.slow
def test_weights_of_a_model_without_memory(tmp_path: Path) -> None:
    """A model on the meta device gets its weights from a folder when the first batch
    compiles it."""
    accelerate = pytest.importorskip("accelerate")
    model = gpt2()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    with accelerate.init_empty_weights():
        empty = GPT2LMHeadModel(model.config)
    empty.tie_weights()
    trainer = PipelineTrainer(empty, arguments(tmp_path), pipeline=TWO, weights=tmp_path / "theirs")
    trainer.evaluate(samples(8))
    assert_same_tensors(
        trainer.pipe.state_dict(full=True), dict(model.state_dict()), "after the first batch:"
    )


def other_batches() -> str:
    """Two ranks that got other labels."""
    pipe = zbcompile.pipeline(torch.nn.Linear(2, 2), schedule="1f1b")
    batch = {"x": torch.ones(2), "labels": torch.full((2,), pipe.ranks.rank)}
    with pytest.raises(zbcompile.PipelineError) as caught:
        require_same_batch(pipe.ranks, batch)
    pipe.close()
    return str(caught.value)


@pytest.mark.slow
def test_other_batches_on_other_ranks_are_refused(pool: Pool) -> None:
    for text in pool.run(other_batches):
        assert text.startswith(
            "labels of this batch differs between rank 0 and rank 1 of the pipeline"
        )


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_bfloat16(tmp_path: Path) -> None:
    """Autocast rounds the gradients of each microbatch to bfloat16, where the plain Trainer rounds
    those of a batch: each relative to 2^-9 of its size, which four updates carry into the loss."""
    options = {"gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 0.5}
    plain, piped = (trained(tmp_path, kind, **options) for kind in (None, TWO))
    losses = [logged(trainer.state.log_history) for trainer in (piped, plain)]
    assert largest_difference(*losses) <= 1e-3
    assert piped.predict(samples(8)).predictions.dtype == "float32"
