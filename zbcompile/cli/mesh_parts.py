"""One rank's part of a model on a mesh whose other ranks do not run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from zbcompile.batches.example import Example
from zbcompile.cli.compile_arguments import Plan, example_of
from zbcompile.cli.target import takes_mesh
from zbcompile.distributed.process_group import device_of
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import Parts
from zbcompile.torch_private import group_without_peers

DIMENSIONS = ("dp", "tp", "pp")
Labels = dict[str, str]  # the dimension of each process group, by its name


def why_whole(plan: Plan, model: nn.Module) -> str:
    """The reason why ranks cannot share the matrices of a model; empty if they can."""
    if dist.is_initialized():
        return "this process has a process group already; run the command by itself"
    if plan.options.balance == "measured":
        return "--balance measured runs the operations, and exchanges would wait for ranks that are not there"
    if "channels" in plan.given:
        return "--channels counts for compiled steps; here exchanges take what --hardware says (exchange, or within)"
    if takes_mesh(plan.maker) or getattr(model, "tp_plan", None):
        return ""
    name = type(model).__name__
    return f"{plan.target} takes no argument mesh, and {name} brings no tensor-parallel plan along (tp_plan is empty)"


@contextmanager
def part_of(plan: Plan, whole: nn.Module, ranks: int, tensor: int) -> Iterator[tuple[Example, Labels]]:
    """The example with the part of the first of `tensor` ranks. Inside, its collectives can be traced. Raises
    PipelineError if the model cannot be divided so."""
    from torch.distributed.device_mesh import init_device_mesh

    with group_without_peers(ranks):
        shape = 1, tensor, ranks // tensor
        mesh: Any = init_device_mesh(device_of(whole).type, shape, mesh_dim_names=DIMENSIONS)
        labels = {mesh.get_group(name).group_name: name for name in DIMENSIONS}
        example = example_of(plan, mesh)
        Parts(example.model, labels)
        if _size(example.model) >= _size(whole):
            raise PipelineError(f"{plan.target} returns as many parameters with a mesh as without")
        yield example, labels


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
