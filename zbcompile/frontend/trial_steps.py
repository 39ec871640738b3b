"""Steps on trial: how long a step of a compiled program takes on these ranks, before any parameter has its place there.

Passes that are timed one by one say little about caches that the rest of the step empties, about links that are slow
while both ends compute, and about the loop between the passes. A few whole steps say it. What is tried is chosen in
`layout_search.py`.
"""

import time
from dataclasses import replace
from statistics import median

import torch
from torch import nn

from zbcompile.distributed.agreement import gathered
from zbcompile.distributed.ranks import Ranks
from zbcompile.frontend.bound_programs import BoundPrograms
from zbcompile.frontend.choose_schedule import in_another_order
from zbcompile.frontend.options import Options
from zbcompile.model.batch import Microbatch
from zbcompile.model.seeds import undisturbed
from zbcompile.program.program import Program
from zbcompile.runtime.engine import StepInput
from zbcompile.runtime.make_engine import make_engine

WARM_UP = 1
STEPS = (3, 9)  # at least, at most
ENOUGH = 2.0  # stop early after this many seconds once STEPS[0] is reached


class Trial:
    """A program bound to tensors like the model's, and equal microbatches for it. The model itself is only read: a
    trial shares its parameters, copies its buffers, and fills with random numbers what is on the meta device."""

    def __init__(
        self, program: Program, microbatch: Microbatch, model: nn.Module, options: Options, ranks: Ranks
    ) -> None:
        self._ranks = ranks
        tensors = [microbatch.tensors] * program.schedule.microbatches
        self._given = StepInput(tensors, 0, options.seed, options.loss_reduction, record=False)
        with undisturbed(ranks.device):
            self._bound = BoundPrograms(_stand_in(model), replace(options, init=_fill, debug_nan=False), ranks)
            self._bound.hold(program)
            self._executable = self._bound.prepare_step(program)
        self._engine = make_engine(ranks)

    def seconds(self, program: Program) -> float:
        """The median of some steps, the same on all ranks, of the program in any order. A step ends when the slowest
        rank has ended it."""
        ranks = self._ranks
        executable = in_another_order(self._executable, program, ranks)
        found: list[float] = []
        while not _enough(found):
            gathered(ranks, None)  # all begin together
            began = time.perf_counter()
            with undisturbed(ranks.device), torch.autocast(ranks.device.type, enabled=False):
                self._engine.step(executable, self._given, self._bound.parameters).losses.read()
            if ranks.device.type != "cpu":
                torch.accelerator.synchronize()
            found.append(max(gathered(ranks, time.perf_counter() - began)))
            ranks.replicas.forget()
            for parameter in self._bound.parameters.values():
                parameter.grad = None
        return median(found[WARM_UP:])


def _enough(found: list[float]) -> bool:
    count = len(found) - WARM_UP
    return count >= STEPS[1] or (count >= STEPS[0] and sum(found) > ENOUGH)


def _stand_in(model: nn.Module) -> nn.Module:
    """A module with tensors of the same names, and nothing else."""
    whole = nn.Module()
    for name, parameter in model.named_parameters():
        module, own = _module_of(whole, name)
        module.register_parameter(own, nn.Parameter(parameter.detach(), parameter.requires_grad))
    for name, buffer in model.named_buffers():
        module, own = _module_of(whole, name)
        module.register_buffer(own, buffer.detach().clone())
    return whole


def _module_of(whole: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the tensor called `name`, made if there is none, and the tensor's name there."""
    *path, own = name.split(".")
    for part in path:
        if part not in dict(whole.named_children()):
            whole.add_module(part, nn.Module())
        whole = whole.get_submodule(part)
    return whole, own


def _fill(name: str, tensor: torch.Tensor) -> None:
    """Small random numbers; integers are 0, which indexes anything."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.copy_(torch.empty(tensor.shape, device=tensor.device).uniform_(-0.05, 0.05))
    else:
        tensor.zero_()
