"""Refuses, when a trainer is made, the options of transformers.Trainer that a pipeline cannot
follow."""

import os
from collections.abc import Iterator, Mapping
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
    pipeline: Any,
    weights: Any,
    arguments: Mapping[str, Any],
) -> None:
    """Raises PipelineError for what a pipeline cannot follow: arguments of the trainer, overridden
    methods, and options of the pipeline."""
    for is_refused, text in _refusals(trainer, model, args, pipeline, weights, arguments):
        if is_refused:
            raise PipelineError(f"PipelineTrainer{text}.")


def _refusals(
    trainer: Trainer,
    model: Any,
    args: TrainingArguments,
    pipeline: Any,
    weights: Any,
    arguments: Mapping[str, Any],
) -> Iterator[tuple[Any, str]]:
    """Yields whether something is refused, and what: a row may rely on the rows before."""
    no = " does not support "
    yield (
        arguments.get("model_init") is not None,
        (
            f"{no}model_init=: make the model first and pass model=; a search makes a trainer per"
            " trial"
        ),
    )
    yield (
        any(value is not None for value in arguments.get("optimizers") or ()),
        (
            f"{no}optimizers=: pass optimizer_cls_and_kwargs=: which parameters a rank has is known"
            " after compiling"
        ),
    )
    kind = type(trainer)
    definer = next(base for base in kind.__mro__ if "compute_loss" in vars(base))
    yield (
        definer is not Trainer,
        (
            f"{no}{kind.__name__}.compute_loss: pass compute_loss_func=, which becomes part of the"
            " graphs"
        ),
    )
    is_mapping = isinstance(pipeline, Mapping) and all(isinstance(name, str) for name in pipeline)
    expected = 'the options of zbcompile.pipeline by name, such as {"schedule": "zb-v", "ranks": 2}'
    yield not is_mapping, f": pipeline={pipeline!r}; expected {expected}"
    yield (
        not isinstance(weights, str | PathLike | None),
        f": weights={weights!r}; expected a folder of safetensors",
    )
    for name in sorted(pipeline.keys() & OPTIONS.keys()):
        yield True, f"{no}pipeline={{{name!r}: ...}}: {OPTIONS[name]}"
    yield _unknown(pipeline), f": pipeline={{...}}: {_unknown(pipeline)}"
    is_module = isinstance(model, nn.Module)
    yield not is_module, f": model={model!r}; expected an nn.Module, as from_pretrained returns it"
    yield (
        weights is not None and has_adapters(model),
        (
            f"{no}weights= of a model with adapters: load its base with from_pretrained before"
            " get_peft_model"
        ),
    )
    fields = type(args).__dataclass_fields__
    for name in filter(fields.__contains__, ARGUMENTS):
        value = getattr(args, name, None)
        is_set = value not in (None, False, 0, [], "", fields[name].default)
        yield is_set, f"{no}{name}={value!r}: {ARGUMENTS[name]}"
    # each would take itself for the first one, and save
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    yield (
        processes > args.world_size,
        (
            f"{no}{processes} processes that Accelerate takes for one each: pass use_cpu=True if"
            " there is no GPU"
        ),
    )
    yield (
        args.n_gpu > 1,
        f"{no}nn.DataParallel over {args.n_gpu} GPUs: start a process per GPU with torchrun",
    )
    yield (
        getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
        (
            f"{no}train_sampling_strategy='batch_rebalance': it divides batches by processes; use"
            " 'random'"
        ),
    )
    yield (
        getattr(args.accelerator_config, "dispatch_batches", None),
        f"{no}dispatch_batches=True: every rank reads the data itself",
    )


def _unknown(options: Mapping[str, Any]) -> str:
    """Returns the sentence on a name that is no option of a pipeline; "" if all are."""
    try:
        require_known(options)
    except TypeError as error:
        return str(error)
    return ""


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
