"""The layout that `schedule="auto"` decides on, alike on all ranks: by prediction and, among those that come close, by
trial steps.

Passes that are timed one by one say little about caches that the rest of the step empties, about links that are slow
while both ends compute, and about the loop between the passes. A few whole steps say it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from statistics import median

import torch
from torch import nn

from zbcompile.batches.batch import Microbatch
from zbcompile.compiler.compile_model import LaidOut, targets_of, whole_of
from zbcompile.compiler.paired_schedule import in_order
from zbcompile.distributed.agreement import agreed_seconds, from_first, gathered, together
from zbcompile.distributed.link_speed import measure_link
from zbcompile.distributed.ranks import Ranks
from zbcompile.model.model_info import module_with
from zbcompile.model.seeds import undisturbed
from zbcompile.options import PipelineOptions
from zbcompile.passes import gpu
from zbcompile.passes.errors import CaptureError, CompileError
from zbcompile.passes.machine.hardware import Connection
from zbcompile.planning import planner
from zbcompile.planning.choose_schedule import fit_to_count
from zbcompile.planning.planner import CLOSE, decide, order_by_graphs, pass_seconds, reordered
from zbcompile.program.choice import Choice
from zbcompile.program.program import Program
from zbcompile.program_cache.bound_programs import BoundPrograms
from zbcompile.program_cache.programs import Programs
from zbcompile.runtime.executable import Executable, StepInput, plan_step
from zbcompile.runtime.step_run import Engine
from zbcompile.schedules import Schedule, ScheduleError

LEAST, MOST = 3, 15  # trial steps of each order
ENOUGH = 2.0  # seconds for each order, after which the least will do


@dataclass(frozen=True, eq=False)
class LayoutTrials:
    """The search for a layout of `model`, for a batch whose part `microbatch` gives for any number of parts.
    `programs` captures the step of a microbatch, times the operations of a line, and compiles a choice."""

    model: nn.Module
    options: PipelineOptions
    programs: Programs
    microbatch: Callable[[int], Microbatch]
    _captured: dict[int, LaidOut] = field(default_factory=dict, init=False)
    _refused: dict[int, Exception] = field(default_factory=dict, init=False)

    def run(self, provisional: Schedule, counts: Sequence[int]) -> tuple[LaidOut, Program]:
        """The captured step and its compiled program, for one of `counts` microbatches or for as many as `provisional`
        has. Raises CaptureError if the step cannot be captured, ScheduleError if no layout fits once it is compiled."""
        line, found = self._laid_out(provisional, counts)
        chosen = self._compiled(line, found)
        if self._refused:
            least = min(self._refused)
            why = str(self._refused[least]).removesuffix(".")
            self._say(f"auto does not split this batch into {least} microbatches, or more: {why}")
        assert chosen.plan is not None
        return self._step_of(chosen.plan), chosen

    @property
    def _ranks(self) -> Ranks:
        return self.programs.ranks

    def _find(self, count: int) -> LaidOut | None:
        """The step as it is captured for one of that many microbatches. The model may refuse small ones: a batch norm
        needs two rows. None if every rank raises CaptureError, so that no rank takes that number; raises what capturing
        raises if only some do, or if it fails in another way."""
        if count not in self._captured and count not in self._refused:
            try:
                self._captured[count] = self.programs.laid_out(self.microbatch(count), leads=True)
            except Exception as error:  # what is known to all is raised on all, but need not be a CaptureError on all
                if error is not self._ranks.watch.known or not all(
                    gathered(self._ranks, isinstance(error, CaptureError))
                ):
                    raise
                self._refused[count] = error
        return self._captured.get(count)

    def _step_of(self, choice: Choice) -> LaidOut:
        laid_out = self._captured[choice.layout.microbatches]
        return whole_of(laid_out) if choice.layout.vocab == "off" else laid_out

    def _laid_out(self, schedule: Schedule, counts: Sequence[int]) -> tuple[LaidOut, list[Choice]]:
        """The captured step that the fastest layout is for, and the layouts, the fastest first. The search begins with
        the usual number of microbatches or, if the model refuses those, with the smallest. It begins anew without the
        numbers that are refused, and for a step that takes other operations with other rows."""
        usual = schedule.microbatches
        if (line := self._find(usual)) is None:
            counts = [count for count in counts if count < usual]
            least = min(counts, default=usual)
            if (line := self._find(least)) is None:
                raise self._ranks.watch.known_to_all(self._refused[usual])
            schedule = fit_to_count(schedule, self.options, least)
        found = self._decided(line, schedule, counts)
        while not self._is_for(line, found[0]):
            if (best := self._find(found[0].layout.microbatches)) is None:
                counts = [count for count in counts if count < found[0].layout.microbatches]
            else:
                line, schedule, counts = best, found[0].order, ()
            found = self._decided(line, schedule, counts)
        return line, found

    def _decided(self, laid_out: LaidOut, schedule: Schedule, counts: Sequence[int]) -> list[Choice]:
        """The first rank decides for all."""
        settings = self.options.choices, counts, self.options.chunks, planner.SEARCH_SECONDS, self._link
        search = partial(decide, laid_out, schedule, *settings)
        return from_first(self._ranks, "searching the layout", search)

    @cached_property
    def _tries(self) -> bool:
        """Whether steps run here as they will later: in one process ranks take turns."""
        return self._ranks.group is not None and self._ranks.count > 1 and self.options.hardware is None

    @cached_property
    def _room(self) -> float:
        """Bytes that every rank has; without a limit of memory it was never checked whether a layout fits."""
        if not gpu.is_gpu(self._ranks.device):
            return float("inf")
        return float(min(gathered(self._ranks, gpu.free_memory(self._ranks.device))))

    @cached_property
    def _link(self) -> Connection | None:
        """What connects the first two ranks of a pipeline on CPUs, as they measure it."""
        group, ranks = self._ranks.group, self._ranks
        if group is None or ranks.count < 2 or ranks.device.type != "cpu":
            return None
        with ranks.watch.position.waiting("measuring the messages"):
            return Connection(*gathered(ranks, measure_link(group, ranks.device))[0])

    def _compiled(self, line: LaidOut, found: Sequence[Choice]) -> Program:
        """The fastest layout that has an order for its graphs or, where steps are tried, the one whose steps are
        fastest of all that come close to it: each in the order found for it, then the best in other orders, too."""
        fits = [c for c in found if c is found[0] or not self._tries or max(c.peak) <= self._room]
        close = [c for c in fits if self._tries and c.seconds <= CLOSE * found[0].seconds] or fits[:1]
        close = [choice for choice in close if self._is_for(line, choice)]
        slower = (choice for choice in fits if choice not in close and self._is_for(line, choice))
        began, tried, failed = time.monotonic(), list[Choice](), None
        for number, choice in enumerate(chain(close, slower)):
            if tried and number >= len(close):
                break
            if tried and not self._is_time_for_another(began, len(tried)):
                self._say(f"the search leaves no time to try {len(close) - number} more of the best layouts")
                break
            try:
                program, orders = self._ordered(choice, len(close))
                tried += self._timed(program, orders[:1])
            except CompileError:
                if not tried:
                    raise
            except ScheduleError as error:  # the graphs hold more than was estimated
                failed = failed or error
            else:
                if tried[-1] is min(tried, key=_seconds):
                    best = program, orders
        if failed is not None and not tried:
            raise failed
        program, orders = best
        chosen = min(tried, key=_seconds)
        if self._tries and len(orders) > 1 and self._is_time_for_another(began, len(tried)):
            again = self._timed(program, orders)
            tried = [*(choice for choice in tried if choice is not chosen), *again]
            chosen = min(again, key=_seconds)
        others = sorted((choice for choice in tried if choice is not chosen), key=_seconds)
        return reordered(program, replace(chosen, tried=tuple(t for each in (chosen, *others) for t in each.tried)))

    def _is_time_for_another(self, began: float, count: int) -> bool:
        """Whether a trial that takes as long as `count` others did on average ends within `SEARCH_SECONDS`. The first
        rank's time counts."""
        seconds = (time.monotonic() - began) * (1 + 1 / count)
        return gathered(self._ranks, seconds <= planner.SEARCH_SECONDS)[0]

    def _is_for(self, line: LaidOut, choice: Choice) -> bool:
        """Whether the step can be cut where the choice says; with other rows it may take other operations."""
        found = self._find(choice.layout.microbatches)
        return found is line or (found is not None and targets_of(found.line) == targets_of(line.line))

    def _ordered(self, choice: Choice, of: int) -> tuple[Program, list[Choice]]:
        """The choice compiled, in the order that is best for its graphs as all ranks measure them, and in others close
        to it; the first rank searches, in its part of the time. Raises ScheduleError, on every rank, if none fits."""
        layout, ranks = choice.layout, self._ranks
        task = self.microbatch(layout.microbatches), self._step_of(choice), choice.order
        program = self.programs.make(*task, layout.within(self.options.choices), layout.edges)
        measured = agreed_seconds(ranks, together(ranks, "measuring", lambda: pass_seconds(program)))

        def search() -> list[Choice] | ScheduleError:
            try:
                return order_by_graphs(program, choice, planner.SEARCH_SECONDS / of, measured, self._link)
            except ScheduleError as error:  # no order fits: every rank is to raise the same
                return error

        orders = from_first(ranks, "searching the order", search)
        if isinstance(orders, ScheduleError):
            raise ranks.watch.known_to_all(orders)
        return program, orders

    def _timed(self, program: Program, orders: Sequence[Choice]) -> list[Choice]:
        """The orders with what steps in them take or, where none are tried, as they are."""
        if not self._tries:
            return list(orders)
        with self._ranks.watch.position.turn_to(f"steps on trial: {'; '.join(each.way for each in orders)}"):
            task = self.microbatch(program.schedule.microbatches), self.model, self.options, self._ranks
            found = step_times(program, [each.order for each in orders], *task)
        for choice, (middle, least, most) in zip(orders, found, strict=True):
            self._say(f"on trial a step takes {middle:.4g} s ({least:.4g} to {most:.4g} s): {choice.way}")
        return [replace(each, tried=((each.way, *times),)) for each, times in zip(orders, found, strict=True)]

    def _say(self, text: str) -> None:
        if self._ranks.is_first:
            print(f"zbcompile: {text}.")


def _seconds(choice: Choice) -> float:
    """The median of its trial steps."""
    return choice.tried[0][1] if choice.tried else 0.0


def step_times(
    program: Program,
    orders: Sequence[Schedule],
    microbatch: Microbatch,
    model: nn.Module,
    options: PipelineOptions,
    ranks: Ranks,
) -> list[tuple[float, float, float]]:
    """Seconds of some steps of the program in each of the orders, which take turns: their median, the shortest and the
    longest. Every rank gets the same: a step ends when the slowest rank has ended it.

    The model is only read: the steps share its parameters, copy its buffers, and fill with random numbers what is on
    the meta device. All microbatches are equal.
    """
    count = program.schedule.microbatches
    given = StepInput([microbatch.tensors] * count, 0, options.seed, options.loss_reduction)
    with undisturbed(ranks.device):
        bound = BoundPrograms(_stand_in(model), replace(options, init=_fill, debug_nan=False), ranks)
        bound.hold(program)
        graphs = [bound.prepare_step(program)] * count
    engine = Engine(ranks)

    def step(run: Executable) -> float:
        gathered(ranks, None)  # all begin together
        began = time.perf_counter()
        with undisturbed(ranks.device), torch.autocast(ranks.device.type, enabled=False):
            engine.run(run, given, bound.parameters).losses.read()
        gpu.synchronize(ranks.device)
        seconds = max(gathered(ranks, time.perf_counter() - began))
        ranks.replicas.forget()
        for parameter in bound.parameters.values():
            parameter.grad = None
        return seconds

    runs = [plan_step(graphs, graphs, in_order(program, each).lowered, ranks.local) for each in orders]
    found: list[list[float]] = [[step(run)][1:] for run in runs]  # which only warm up
    while len(found[0]) < LEAST or (len(found[0]) < MOST and sum(map(sum, found)) <= ENOUGH * len(runs)):
        for run, times in zip(runs, found, strict=True):
            times.append(step(run))
    return [(median(times), min(times), max(times)) for times in found]


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
