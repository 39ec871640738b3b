"""Refuses, when a trainer is made, the options of transformers.Trainer that a pipeline cannot follow."""

import os
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from zbcompile.errors import PipelineError
from zbcompile.integrations.adapters import has_adapters
from zbcompile.options import require_known

# Of TrainingArguments: those that must keep their defaults, and what to do instead.
ARGUMENTS = {
    "fsdp": 'the pipeline divides the model; replicas go into mesh=, the dimension "dp"',
    "deepspeed": 'the pipeline divides the model; replicas go into mesh=, the dimension "dp"',
    "parallelism_config": "pass pipeline={'mesh': mesh}",
    "torch_compile": "pass pipeline={'backend': 'inductor'}",
    "use_liger_kernel": "its kernels cannot be captured",
    "label_smoothing_factor": "pass compute_loss_func=",
    "neftune_noise_alpha": "add the noise in the model's forward",
    "auto_find_batch_size": "set per_device_train_batch_size; python -m zbcompile.inspect predicts memory",
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
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "there is no DistributedDataParallel",
    ),
}
OPTIONS = {
    "model": "pass model= to the trainer",
    "loss": "compute_loss_func= is the trainer's name for it",
    "loss_reduction": "the trainer divides by what it counts",
    "example": "the first batch of the data loader compiles",
}


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise PipelineError for an argument that a pipeline would ignore."""
    fields = type(args).__dataclass_fields__
    for name, remedy in ARGUMENTS.items():
        value = getattr(args, name, None)
        if name in fields and value not in (None, False, 0, [], "", fields[name].default):
            _refuse(f"{name}={value!r}", remedy)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > args.world_size:  # each would take itself for the first one, and save
        _refuse(f"{processes} processes that Accelerate takes for one each", "pass use_cpu=True if there is no GPU")
    if args.n_gpu > 1:
        _refuse(f"nn.DataParallel over {args.n_gpu} GPUs", "start a process per GPU with torchrun")
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        _refuse("train_sampling_strategy='batch_rebalance'", "it divides batches by processes; use 'random'")
    if getattr(args.accelerator_config, "dispatch_batches", None):
        _refuse("dispatch_batches=True", "every rank reads the data itself")


def refuse_calls(trainer: Trainer, given: Mapping[str, Any], base: type[Trainer]) -> None:
    """Raise PipelineError for arguments and overridden methods of the trainer that a pipeline would ignore."""
    if given.get("model_init") is not None:
        _refuse("model_init=", "make the model first and pass model=; a search makes a trainer per trial")
    if tuple(given.get("optimizers") or (None, None)) != (None, None):
        _refuse("optimizers=", "pass optimizer_cls_and_kwargs=: which parameters a rank has is known after compiling")
    if type(trainer).compute_loss is not base.compute_loss:
        _refuse(f"{type(trainer).__name__}.compute_loss", "pass compute_loss_func=, which becomes part of the graphs")


def refuse_model(model: Any, weights: Any) -> None:
    """Raise PipelineError for anything but a model, and for a model that these weights do not fill."""
    if not isinstance(model, nn.Module):
        raise PipelineError(f"PipelineTrainer: model={model!r}; expected an nn.Module, as from_pretrained returns it.")
    if weights is not None and has_adapters(model):
        _refuse("weights= of a model with adapters", "load its base with from_pretrained before get_peft_model")


def refuse_options(options: Any, weights: Any) -> None:
    """Raise PipelineError for options that a pipeline does not have, and for those that the trainer sets."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        expected = 'the options of zbcompile.pipeline by name, such as {"schedule": "zb-v", "ranks": 2}'
        raise PipelineError(f"PipelineTrainer: pipeline={options!r}; expected {expected}.")
    if not isinstance(weights, str | PathLike | None):
        raise PipelineError(f"PipelineTrainer: weights={weights!r}; expected a folder of safetensors.")
    for name in sorted(options.keys() & OPTIONS.keys()):
        _refuse(f"pipeline={{{name!r}: ...}}", OPTIONS[name])
    try:
        require_known(options)
    except TypeError as error:  # of a name that is no option
        raise PipelineError(f"PipelineTrainer: pipeline={{...}}: {error}.") from None


def refuse_optimizer(kind: Any, options: Mapping[str, Any]) -> None:
    """Raise PipelineError for an optimizer that takes parameters, or the model, in another way than torch's."""
    takes = sorted(options.keys() & {"params", "model", "optimizer_dict"})
    if takes or not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        _refuse(f"the optimizer {getattr(kind, '__name__', kind)}", "choose a class of torch optimizers")


def _refuse(what: str, remedy: str) -> None:
    raise PipelineError(f"PipelineTrainer does not support {what}: {remedy}.")
