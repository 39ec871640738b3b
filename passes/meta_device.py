"""Models built on the meta device: captured as if they were on a real one, without allocating memory there."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from zbcompile.passes.graph.fx import like
from zbcompile.passes.torch_private import FakeTensorMode, tensor_tables


def is_on_meta(model: nn.Module) -> bool:
    """Whether some parameter or buffer exists on the meta device only."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@contextlib.contextmanager
def as_if_on(model: nn.Module, device: torch.device) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Inside, replace the tensors of a model on the meta device with fake ones of `device`; tied ones stay tied.

    Yields the function that turns an input into one that such a model takes.
    """
    if not is_on_meta(model):
        yield lambda tensor: tensor
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}
    original = [(table, name, tensor) for table, name, tensor in tensor_tables(model)]
    for table, name, tensor in original:
        if id(tensor) not in fakes:
            with mode:
                fakes[id(tensor)] = on_device(tensor, device)
        table[name] = fakes[id(tensor)]
    try:
        yield mode.from_tensor
    finally:
        for table, name, tensor in original:
            table[name] = tensor


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An unfilled tensor or parameter on `device`, otherwise like `tensor`, with the attributes that it was given."""
    new = like(tensor, device=device)
    made = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    vars(made).update(vars(tensor))
    return made
