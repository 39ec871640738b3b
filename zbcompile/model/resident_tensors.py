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
    both = (model.named_parameters, model.named_buffers)  # with every name of a tied tensor
    by_name = {name: value for named in both for name, value in named(remove_duplicate=False)}
    for slot in {**bound, **resident_tensors(model, {})} if bound else ():
        tensor, kind = bound.get(slot, (None, ""))
        now = by_name.get(slot.name)
        if tensor is None:
            change = "is new since the model was compiled"
        elif now is None:
            change = "is gone since the model was compiled"
        elif now is not tensor:
            change = "was replaced by another tensor after the model was compiled"
        elif kind_of(now) != kind:
            change = f"was {kind} when it was compiled and is {kind_of(now)} now"
        else:
            continue
        raise PipelineError(
            f"{slot} {change}. Change values in place (tensor.copy_, pipe.load_state_dict), and let"
            " forward skip layers (self.layers[: self.active]). For other tensors, data types or"
            " devices make a new pipeline."
        )


def kind_of(tensor: torch.Tensor) -> str:
    """Data type, shape and device, for messages and comparison."""
    return f"{type_text(tensor)} on {tensor.device}"
