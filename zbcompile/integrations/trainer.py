"""transformers.Trainer with the forward and backward of a batch run as a pipeline."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_to_fp32, send_to_device
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import seed_worker

from zbcompile.api.pipeline import Pipeline
from zbcompile.api.pipeline_function import pipeline as make_pipeline
from zbcompile.distributed.agreement import together
from zbcompile.engine.step_agreement import require_same_batch
from zbcompile.errors import PipelineError
from zbcompile.integrations.accelerator import PipelineAccelerator
from zbcompile.integrations.refusals import refuse, refuse_optimizer
from zbcompile.model.module_tensors import local_state_allowed
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer
from zbcompile.persistence.checkpoint import load_state, save_checkpoint
from zbcompile.persistence.safetensors_weights import load_weights, save_weights

# in a checkpoint of the trainer: parameters and optimizer, for any number of ranks
STATE = "pipeline"
Call = dict[str, Any]  # the keywords of pipe.step


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a microbatch, as part of the graphs: `compute`'s, as Trainer takes it, or the
    model's own."""

    compute: Callable[..., Any] | None

    def __call__(self, outputs: Any, target: Mapping[str, Any]) -> Any:
        if self.compute is not None:
            loss = self.compute(outputs, target["labels"], num_items_in_batch=target["items"])
        elif isinstance(outputs, dict) and "loss" not in outputs:
            raise PipelineError(
                f"the model returned no loss, only {', '.join(outputs)}. Does a batch have labels?"
            )
        else:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return loss / target["parts"]


class PipelineTrainer(Trainer):
    """`transformers.Trainer` whose steps and evaluations run as a pipeline; its other arguments are
    Trainer's.

    Args:
        pipeline: the options of `zbcompile.pipeline`, such as
            `{"schedule": "zb-v", "microbatches": 8}`; `ranks` runs that many ranks in this
            process, under torchrun there is one per process.
        weights: a folder of safetensors, as the Hub stores them, that fills the model after
            compiling: for one whose parameters are on the meta device
            (`accelerate.init_empty_weights`).

    All ranks of a pipeline get the same batches, replicas (a mesh with "dp") their own. `pipe` is
    the pipeline. What a pipeline cannot do is refused with a PipelineError when the trainer is
    made. docs/huggingface.md says more.

    >>> trainer = PipelineTrainer(model, args, train_dataset=data)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: PipelineAccelerator
    _train_batch_size: int

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *more: Any,
        pipeline: Mapping[str, Any] | None = None,
        weights: str | Path | None = None,
        **options: Any,
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        refuse(self, model, args, {} if pipeline is None else pipeline, weights, options)
        super().__init__(model, args, *more, **options)
        self.pipe: Pipeline = make_pipeline(
            self.model, loss=BatchLoss(self.compute_loss_func), **(pipeline or {})
        )
        self.accelerator.pipe = self.pipe
        # fills the pipeline once it is compiled
        self._pending: Callable[[], Any] | None = (
            None if weights is None else partial(load_weights, weights, self.pipe)
        )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = PipelineAccelerator  # Trainer says which class it makes

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return PipelineModel(self)

    # ---- a batch

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of a batch; returns its loss."""
        model.train()
        inputs = send_to_device(inputs, self.pipe.device)
        self._require_same(inputs)
        call = self._call(inputs, num_items_in_batch)
        with self.accelerator.autocast():
            self._compile_for(call)
            return self.pipe.step(**call)  # type: ignore[no-any-return]

    def _require_same(self, inputs: Any) -> None:
        with self.pipe.ranks.watch.region("comparing batches"):
            require_same_batch(self.pipe.ranks, inputs)

    def _call(self, inputs: Mapping[str, Any], items: Any) -> Call:
        """The keywords of a step.

        A loss that does not count items is the mean over the accumulated batches. A step is the
        mean over its microbatches, and of replicas, so each divides by its share of the items.
        """
        counts = items is not None and (
            self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        )
        divided = counts or self.compute_loss_func is not None
        if self.loss_is_scaled_for_ga is not None:
            divided = self.loss_is_scaled_for_ga
        parts = 1 if divided else self.current_gradient_accumulation_steps
        kwargs, target = dict(inputs), dict[str, Any](parts=self._number(parts))
        if self.compute_loss_func is not None:
            target["labels"] = kwargs.pop("labels", None)
            target["items"] = self._number(items) if counts else None
        if counts and self.model_accepts_loss_kwargs:
            kwargs["num_items_in_batch"] = self._number(items)
        shares = self.pipe.microbatches_of(**kwargs, target=target)
        if self.args.average_tokens_across_devices:
            shares *= self.accelerator.num_processes
        for counts, name in ((kwargs, "num_items_in_batch"), (target, "items")):
            if counts.get(name) is not None:
                counts[name] = counts[name] / shares
        return {**kwargs, "target": target}

    def _number(self, value: Any) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.float32, device=self.pipe.device)

    def _compile_for(self, call: Call) -> None:
        """Compile, unless that has been done, and load the weights that waited for it."""
        if self._pending or not self.pipe.compilations:
            self.pipe.compile(**call)
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def evaluated(self, inputs: Mapping[str, Any]) -> Any:
        """The model's output for a batch."""
        self._require_same(inputs)
        with self.accelerator.autocast():
            if self._pending or not self.pipe.compilations:
                self._compile_from(inputs)
            outputs = self.pipe.eval(**inputs)
        return convert_to_fp32(outputs) if self.accelerator.mixed_precision != "no" else outputs

    def _compile_from(self, inputs: Mapping[str, Any]) -> None:
        """Compile the training step for a batch of the evaluation, because the step decides where
        parameters live."""
        self.model.train()
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        batch = dict(inputs)
        items = batch.pop("num_items_in_batch", 1)
        self._compile_for(self._call(batch, items))
        self.model.eval()

    # ---- what is counted over processes

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        # Trainer's seeds differ from rank to rank
        if getattr(loader, "worker_init_fn", None) is not None:
            replica = self.accelerator.process_index
            loader.worker_init_fn = partial(
                seed_worker, num_workers=self.args.dataloader_num_workers, rank=replica
            )
        return loader

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return (
            self._train_batch_size
            * args.gradient_accumulation_steps
            * self.accelerator.num_processes
        )

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """This process's share of the operations, since Trainer adds up those of all processes."""
        return (
            super().floating_point_ops(inputs)
            * self.accelerator.num_processes
            / self.args.world_size
        )

    # ---- the update

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's optimizer, over this rank's parameters."""
        if self.optimizer is None:
            kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, self.model
            )
            refuse_optimizer(kind, options)
            decay = set(self.get_decay_parameter_names(self.model))
            decayed = {
                "params": lambda name, _: name in decay,
                "weight_decay": self.args.weight_decay,
            }
            groups = (
                [decayed] if decay & {name for name, _ in self.model.named_parameters()} else None
            )
            if options.get("zero"):  # the norm is known only inside of the update
                options = {"clip": self.args.max_grad_norm or None, **options}
            self.optimizer = self.pipe.optimizer(
                kind, groups=groups, **{"weight_decay": 0.0, **options}
            )
        return self.optimizer

    def _clip_grad_norm(self, model: Any) -> torch.Tensor | None:
        self.accelerator.unscale_gradients()
        return (
            None
            if self._pipeline_optimizer.config.zero
            else self.pipe.clip_grad_norm_(self.args.max_grad_norm)
        )

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and not self._pipeline_optimizer.config.zero:
            return self.pipe.clip_grad_norm_(float("inf"))
        return grad_norm

    @property
    def _pipeline_optimizer(self) -> PipelineOptimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # type: ignore[no-any-return]

    # ---- save and resume

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Write the model in the layout of `save_pretrained`; every rank calls it and writes its
        own part."""
        if not self.pipe.compilations:
            super()._save(output_dir, state_dict)
            return
        folder = Path(str(output_dir if output_dir is not None else self.args.output_dir))
        if has_adapters(self.model):
            save_adapters(folder, self.pipe, bool(self.args.should_save))
        else:
            save_weights(folder, self.pipe)
        if self.args.should_save:
            named = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if named is not None:
                named.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        frozen = not has_adapters(self.model)  # the base of adapters is where it came from
        save_checkpoint(
            Path(output_dir) / STATE, self.pipe, self._pipeline_optimizer, frozen=frozen
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self._pending = partial(self._fill, resume_from_checkpoint)

    def _fill(self, folder: str) -> None:
        """Load what `_save` wrote."""
        (load_adapters if has_adapters(self.model) else load_weights)(folder, self.pipe)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / OPTIMIZER_NAME).exists():
            raise PipelineError(
                f"{folder} holds the optimizer of a plain Trainer, which knows parameters by their"
                " numbers. Start from its weights: load the model with from_pretrained, or pass"
                " weights=."
            )
        if (folder / STATE).is_dir():
            self._pending = partial(load_state, folder / STATE, self.pipe, self._pipeline_optimizer)
        if (folder / SCHEDULER_NAME).exists():
            self.lr_scheduler.load_state_dict(
                torch.load(folder / SCHEDULER_NAME, weights_only=True)
            )

    def _load_best_model(self) -> None:
        self._fill(str(self.state.best_model_checkpoint))

    def end(self) -> None:
        """Closes the pipeline, and ends the training."""
        self.pipe.close()
        super().end()


class PipelineModel:
    """The model that Trainer wraps: its attributes are the model's. A call is an evaluation of the
    pipeline."""

    def __init__(self, trainer: PipelineTrainer) -> None:
        self._trainer = trainer

    def __call__(self, **inputs: Any) -> Any:
        return self._trainer.evaluated(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer.model, name)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._trainer.pipe.no_sync()

    def zero_grad(self) -> None:
        """Clear all gradients, also those that are not in `.grad`."""
        self._trainer.model.zero_grad()
        if self._trainer.pipe.compilations:
            self._trainer.pipe.zero_grad()
            self._trainer.optimizer.zero_grad()


# Adapters of PEFT, in its own layout and without their base model


def has_adapters(model: nn.Module) -> bool:
    """Returns True for a model that `peft.get_peft_model` returned."""
    return hasattr(model, "peft_config")


def save_adapters(folder: Path, pipe: Pipeline, writes: bool) -> None:
    """`save_pretrained` of a PEFT model, by the process that `writes`; every rank must call it."""
    model: Any = pipe.model
    with local_state_allowed():
        tensors = model.state_dict().items()
    here = {name: value for name, value in tensors if not getattr(value, "is_meta", False)}
    state = {**here, **pipe.state_dict(full=True, frozen=False)}
    together(
        pipe.ranks,
        f"writing {folder}",
        lambda: model.save_pretrained(folder, state_dict=state) if writes else None,
    )


def load_adapters(folder: str | Path, pipe: Pipeline) -> None:
    """Load all adapters of a model; every rank must call it."""
    what = f"loading the adapters in {folder}"
    pipe.parameters()  # waits for the last update
    with pipe.ranks.watch.region(what), local_state_allowed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*meta parameter.*no-op")  # those of other ranks
        together(pipe.ranks, what, partial(_read, Path(folder), pipe.model))
        names = list(pipe.model.state_dict())
    adapters = [f".{name}." for name in pipe.model.peft_config]  # type: ignore[union-attr]
    filled = [name for name in names if any(adapter in name for adapter in adapters)]
    pipe.resume(pipe.step_index, filled)


def _read(folder: Path, model: Any) -> None:
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    for name in model.peft_config:
        # those of "default" lie in the folder itself
        place = folder if name == "default" else folder / name
        if not (place / "adapter_config.json").exists():
            raise PipelineError(
                f"{place} has no adapter_config.json, which PEFT writes beside the adapter"
                f" {name!r}."
            )
        set_peft_model_state_dict(
            model, load_peft_weights(str(place), device="cpu"), adapter_name=name
        )
