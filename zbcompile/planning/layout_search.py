"""The layout that `schedule="auto"` decides on, alike on all ranks: by prediction and, among those that come close, by
steps on trial."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter

from torch import nn

from zbcompile.compiler.compile_model import Drawn, targets_of, whole_of
from zbcompile.distributed.agreement import agreed_seconds, from_first, gathered, together
from zbcompile.distributed.link_speed import measure_link
from zbcompile.distributed.ranks import Ranks
from zbcompile.model.batch import Microbatch
from zbcompile.options import Options
from zbcompile.passes import gpu
from zbcompile.passes.errors import CaptureError, CompileError
from zbcompile.passes.hardware.hardware import Connection
from zbcompile.planning.choose_schedule import fit_to_count
from zbcompile.planning.planner import CLOSE, Decision, decide, order_by_graphs, pass_seconds, reordered
from zbcompile.planning.trial_steps import StepTimes, Trial
from zbcompile.program.chosen_plan import ChosenPlan
from zbcompile.program.program import Program
from zbcompile.schedules import Schedule, ScheduleError


@dataclass(frozen=True)
class Finalist:
    """A layout with the step that it is for, captured for one of its microbatches; and, once it is compiled, the
    program in the order that was found for it."""

    decision: Decision
    microbatch: Microbatch
    drawn: Drawn
    program: Program | None = None


@dataclass(frozen=True, eq=False)
class LayoutSearch:
    """The search for a layout of `model`. `draw` captures the step of a microbatch, `measure` times the operations of a
    line, `make` compiles a finalist."""

    model: nn.Module
    options: Options
    ranks: Ranks
    draw: Callable[[Microbatch], Drawn]
    measure: Callable[[Drawn], dict[str, float]]
    make: Callable[..., Program]

    def run(self, microbatch: Callable[[int], Microbatch], provisional: Schedule, counts: Sequence[int]) -> Finalist:
        """The layout for a batch whose part `microbatch` gives for any of `counts`, and for the number that
        `provisional` has. Raises CaptureError if the step cannot be captured."""
        steps = CapturedSteps(self.draw, microbatch, self.ranks)
        line, found = self._laid_out(steps, provisional, counts)
        failed: ScheduleError | None = None
        for some in self._in_turn(found):
            lines = [(d, steps.find(d.schedule.microbatches)) for d in some]
            alike = [(d, one) for d, one in lines if one is not None and _are_alike(one, line)]
            finalists = [Finalist(d, microbatch(d.schedule.microbatches), _of(d, one)) for d, one in alike]
            try:
                if finalists:
                    chosen = self._on_trial(finalists) if self._tries else self._by_prediction(finalists[0])
                    break
            except ScheduleError as error:  # the graphs hold more than was estimated: on to what is slower
                failed = failed or error
        else:
            assert failed is not None, "the first layout is like itself"
            raise failed
        if steps.refused:
            least = min(steps.refused)
            why = str(steps.refused[least]).removesuffix(".")
            self._say(f"auto does not split this batch into {least} microbatches, or more: {why}")
        return chosen

    def _laid_out(
        self, steps: "CapturedSteps", provisional: Schedule, counts: Sequence[int]
    ) -> tuple[Drawn, list[Decision]]:
        """The captured step that the fastest layout is for, and the layouts, the fastest first."""
        provisional, begun, counts = self._begun(steps, provisional, counts)
        found = self._decided(begun, provisional, counts)
        while (line := steps.find(found[0].schedule.microbatches)) is None:
            counts = [count for count in counts if count < found[0].schedule.microbatches]
            found = self._decided(begun, provisional, counts)
        if not _are_alike(line, begun):  # other rows, other operations
            found = self._decided(line, found[0].schedule, ())
        return line, found

    def _begun(
        self, steps: "CapturedSteps", provisional: Schedule, counts: Sequence[int]
    ) -> tuple[Schedule, Drawn, Sequence[int]]:
        """The number of microbatches to begin with (the usual one or, if the model refuses its microbatches, the
        smallest), its captured step, and the numbers that may be chosen beside it."""
        usual = provisional.microbatches
        if (drawn := steps.find(usual)) is not None:
            return provisional, drawn, counts
        fewer = [count for count in counts if count < usual]
        least = min(fewer, default=usual)
        if (drawn := steps.find(least)) is None:
            raise self.ranks.watch.known_to_all(steps.refused[usual])
        return fit_to_count(provisional, self.options, least), drawn, fewer

    def _in_turn(self, found: Sequence[Decision]) -> list[list[Decision]]:
        """The fastest by prediction, if steps can be tried here with those that come close to it; then each other."""
        fits = [d for d in found if not self._tries or d is found[0] or max(d.peak) <= self._room]
        close = [d for d in fits if self._tries and d.seconds <= CLOSE * found[0].seconds] or fits[:1]
        return [close, *([d] for d in fits if d not in close)]

    def _by_prediction(self, finalist: Finalist) -> Finalist:
        return replace(finalist, program=self._compiled(finalist, 1)[0])

    def _decided(self, drawn: Drawn, schedule: Schedule, counts: Sequence[int]) -> list[Decision]:
        """The first rank decides for all."""
        options, whole = self.options, whole_of(drawn)
        settings = counts, options.chunks, options.search_seconds, self.measure(whole), self._link
        return from_first(
            *(self.ranks, "searching the layout"), lambda: decide(drawn, schedule, options.choices, *settings)
        )

    @cached_property
    def _tries(self) -> bool:
        """Whether steps run here as they will later: in one process ranks take turns."""
        return self.ranks.group is not None and self.ranks.count > 1 and self.options.hardware is None

    @cached_property
    def _room(self) -> float:
        """Bytes that every rank has; without a limit of memory nobody has asked whether a layout fits."""
        if not gpu.is_gpu(self.ranks.device):
            return float("inf")
        return float(min(gathered(self.ranks, gpu.free_memory(self.ranks.device))))

    @cached_property
    def _link(self) -> Connection | None:
        """What connects the first two ranks of a pipeline on CPUs, as they measure it."""
        group, ranks = self.ranks.group, self.ranks
        if group is None or ranks.count < 2 or ranks.device.type != "cpu":
            return None
        with ranks.watch.position.waiting("measuring the messages"):
            return Connection(*gathered(ranks, measure_link(group, ranks.device))[0])

    def _compiled(self, finalist: Finalist, of: int) -> list[Program]:
        """In the order that is best for its graphs, as all ranks measure them at once, and in others that come close;
        the first rank searches, in its part of the time. Raises ScheduleError, on every rank, if none fits."""
        decided = finalist.decision
        made = self.make(finalist.microbatch, finalist.drawn, decided.schedule, decided.choices, decided.edges)
        ranks, program = self.ranks, made
        measured = agreed_seconds(ranks, together(ranks, "measuring", lambda: pass_seconds(program)))
        task = program, finalist.decision, self.options.search_seconds / of, measured, self._link

        def search() -> list[tuple[Schedule, ChosenPlan]] | ScheduleError:
            try:
                return order_by_graphs(*task)
            except ScheduleError as error:  # no order fits: every rank is to raise the same
                return error

        orders = from_first(ranks, "searching the order", search)
        if isinstance(orders, ScheduleError):
            raise ranks.watch.known_to_all(orders)
        return [reordered(program, *order) for order in orders]

    def _on_trial(self, finalists: Sequence[Finalist]) -> Finalist:
        """The fastest by steps on trial: the layouts, each in the order found for it, then the best of them in that and
        other orders."""
        clock, tried = Clock(self.ranks, self.options.search_seconds), list[Tried]()
        for number, finalist in enumerate(finalists):
            if tried and not clock.allows_another():
                self._say(f"search_seconds leaves no time to try {len(finalists) - number} more of the best layouts")
                break
            last = number == len(finalists) - 1 and not tried
            with suppress(*(CompileError,) * bool(tried), *(ScheduleError,) * (not last)):  # more than was estimated
                orders = self._compiled(finalist, len(finalists))
                trial = Trial(orders[0], finalist.microbatch, self.model, self.options, self.ranks)
                tried += self._tried(trial, orders[:1])
                if tried[-1] is min(tried, key=SECONDS):
                    best = finalist, trial, orders
        finalist, trial, orders = best
        if len(orders) > 1 and clock.allows_another():
            tried = [*(each for each in tried if each.program is not orders[0]), *self._tried(trial, orders)]
            return replace(finalist, program=_fastest(tried, among=orders))
        return replace(finalist, program=_fastest(tried, among=orders[:1]))

    def _tried(self, trial: Trial, orders: Sequence[Program]) -> "list[Tried]":
        """Steps in several orders of the same graphs."""
        ways = [order.plan.way for order in orders if order.plan]
        with self.ranks.watch.position.turn_to(f"steps on trial: {'; '.join(ways)}"):
            found = trial.times(orders)
        for way, times in zip(ways, found, strict=True):
            self._say(f"on trial a step takes {times}: {way}")
        return [Tried(*each) for each in zip(found, orders, strict=True)]

    def _say(self, text: str) -> None:
        if self.ranks.is_first:
            print(f"zbcompile: {text}.")


@dataclass(frozen=True, eq=False)
class CapturedSteps:
    """The step as `draw` captures it for a `microbatch` of a batch that is split into so many. The model may refuse
    small ones: a batch norm needs two rows. Then no rank takes that number."""

    draw: Callable[[Microbatch], Drawn]
    microbatch: Callable[[int], Microbatch]
    ranks: Ranks
    drawn: dict[int, Drawn] = field(default_factory=dict)
    refused: dict[int, Exception] = field(default_factory=dict)

    def find(self, count: int) -> Drawn | None:
        """None if every rank raises CaptureError. Raises what `draw` raises if only some do, or if it fails in another
        way."""
        if count not in self.drawn and count not in self.refused:
            try:
                self.drawn[count] = self.draw(self.microbatch(count))
            except Exception as error:  # what is known to all is raised on all, but need not be a CaptureError on all
                if error is not self.ranks.watch.known or not all(
                    gathered(self.ranks, isinstance(error, CaptureError))
                ):
                    raise
                self.refused[count] = error
        return self.drawn.get(count)


@dataclass(frozen=True, eq=False)
class Tried:
    """A program and how long its steps took."""

    times: StepTimes
    program: Program


SECONDS = attrgetter("times.median")


@dataclass
class Clock:
    """Allows trials as long as the next one, if it takes as long as the last, ends within `limit` seconds. The first
    rank's time counts."""

    ranks: Ranks
    limit: float
    began: float = field(default_factory=time.monotonic)
    mark: float = field(default_factory=time.monotonic)

    def allows_another(self) -> bool:
        """To be asked after every trial."""
        last, self.mark = self.mark, time.monotonic()
        return gathered(self.ranks, self.mark - self.began + self.mark - last <= self.limit)[0]


def _fastest(tried: Sequence[Tried], among: Sequence[Program]) -> Program:
    """The program of `among` whose steps took least; its plan says what all others took."""
    best = min((each for each in tried if any(each.program is one for one in among)), key=SECONDS)
    ranked = [best, *sorted((each for each in tried if each is not best), key=SECONDS)]
    times = tuple((each.program.plan.way, *each.times) for each in ranked if each.program.plan)
    plan = best.program.plan
    return replace(best.program, plan=plan and replace(plan, tried=times))


def _of(decision: Decision, drawn: Drawn) -> Drawn:
    return whole_of(drawn) if decision.choices.vocab == "off" else drawn


def _are_alike(one: Drawn, other: Drawn) -> bool:
    """Whether the steps can be cut at the same places."""
    return one is other or targets_of(one.line) == targets_of(other.line)
