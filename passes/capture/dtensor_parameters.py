"""DTensor parameters: they enter the exported step as local tensors and are DTensors inside of it.

Gradients are taken with respect to the DTensors, as in eager mode. A gradient with respect to the
local tensor would be redistributed to the placement of the parameter: one all-reduce per norm
weight and microbatch, and other bits.
"""

import contextlib
import warnings
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.process_groups import collective_name, group_of
from zbcompile.passes.graph.source_location import line_of
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.torch_collectives import is_dtensor
from zbcompile.passes.torch_private import reparametrize_module, sharding_of


def shardings_of(module: nn.Module) -> dict[str, Any]:
    """Returns the sharding of every parameter and buffer of a module that is a DTensor, by name:
    its `mesh`, and one of its `placements` per mesh dimension."""
    dtensors = {  # of a plain tensor that is the local part of a DTensor, the DTensor
        name: getattr(getattr(tensor, "part_of", None), "whole", tensor)
        for name, tensor in named_tensors(module)
    }
    return {name: sharding_of(dtensor) for name, dtensor in dtensors.items() if is_dtensor(dtensor)}


def to_dtensor(local: Tensor, sharding: Any) -> Tensor:
    """Returns the DTensor of a local tensor."""
    full = sharding.tensor_meta
    dtensor: Tensor = torch.distributed.tensor.DTensor.from_local(
        local,
        sharding.mesh,
        sharding.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride,
    )
    return dtensor


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the parameters and buffers of a module, tied ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


@contextlib.contextmanager
def exportable_tensors(module: nn.Module, tied: Container[str]) -> Iterator[None]:
    """Context in which every tensor of a module is replaced by its local part, without `.grad`, and
    every further name of a tied buffer by a copy.

    Tied parameters stay tied. torch.export takes neither DTensors nor tied buffers that are
    written, and a fake tensor no `.grad`.
    """
    parameters: dict[int, nn.Parameter] = {}
    replacements: dict[str, Tensor] = {}
    for name, tensor in named_tensors(module):
        value = (tensor.to_local() if is_dtensor(tensor) else tensor).detach()
        if isinstance(tensor, nn.Parameter):
            parameter = nn.Parameter(value, tensor.requires_grad)
            value = parameters.setdefault(id(tensor), parameter)
        elif name in tied:
            value = value.clone()
        replacements[name] = value
    with reparametrize_module(module, replacements):
        yield


def without_sharding(value: Any) -> Tensor:
    """Returns the full tensor of a DTensor; other tensors unchanged."""
    return value.full_tensor() if is_dtensor(value) else value  # type: ignore[no-any-return]


def local_gradient(gradient: Any, sharding: Any) -> tuple[Tensor | None, tuple[Any, ...] | None]:
    """Returns the local tensor of a gradient and its placements, None if it is not a DTensor.

    It is distributed as its parameter. Only a sum over ranks that replicate the parameter
    stays partial: the engine adds the parts once, after the step.
    """
    if not is_dtensor(gradient) or sharding is None:
        return gradient, None
    placements = tuple(
        placement if placement.is_partial("sum") and target.is_replicate() else target
        for placement, target in zip(gradient.placements, sharding.placements, strict=True)
    )
    if placements != tuple(gradient.placements):
        gradient = gradient.redistribute(placements=placements)
    return gradient.to_local(), placements


def tangent_like(loss: Any, tangent: Tensor) -> Tensor:
    """Returns the gradient of the loss in its dtype; for a loss that is a DTensor, replicated."""
    tangent = tangent.to(loss.dtype).reshape(loss.shape)
    if not is_dtensor(loss):
        return tangent
    ones: Any = torch.ones_like(loss)  # a DTensor with the placements that eager mode begins with
    mesh, placements = ones.device_mesh, ones.placements
    wrapped: Tensor = type(loss).from_local(tangent, mesh, placements, run_check=False)
    return wrapped


_UNIFORM = ("all_reduce", "all_reduce_coalesced", "all_gather_into_tensor")


def warn_of_random_numbers_on_shards(step: StepGraph) -> None:
    """Warns once if an operation draws random numbers for a value that differs between ranks.

    The ranks of a tensor-parallel group draw from equal generators, so every shard gets the same
    dropout mask.
    """
    varying: dict[Node | None, frozenset[str]] = {}  # mesh dimensions along which a value differs
    for name, sharding in step.shardings.items():
        pairs = zip(sharding.mesh.mesh_dim_names or (), sharding.placements, strict=False)
        tensor = step.parameters.get(name) or step.buffers.get(name)
        varying[tensor] = frozenset(name for name, placement in pairs if placement.is_shard())
    for node in step.calls():
        sources = (varying.get(source, frozenset()) for source in node.all_input_nodes)
        dimensions = frozenset[str]().union(*sources)
        if is_random(node) and dimensions:
            warnings.warn(
                f"{node.target} at {line_of(node)} draws random numbers for a tensor that is "
                f"sharded over {', '.join(sorted(dimensions))}: dropout on a sharded activation "
                "repeats its mask on each shard. Gather the activation first, or set p=0 there.",
                stacklevel=2,
            )
            return
        if collective_name(node) in _UNIFORM:
            dimensions -= {str(group_of(node))}
        varying[node] = dimensions
