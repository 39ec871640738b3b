"""The model's own tensors, as the graphs ask for them."""

from collections.abc import Mapping

import torch
from torch import nn

from zbcompile.errors import PipelineError
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.torch_names import type_text


def resident_tensors(
    model: nn.Module, constants: Mapping[str, torch.Tensor]
) -> dict[Slot, torch.Tensor]:
    """Parameters, buffers and a capture's constants by slot."""
    tensors: dict[Slot, torch.Tensor] = {
        Slot("constant", name): tensor for name, tensor in constants.items()
    }
    tensors.update({Slot("parameter", name): tensor for name, tensor in model.named_parameters()})
    tensors.update({Slot("buffer", name): tensor for name, tensor in model.named_buffers()})
    return tensors


def require_same_tensors(model: nn.Module, bound: Mapping[Slot, tuple[torch.Tensor, str]]) -> None:
    """Raise unless the model still has the `bound` tensors: a replaced Parameter would silently
    stop training.

    `bound` has every tensor with its kind at the time of compiling.
    """
    if not bound:
        return
    for slot in resident_tensors(model, {}).keys() - bound.keys():
        raise PipelineError(
            f"{slot} is new since the model was compiled, so that no rank holds it. Add it before"
            " zbcompile.pipeline, or make a new pipeline."
        )
    both = (model.named_parameters, model.named_buffers)  # with every name of a tied tensor
    by_name = {name: value for named in both for name, value in named(remove_duplicate=False)}
    for slot, (tensor, kind) in bound.items():
        now = by_name.get(slot.name)
        if now is None:
            raise PipelineError(
                f"{slot} was there when the model was compiled and is gone. For fewer layers let"
                " forward skip some (self.layers[: self.active]), or make a new pipeline."
            )
        if now is not tensor:
            raise PipelineError(
                f"{slot} was replaced by another tensor after compiling; the pipeline would keep"
                " using the old one. Change it in place (tensor.copy_), use pipe.load_state_dict,"
                " or make a new pipeline."
            )
        if kind_of(now) != kind:
            raise PipelineError(
                f"{slot} was {kind} when it was compiled and is {kind_of(now)} now (model.to,"
                " .double, .half?). Convert the model first and make a new pipeline."
            )


def kind_of(tensor: torch.Tensor) -> str:
    """Data type, shape and device, for messages and comparison."""
    return f"{type_text(tensor)} on {tensor.device}"
