"""What is captured: the model followed by its loss, or the model alone, observed by a `EffectsSeen`."""

import dataclasses
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from zbcompile.passes.capture.distributed_regions import PendingCall
from zbcompile.passes.capture.joined_loss import join
from zbcompile.passes.capture.side_effects import EffectsSeen
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.torch_names import type_text
from zbcompile.passes.torch_private import pytree

LossFunction = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, Any]]  # of (output, target); with metrics a pair
Kept = Literal["", "outputs", "metrics"]  # of a step besides its loss
Read = Callable[[Any, Any], Any]  # what to compute of the model's output and the target, in place of a loss


def call_loss(loss: LossFunction, output: Any, target: Any) -> Any:
    """Returns `loss(output, target)`; `failing_loss` looks for the frame of this call."""
    return loss(output, target)


def failing_loss(error: BaseException) -> str:
    """The loss in which `error` was raised and what it was given; empty if the model raised it."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    given = next((frame.f_locals for frame in frames if frame.f_code is call_loss.__code__), None)
    if given is None:
        return ""
    leaves = pytree.tree_leaves((given["output"], given["target"]))
    kinds = (type_text(each) for each in leaves if isinstance(each, torch.Tensor))
    return f"the loss {getattr(given['loss'], '__name__', type(given['loss']).__name__)} of ({', '.join(kinds)}) after "


def join_loss(model: nn.Module, loss: Any) -> None:
    """Make a loss module with parameters the submodule `loss` of the model, whose last stage then has them: they train,
    and are saved, as `loss.NAME`. Raises CaptureError if the model has another attribute of that name, or runs all its
    submodules."""
    if not isinstance(loss, nn.Module) or next(loss.parameters(), None) is None or loss in model.modules():
        return
    if hasattr(model, "loss"):
        raise Refusal.LOSS_NAME.error(loss=type(loss).__name__, model=type(model).__name__)
    if isinstance(model, nn.Sequential):
        raise Refusal.LOSS_IN_SEQUENCE.error(loss=type(loss).__name__)
    join(model, loss)


def register_dataclasses(value: Any) -> None:
    """Register the dataclasses in `value` with torch's pytrees, which flatten outputs."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(type(value))
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            register_dataclasses(part)


class TrainingStep(nn.Module):
    """The model followed by its loss, and without gradients what `keep` names: the outputs, with metrics if the loss
    function returns `(loss, metrics)`, or the metrics alone. Everything else is dropped. It also returns the tensors
    that forward asked about."""

    loss: LossFunction | None

    def __init__(self, model: nn.Module, loss: LossFunction | None, watch: EffectsSeen, keep: Kept = "") -> None:
        super().__init__()
        self.model, self.watch, self.keep = model, watch, keep
        if isinstance(loss, nn.Module) and loss in model.modules():
            vars(self)["loss"] = loss  # its tensors have the names that the model gives them, and no others
        else:
            self.loss = loss

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> tuple[Any, list[torch.Tensor]]:
        with self.watch.forward(self.model, (args, kwargs, target)):
            output = self.model(*args, **kwargs)
            judge: Any = loss_in if self.loss is None else partial(call_loss, self.loss)
            given = () if self.loss is None else (target,)
            if isinstance(output, PendingCall) and self.keep == "outputs":
                raise Refusal.DTENSOR_OUTPUT.error()
            found = output.finish(judge, *given) if isinstance(output, PendingCall) else judge(output, *given)
            loss, *metrics = with_metrics(found)
            loss = check_loss(loss)
        if not self.keep:
            return loss, self.watch.questions.results
        if self.keep == "metrics" and not metrics:
            alone = "there is no loss=" if self.loss is None else "the loss function returned a loss alone"
            raise Refusal.NO_METRICS.error(missing=alone)
        kept = metrics[0] if self.keep == "metrics" else (output, *metrics) if metrics else output
        return (loss, detached(kept)), self.watch.questions.results


def with_metrics(found: Any) -> tuple[Any, ...]:
    """What a loss function returned: the loss, or the loss and metrics."""
    return found if isinstance(found, tuple) and len(found) == 2 else (found,)


def detached(output: Any) -> Any:
    """The output without gradients."""
    register_dataclasses(output)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)


class Inference(nn.Module):
    """The model alone, or what `read` makes of its output, followed by the tensors that forward asked about."""

    def __init__(self, model: nn.Module, read: Read | None, watch: EffectsSeen) -> None:
        super().__init__()
        self.model, self.read, self.watch = model, read, watch

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> tuple[Any, list[torch.Tensor]]:
        with self.watch.forward(self.model, (args, kwargs, target)):
            output = self.model(*args, **kwargs)
            if isinstance(output, PendingCall):
                output = output.finish(lambda whole: whole.full_tensor())
            if self.read is not None:
                output = self.read(output, target)
        register_dataclasses(output)
        return output, self.watch.questions.results


def loss_in(output: Any) -> torch.Tensor:
    """The loss in a model's output: the output itself, its `loss` entry or attribute, or the first entry of a tuple."""
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if isinstance(loss, torch.Tensor):
        return loss
    raise Refusal.NO_LOSS.error(kind=type(output).__name__)


def check_loss(loss: Any) -> torch.Tensor:
    """Return the loss if it is a differentiable scalar. Raises CaptureError otherwise."""
    if not isinstance(loss, torch.Tensor):
        raise Refusal.LOSS_KIND.error(kind=type(loss).__name__)
    if loss.ndim != 0:
        raise Refusal.LOSS_SHAPE.error(shape=tuple(loss.shape))
    if not loss.is_floating_point():
        raise Refusal.LOSS_DTYPE.error(dtype=loss.dtype)
    return loss
