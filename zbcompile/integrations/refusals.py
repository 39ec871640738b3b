"""Refuses, when a trainer is made, the options of transformers.Trainer that a pipeline cannot
follow."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from zbcompile.errors import PipelineError

# Of TrainingArguments: those that must keep their defaults, and what to do instead.
ARGUMENTS = {
    "fsdp": 'the pipeline divides the model; replicas go into mesh=, the dimension "dp"',
    "deepspeed": 'the pipeline divides the model; replicas go into mesh=, the dimension "dp"',
    "parallelism_config": "pass pipeline={'mesh': mesh}",
    "torch_compile": "pass pipeline={'backend': 'inductor'}",
    "use_liger_kernel": "its kernels cannot be captured",
    "label_smoothing_factor": "pass compute_loss_func=",
    "neftune_noise_alpha": "add the noise in the model's forward",
    "auto_find_batch_size": (
        "set per_device_train_batch_size; python -m zbcompile.inspect predicts memory"
    ),
    "torch_empty_cache_steps": "a step keeps its memory for the next one",
    "batch_eval_metrics": "metrics are computed over the whole evaluation",
    "eval_use_gather_object": "outputs must be tensors",
    "fp16": "train in bfloat16: bf16=True",
    "fp16_full_eval": "a pipeline's tensors keep their dtype; use bf16=True",
    "bf16_full_eval": "a pipeline's tensors keep their dtype; use bf16=True",
    "save_on_each_node": "all ranks write into one folder",
    "enable_jit_checkpoint": "a save needs all ranks; use save_steps",
    "debug": "pass pipeline={'debug_nan': True}",
    **dict.fromkeys(
        (
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
        ),
        "there is no DistributedDataParallel",
    ),
}
OPTIONS = {
    "model": "pass model= to the trainer",
    "loss": "compute_loss_func= is the trainer's name for it",
    "loss_reduction": "the trainer divides by what it counts",
    "example": "the first batch of the data loader compiles",
}


def refuse(
    trainer: Trainer,
    model: Any,
    args: TrainingArguments,
    pipeline: Mapping[str, Any],
    weights: Any,
    arguments: Mapping[str, Any],
) -> None:
    """Raises PipelineError for what a pipeline cannot follow: arguments of the trainer, overridden
    methods, and options of the pipeline."""
    definer = next(base for base in type(trainer).__mro__ if "compute_loss" in vars(base))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rows: list[tuple[Any, str]] = [
        (
            arguments.get("model_init") is not None,
            "model_init=: make the model first and pass model=; a search makes a trainer per trial",
        ),
        (
            any(value is not None for value in arguments.get("optimizers") or ()),
            "optimizers=: pass optimizer_cls_and_kwargs=: which parameters a rank has is known"
            " after compiling",
        ),
        (
            definer is not Trainer,
            f"{type(trainer).__name__}.compute_loss: pass compute_loss_func=, which becomes part of"
            " the graphs",
        ),
        (
            not isinstance(model, nn.Module),
            f"model={model!r}: pass an nn.Module, as from_pretrained returns it",
        ),
        (
            weights is not None and hasattr(model, "peft_config"),
            "weights= of a model with adapters: load its base with from_pretrained before"
            " get_peft_model",
        ),
        # each would take itself for the first one, and save
        (
            processes > args.world_size,
            f"{processes} processes that Accelerate takes for one each: pass use_cpu=True if there"
            " is no GPU",
        ),
        (
            args.n_gpu > 1,
            f"nn.DataParallel over {args.n_gpu} GPUs: start a process per GPU with torchrun",
        ),
        (
            getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
            "train_sampling_strategy='batch_rebalance': it divides batches by processes; use"
            " 'random'",
        ),
        (
            getattr(args.accelerator_config, "dispatch_batches", None),
            "dispatch_batches=True: every rank reads the data itself",
        ),
        *((name in pipeline, f"pipeline={{{name!r}: ...}}: {OPTIONS[name]}") for name in OPTIONS),
    ]
    fields = type(args).__dataclass_fields__
    for name in filter(fields.__contains__, ARGUMENTS):
        value = getattr(args, name, None)
        is_set = value not in (None, False, 0, [], "", fields[name].default)
        rows.append((is_set, f"{name}={value!r}: {ARGUMENTS[name]}"))
    for is_refused, text in rows:
        if is_refused:
            raise PipelineError(f"PipelineTrainer does not support {text}.")


def refuse_optimizer(kind: Any, options: Mapping[str, Any]) -> None:
    """Raises PipelineError for an optimizer that takes parameters, or the model, in another way
    than torch's."""
    takes = options.keys() & {"params", "model", "optimizer_dict"}
    if takes or not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        name = getattr(kind, "__name__", kind)
        raise PipelineError(
            f"PipelineTrainer does not support the optimizer {name}: choose a class of torch"
            " optimizers."
        )
