"""Dry updates of an optimizer that somebody else wrote, on scratch tensors when it is made: whether it updates as its
class says, and whether a pipeline can call it at all. Otherwise wrong numbers would follow, or an error in the middle
of a step."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.optimizer.early_update import writes_only_its_state
from zbcompile.optimizer.optimizer_request import MATRICES, OptimizerRequest, UpdateRule, is_known
from zbcompile.passes import gpu
from zbcompile.torch_private import step_without_hooks

SIZE = 8192  # elements of half a scratch tensor: state in 8 bits is usual from 4,096 elements on
MATRIX = (64, 128)
UPDATES = 3  # state that is rounded counts from the second one on
CLOSE = 1e-4  # of the largest change: more than vectors and scalars round apart, less than 8 bits do
Options = Sequence[Mapping[str, Any]]


def require_rule(request: OptimizerRequest, rule: UpdateRule | None, options: Options, device: torch.device) -> None:
    """Raise PipelineError if an update of scratch tensors apart, divided by `rule`, differs from one of all together,
    if an early optimizer writes what belongs to all parameters, or if its step needs a closure. `options` are those of
    its groups. torch's own optimizers whose rule is known are not tried."""
    if is_known(request.kind):
        return
    together, apart = _scratch(rule, device)
    with gpu.forked_generators(device), torch.no_grad():
        try:
            one = _updated(request, options, together)
        except PipelineError:
            raise
        except Exception as error:
            if "closure" in str(error):
                raise PipelineError(_needs_closure(request)) from error
            if rule is not None:
                text = f"{request.kind.__name__}.step() fails on a scratch tensor: {type(error).__name__}: {error}"
                raise PipelineError(text) from error
            return
        if rule is None:
            return
        two = torch.cat([_updated(request, options, [each]) for each in apart], dim=1)
    before = torch.cat([draws[0].flatten() for draws in together])
    if (one - two).abs().max() > CLOSE * (one - before).abs().max():
        raise PipelineError(_other_numbers(request, rule))


def require_rule_for_dtensors(request: OptimizerRequest, options: Options, parameters: Iterable[Any]) -> None:
    """Raise PipelineError if an update of DTensors differs from one of whole tensors, or fails, as scratch ones like
    the smallest of the `parameters` of each kind show. Every rank of their meshes must call it."""
    kinds: dict[Any, Any] = {}
    for each in filter(is_distributed, parameters):
        kind = (each.device_mesh, each.placements, each.ndim)
        kinds[kind] = min(kinds.get(kind, each), each, key=lambda tensor: tensor.numel())
    for like in kinds.values():
        line = torch.linspace(-1, 1, like.numel(), device=like.device, dtype=like.dtype).view(like.shape)
        wholes = [line * (1 + number) + number for number in range(1 + UPDATES)]
        parts = [_distributed_as(like, each) for each in wholes]
        with torch.random.fork_rng([]), torch.no_grad():
            one = _updated(request, options, [wholes])
            try:
                two = _updated(request, options, [parts])
            except Exception as error:
                said = str(error).partition("\n")[0].rstrip(".")
                text = f"{request.kind.__name__}.step() fails on parameters that are DTensors: {said}. {_LEAVE_OUT}"
                raise PipelineError(text) from error
        if (one - two).abs().max() > CLOSE * (one - wholes[0].flatten()).abs().max():
            text = f"{request.kind.__name__} gives parameters that are DTensors other values than whole tensors"
            raise PipelineError(f"{text}: scratch ones differ after {UPDATES} updates. {_LEAVE_OUT}")


_LEAVE_OUT = "Leave them out (params=) and train them with AdamW, say, or use a mesh in which they are whole."


def _distributed_as(like: Any, whole: torch.Tensor) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _scratch(rule: UpdateRule | None, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that are updated together, and the parts that are updated apart: of each its values, then a gradient for
    every update. A part begins at a multiple of the rule's block, and of no larger one."""
    generator = torch.Generator().manual_seed(0)
    if rule is None or rule == MATRICES:
        both = [torch.randn(1 + UPDATES, *MATRIX, generator=generator).to(device) * scale for scale in (1, 30)]
        return both, both
    cut = rule.block * (SIZE // rule.block | 1)
    draws = torch.randn(1 + UPDATES, 2 * max(SIZE, cut), generator=generator).to(device)
    draws[:, cut:] *= 30
    return [draws], [draws[:, :cut], draws[:, cut:]]


def _updated(request: OptimizerRequest, options: Options, scratch: Sequence[Any]) -> torch.Tensor:
    """The values of the scratch tensors after all updates, in one row for each group of options."""
    members = [[nn.Parameter(draws[0].clone()) for draws in scratch] for _ in options]
    optimizer = request.make([{**each, "params": own} for each, own in zip(options, members, strict=True)])
    for update in range(1, 1 + UPDATES):
        for own in members:
            for parameter, draws in zip(own, scratch, strict=True):
                parameter.grad = draws[update].clone()
        with writes_only_its_state(optimizer) if request.updates_early else nullcontext():
            step_without_hooks(optimizer)
    return torch.stack([torch.cat([_whole(parameter.detach()).flatten() for parameter in own]) for own in members])


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def _other_numbers(request: OptimizerRequest, rule: UpdateRule) -> str:
    name = request.kind.__name__
    remedy = "matrixwise = True if it needs whole parameters, blockwise = N if it works in blocks of N elements"
    return (
        f"{name} says that it updates {rule}, but scratch tensors that were divided so got other values than whole "
        f"ones: divided among replicas, it would train another model. Let the class say {remedy}, or nothing at all, "
        "which leaves zero=0 without early=True."
    )


def _needs_closure(request: OptimizerRequest) -> str:
    return (
        f"{request.kind.__name__}.step() needs a closure, to compute gradients several times for one update, and would "
        "see the parameters of one rank only. A pipeline's optimizer updates once, from the gradients of a step: take "
        "AdamW, say, or train the whole model in one process."
    )
