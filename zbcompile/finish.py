"""The end of a step: gradients of parameters that several stages train are summed, and every rank learns the loss.

Eager autograd adds the uses of a parameter per microbatch, the last use first, and then accumulates the sums in
microbatch order. So the stages' gradients are added from the last stage to the first and folded at the end.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from zbcompile.gradients import Gradients, add_uses, fold
from zbcompile.program import Program


def sum_shared_in_process(program: Program, gradients: Gradients) -> None:
    """All stages are here: add the uses from the last stage to the first and accumulate once."""
    for name, stages in shared_stages(program).items():
        total = _add_all(gradients.waiting(name, stage, program.schedule.microbatches) for stage in stages)
        fold(gradients.parameters[name], total)


def sum_shared(program: Program, gradients: Gradients, rank: int, group: dist.ProcessGroup) -> None:
    """The running sum walks from the rank of the last use to that of the first, which hands the total to all
    holders."""
    for name, stages in shared_stages(program).items():
        holders = sorted({program.rank_of(stage) for stage in program.homes[name]})
        if rank in holders:
            total = _walk(program, gradients, name, stages, rank, group)
            total = _share(program, gradients, name, total, holders, program.rank_of(stages[-1]), rank, group)
            fold(gradients.parameters[name], total)


def shared_stages(program: Program) -> dict[str, tuple[int, ...]]:
    """Every shared parameter with the stages that train it, last stage first."""
    trained = {name: tuple(s.stage for s in reversed(program.stages) if name in s.trained) for name in program.shared}
    return dict(sorted(trained.items()))


def _add_all(uses: Iterable[list[torch.Tensor]]) -> list[torch.Tensor]:
    total: list[torch.Tensor] = []
    for use in uses:
        total = add_uses(total, use) if total else use
    return total


def _walk(
    program: Program, gradients: Gradients, name: str, stages: Sequence[int], rank: int, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Take part in the walk; the rank of the first use ends with the total, others with an empty list."""
    running: list[torch.Tensor] = []
    for later, stage in zip((None, *stages), stages, strict=False):
        here = program.rank_of(stage)
        if later is not None and program.rank_of(later) != here:
            running = _pass(program, gradients, name, running, program.rank_of(later), here, rank, group)
        if rank == here:
            own = gradients.waiting(name, stage, program.schedule.microbatches)
            running = add_uses(running, own) if running else own
    return running


def _pass(
    program: Program,
    gradients: Gradients,
    name: str,
    running: list[torch.Tensor],
    source: int,
    destination: int,
    rank: int,
    group: dist.ProcessGroup,
) -> list[torch.Tensor]:
    if rank == source:
        for tensor in running:
            dist.send(tensor.contiguous(), group=group, group_dst=destination)
        return []
    if rank == destination:
        return [_receive(gradients, name, source, group) for _ in range(_pieces(program))]
    return running


def _share(
    program: Program,
    gradients: Gradients,
    name: str,
    total: list[torch.Tensor],
    holders: Sequence[int],
    owner: int,
    rank: int,
    group: dist.ProcessGroup,
) -> list[torch.Tensor]:
    if rank != owner:
        return [_receive(gradients, name, owner, group) for _ in range(_pieces(program))]
    for holder in holders:
        for tensor in total if holder != owner else ():
            dist.send(tensor.contiguous(), group=group, group_dst=holder)
    return total


def _pieces(program: Program) -> int:
    """How many tensors a shared gradient is: one per microbatch in exact mode, else their sum."""
    return program.schedule.microbatches if program.exact else 1


def _receive(gradients: Gradients, name: str, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    parameter = gradients.parameters[name]
    buffer = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    dist.recv(buffer, group=group, group_src=source)
    return buffer


def total_loss(losses: Mapping[int, torch.Tensor], microbatches: int, reduction: str) -> torch.Tensor:
    """The step's loss: the sum over microbatches, in their order, of loss_i / m (`mean`) or of loss_i (`sum`)."""
    scaled = [losses[i] / microbatches if reduction == "mean" else losses[i] for i in range(microbatches)]
    total = scaled[0]
    for value in scaled[1:]:
        total = total + value
    return total.detach()


def share_loss(loss: torch.Tensor | None, like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Give every rank the loss of the rank that computed it, as a tensor on the device.

    The others add zeros, which changes no bit, so that no rank ends its step before all have run their passes: one that
    did would update its parameters although another rank has failed.
    """
    value = torch.zeros_like(like) if loss is None else loss.clone()
    dist.all_reduce(value, group=group)
    return value
