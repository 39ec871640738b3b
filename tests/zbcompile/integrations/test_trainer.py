"""PipelineTrainer next to transformers.Trainer: the same data, the same losses."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
from accelerate.state import AcceleratorState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from zbcompile.engine.step_agreement import require_same_batch
from zbcompile.integrations import PipelineTrainer

Log = list[dict[str, Any]]
TWO = {"ranks": 2, "schedule": "zb-h1", "microbatches": 4}


def samples(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences of which a part, another one each time, has no labels."""
    source, result = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        ids = torch.randint(0, 32, (12,), generator=source)
        labels = ids.clone()
        labels[: int(torch.randint(0, 10, (), generator=source))] = -100
        result.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return result


def gpt2(layers: int = 1) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": layers, "n_head": 2}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0))


def adapted(model: GPT2LMHeadModel) -> Any:
    """With LoRA, of which nothing is zero, and a head of its own that is trained whole."""
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["lm_head"]}
    result = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    for name, parameter in result.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return result


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    usual = {"max_steps": 4, "per_device_train_batch_size": 8, "logging_steps": 1}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    usual |= {"learning_rate": 1e-2, "save_strategy": "no", **quiet}
    return TrainingArguments(str(folder), **{**usual, **options})


def trained(folder: Path, pipeline: dict[str, Any] | None, **options: Any) -> Trainer:
    """A trainer that has trained, as a pipeline if there are options for one."""
    model = gpt2(options.pop("layers", 1))
    choices = {"train_dataset": samples(96), "eval_dataset": samples(16, seed=3)}
    choices |= {
        name: options.pop(name) for name in ("compute_loss_func", "callbacks") if name in options
    }
    if options.pop("zero", 0):
        choices["optimizer_cls_and_kwargs"] = torch.optim.AdamW, {"lr": 1e-2, "zero": 1}
    if options.pop("adapters", False):
        model = adapted(model)
    resume = options.pop("resume", None)
    if pipeline:
        choices["pipeline"] = pipeline
    made = PipelineTrainer if pipeline else Trainer
    trainer = made(model, arguments(folder, **options), **choices)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(history: Log, key: str = "loss") -> list[float]:
    return [entry[key] for entry in history if key in entry]


def assert_near(ours: Log, theirs: Log, *keys: str, bound: float = 2e-6) -> None:
    for key in keys:
        one, other = logged(ours, key), logged(theirs, key)
        assert len(one) == len(other) > 0, key
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= bound, key


def on_a_rank(folder: Path, options: dict[str, Any]) -> Log:
    """A process's log, with an evaluation at its end; Accelerate finds the processes as torchrun's.
    Four of them are two replicas."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    pipeline: dict[str, Any] = {"schedule": "zb-h1", "microbatches": 4}
    if world == "4":
        pipeline["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with patch.dict(os.environ, place):
        trainer = trained(folder, pipeline, **options)
        trainer.evaluate()
        refusals = [lambda: trainer.model.save_pretrained(folder / "refused")]
        if "adapters" not in options:
            refusals.append(lambda: trainer.model.generate(samples(1)[0]["input_ids"][None]))
        for refused in refusals:  # a process has only its part
            with pytest.raises(RuntimeError):
                refused()
        other = {"x": torch.ones(2), "labels": torch.full((2,), trainer.pipe.ranks.rank)}
        said = "the ranks of a pipeline got different batches: labels is"
        with pytest.raises(zbcompile.PipelineError, match=f"^{said}"):
            require_same_batch(trainer.pipe.ranks, other)
        trainer.pipe.close()
        AcceleratorState._reset_state(reset_partial_state=True)
    return trainer.state.log_history  # type: ignore[no-any-return]


@pytest.mark.slow
def test_two_processes(tmp_path: Path, pool: Pool) -> None:
    """The losses of the plain Trainer in one process; what one process resumes has the bits
    of what was never interrupted."""
    plain = trained(tmp_path / "plain", None, layers=2)
    evaluated = plain.evaluate()["eval_loss"]
    saving = {"layers": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
    log, other = pool.run(on_a_rank, tmp_path, saving, timeout=240)
    resumed = trained(tmp_path, TWO, layers=2, resume=str(tmp_path / "checkpoint-2"))
    for key in ("loss", "grad_norm", "eval_loss"):
        assert logged(log, key) == logged(other, key)
        assert key == "eval_loss" or logged(resumed.state.log_history, key) == logged(log, key)
    assert_near(log, plain.state.log_history, "loss", "grad_norm", "eval_loss", bound=1e-6)
    assert logged(log, "total_flos") == logged(plain.state.log_history, "total_flos")
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    plain.model.load_state_dict(saved.state_dict())
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
    plain.evaluate()
    for log in pool.run(on_a_rank, tmp_path, {"zero": 1, **options}, ranks=4, timeout=240):
        assert_near(log, plain.state.log_history, "loss", "eval_loss")


@pytest.mark.slow
@pytest.mark.beyond_sample
def test_adapters_in_two_processes(tmp_path: Path, pool: Pool) -> None:
    """PEFT: the losses of the plain Trainer; PEFT reads what was saved, which has no base model in
    it."""
    peft = pytest.importorskip("peft")
    options = {"adapters": True, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    plain = trained(tmp_path / "plain", None, **options, **best)
    plain.evaluate()
    log, _ = pool.run(on_a_rank, tmp_path, {**options, **best}, timeout=240)
    assert_near(log, plain.state.log_history, "loss", "grad_norm", "eval_loss")
    names = {file.name for file in (tmp_path / "checkpoint-4").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert not {"model.safetensors", "model.safetensors.index.json"} & names
    read = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "checkpoint-4")
    again = Trainer(read, arguments(tmp_path), eval_dataset=samples(16, seed=3))
    assert abs(again.evaluate()["eval_loss"] - logged(log, "eval_loss")[1]) <= 2e-6
    with pytest.raises(zbcompile.PipelineError, match=r"weights= of a model with adapters: load"):
        PipelineTrainer(adapted(gpt2()), arguments(tmp_path), pipeline=TWO, weights=tmp_path)


class Noted(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("update", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("evaluate", state.global_step))


@pytest.mark.slow
def test_accumulation_and_clipping(tmp_path: Path) -> None:
    """Losses and norms of the plain Trainer, evaluation and predictions, callbacks, and the best
    model at the end."""
    options = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "weight_decay": 0.1}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    options |= {"save_steps": 2, "load_best_model_at_end": True, "eval_on_start": True}
    options |= {"warmup_steps": 2}
    runs = [(kind, Noted()) for kind in (None, TWO)]
    plain, piped = (
        trained(tmp_path / str(bool(kind)), kind, callbacks=[noted], **options)
        for kind, noted in runs
    )
    assert runs[0][1].events == runs[1][1].events
    plain.evaluate()
    piped.evaluate()
    histories = piped.state.log_history, plain.state.log_history
    assert_near(*histories, "loss", "grad_norm", "eval_loss")
    ours, theirs = (item.predict(samples(12, seed=9)) for item in (piped, plain))  # 8 and 4
    predictions = (torch.tensor(item.predictions) for item in (ours, theirs))
    torch.testing.assert_close(*predictions, rtol=0, atol=1e-5)
    assert (ours.label_ids == theirs.label_ids).all()


def counted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].reshape(-1, 32)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum")
    return loss / num_items_in_batch


# Autocast rounds the gradients of each microbatch to bfloat16, where the plain Trainer rounds those
# of a batch: each relative to 2^-9 of its size, which four updates carry into the loss.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "bound"),
    [
        pytest.param({"compute_loss_func": counted, "max_steps": 2}, 2e-6, id="a loss of its own"),
        pytest.param({"bf16": True}, 1e-3, id="bfloat16", marks=pytest.mark.beyond_sample),
    ],
)
def test_losses(more: dict[str, Any], bound: float, tmp_path: Path) -> None:
    """A loss function that counts items: the mean over the accumulated batches."""
    options = {"gradient_accumulation_steps": 2, **more}
    plain, piped = (trained(tmp_path, kind, **options) for kind in (None, TWO))
    assert_near(piped.state.log_history, plain.state.log_history, "loss", bound=bound)
    if "bf16" in more:
        assert piped.predict(samples(8)).predictions.dtype == "float32"


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_weights_of_a_model_without_memory(tmp_path: Path) -> None:
    """A model on the meta device gets its weights from a folder when the first batch compiles it."""
    (model := gpt2()).save_pretrained(theirs := tmp_path / "theirs", max_shard_size="4KB")
    with accelerate.init_empty_weights():
        empty = GPT2LMHeadModel(model.config)
    empty.tie_weights()
    trainer = PipelineTrainer(empty, arguments(tmp_path), pipeline=TWO, weights=theirs)
    trainer.evaluate(samples(8))
    read = trainer.pipe.state_dict(full=True)
    assert_same_tensors(read, dict(model.state_dict()), "after the first batch:")
