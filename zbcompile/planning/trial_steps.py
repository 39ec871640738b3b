"""Trial steps: benchmark a compiled program on these ranks, before parameters are allocated.

Passes that are timed one by one say little about caches that the rest of the step empties, about links that are slow
while both ends compute, and about the loop between the passes. A few whole steps say it. What is tried is chosen in
`layout_trials.py`.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from zbcompile.batches.batch import Microbatch
from zbcompile.distributed.agreement import gathered
from zbcompile.distributed.ranks import Ranks
from zbcompile.model.model_info import module_with
from zbcompile.model.seeds import undisturbed
from zbcompile.options import Options
from zbcompile.passes import gpu
from zbcompile.program.program import Program
from zbcompile.program_cache.bound_programs import BoundPrograms
from zbcompile.runtime.executable import Executable, StepInput, plan_step
from zbcompile.runtime.step_run import Engine

WARM_UP = 1
ROUNDS = (3, 15)  # at least, at most
ENOUGH = 2.0  # stop early after this many seconds for each program once ROUNDS[0] is reached


class StepTimes(NamedTuple):
    """Seconds of the steps of one program: their median, the shortest and the longest."""

    median: float
    shortest: float
    longest: float

    def __str__(self) -> str:
        return f"{self.median:.4g} s ({self.shortest:.4g} to {self.longest:.4g} s)"


class TrialProgram:
    """A program bound to tensors like the model's, and equal microbatches for it. The model itself is only read: a
    trial shares its parameters, copies its buffers, and fills with random numbers what is on the meta device."""

    def __init__(
        self, program: Program, microbatch: Microbatch, model: nn.Module, options: Options, ranks: Ranks
    ) -> None:
        self._ranks = ranks
        tensors = [microbatch.tensors] * program.schedule.microbatches
        self._given = StepInput(tensors, 0, options.seed, options.loss_reduction)
        with undisturbed(ranks.device):
            self._bound = BoundPrograms(_stand_in(model), replace(options, init=_fill, debug_nan=False), ranks)
            self._bound.hold(program)
            self._graphs = [self._bound.prepare_step(program)] * program.schedule.microbatches
        self._engine = Engine(ranks)

    def times(self, programs: Sequence[Program]) -> list[StepTimes]:
        """Times some steps of each program, which has the same graphs in an order of its own; they take turns. Every
        rank gets the same times: a step ends when the slowest rank has ended it."""
        runs = [plan_step(self._graphs, self._graphs, each.lowered, self._ranks.local) for each in programs]
        found: list[list[float]] = [[] for _ in runs]
        while not _enough(found):
            for run, times in zip(runs, found, strict=True):
                times.append(self._step(run))
        timed = (times[WARM_UP:] for times in found)
        return [StepTimes(median(times), min(times), max(times)) for times in timed]

    def _step(self, run: Executable) -> float:
        ranks = self._ranks
        gathered(ranks, None)  # all begin together
        began = time.perf_counter()
        with undisturbed(ranks.device), torch.autocast(ranks.device.type, enabled=False):
            self._engine.run(run, self._given, self._bound.parameters).losses.read()
        gpu.synchronize(ranks.device)
        seconds = max(gathered(ranks, time.perf_counter() - began))
        ranks.replicas.forget()
        for parameter in self._bound.parameters.values():
            parameter.grad = None
        return seconds


def _enough(found: Sequence[Sequence[float]]) -> bool:
    rounds = len(found[0]) - WARM_UP
    return rounds >= ROUNDS[1] or (rounds >= ROUNDS[0] and sum(map(sum, found)) > ENOUGH * len(found))


def _stand_in(model: nn.Module) -> nn.Module:
    """A module with tensors of the same names, and nothing else."""
    parameters = {name: nn.Parameter(each.detach(), each.requires_grad) for name, each in model.named_parameters()}
    return module_with(parameters | {name: each.detach().clone() for name, each in model.named_buffers()}, "Trial")


def _fill(name: str, tensor: torch.Tensor) -> None:
    """Small random numbers; integers are 0, which indexes anything."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.copy_(torch.empty(tensor.shape, device=tensor.device).uniform_(-0.05, 0.05))
    else:
        tensor.zero_()
