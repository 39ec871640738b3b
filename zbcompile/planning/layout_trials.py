"""The layout that `schedule="auto"` decides on, alike on all ranks: by prediction and, among those that come close, by
trial steps."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import nn

from zbcompile.batches.batch import Microbatch
from zbcompile.compiler.compile_model import LaidOut, targets_of, whole_of
from zbcompile.distributed.agreement import agreed_seconds, from_first, gathered, together
from zbcompile.distributed.link_speed import measure_link
from zbcompile.distributed.ranks import Ranks
from zbcompile.options import Options
from zbcompile.passes import gpu
from zbcompile.passes.errors import CaptureError, CompileError
from zbcompile.passes.machine.hardware import Connection
from zbcompile.planning.choose_schedule import fit_to_count
from zbcompile.planning.planner import CLOSE, decide, order_by_graphs, pass_seconds, reordered
from zbcompile.planning.trial_steps import TrialProgram
from zbcompile.program.choice import Choice
from zbcompile.program.program import Program
from zbcompile.schedules import Schedule, ScheduleError


@dataclass(frozen=True, eq=False)
class LayoutTrials:
    """The search for a layout of `model`, for a batch whose part `microbatch` gives for any number of parts. `lay_out`
    captures the step of a microbatch, `measure` times the operations of a line, `make` compiles a choice."""

    model: nn.Module
    options: Options
    ranks: Ranks
    lay_out: Callable[[Microbatch], LaidOut]
    measure: Callable[[LaidOut], dict[str, float]]
    make: Callable[..., Program]
    microbatch: Callable[[int], Microbatch]
    _captured: dict[int, LaidOut] = field(default_factory=dict, init=False)
    _refused: dict[int, Exception] = field(default_factory=dict, init=False)

    def run(self, provisional: Schedule, counts: Sequence[int]) -> tuple[LaidOut, Program]:
        """The captured step and its compiled program, for one of `counts` microbatches or for as many as `provisional`
        has. Raises CaptureError if the step cannot be captured, ScheduleError if no layout fits once it is compiled."""
        line, found = self._laid_out(provisional, counts)
        failed: ScheduleError | None = None
        for some in self._in_turn(found):
            alike = [choice for choice in some if _are_alike(self._find(choice.layout.microbatches), line)]
            try:
                if alike:
                    chosen = self._on_trial(alike) if self._tries else self._compiled(alike[0], 1)[0]
                    break
            except ScheduleError as error:  # the graphs hold more than was estimated: on to what is slower
                failed = failed or error
        else:
            assert failed is not None, "the first layout is like itself"
            raise failed
        if self._refused:
            least = min(self._refused)
            why = str(self._refused[least]).removesuffix(".")
            self._say(f"auto does not split this batch into {least} microbatches, or more: {why}")
        assert chosen.plan is not None
        return self._step_of(chosen.plan), chosen

    def _find(self, count: int) -> LaidOut | None:
        """The step as it is captured for one of that many microbatches. The model may refuse small ones: a batch norm
        needs two rows. None if every rank raises CaptureError, so that no rank takes that number; raises what `lay_out`
        raises if only some do, or if it fails in another way."""
        if count not in self._captured and count not in self._refused:
            try:
                self._captured[count] = self.lay_out(self.microbatch(count))
            except Exception as error:  # what is known to all is raised on all, but need not be a CaptureError on all
                if error is not self.ranks.watch.known or not all(
                    gathered(self.ranks, isinstance(error, CaptureError))
                ):
                    raise
                self._refused[count] = error
        return self._captured.get(count)

    def _step_of(self, choice: Choice) -> LaidOut:
        laid_out = self._captured[choice.layout.microbatches]
        return whole_of(laid_out) if choice.layout.vocab == "off" else laid_out

    def _laid_out(self, provisional: Schedule, counts: Sequence[int]) -> tuple[LaidOut, list[Choice]]:
        """The captured step that the fastest layout is for, and the layouts, the fastest first."""
        provisional, begun, counts = self._begun(provisional, counts)
        found = self._decided(begun, provisional, counts)
        while (line := self._find(found[0].layout.microbatches)) is None:
            counts = [count for count in counts if count < found[0].layout.microbatches]
            found = self._decided(begun, provisional, counts)
        if not _are_alike(line, begun):  # other rows, other operations
            found = self._decided(line, found[0].order, ())
        return line, found

    def _begun(self, provisional: Schedule, counts: Sequence[int]) -> tuple[Schedule, LaidOut, Sequence[int]]:
        """The number of microbatches to begin with (the usual one or, if the model refuses its microbatches, the
        smallest), its captured step, and the other numbers that may be chosen."""
        usual = provisional.microbatches
        if (laid_out := self._find(usual)) is not None:
            return provisional, laid_out, counts
        fewer = [count for count in counts if count < usual]
        least = min(fewer, default=usual)
        if (laid_out := self._find(least)) is None:
            raise self.ranks.watch.known_to_all(self._refused[usual])
        return fit_to_count(provisional, self.options, least), laid_out, fewer

    def _in_turn(self, found: Sequence[Choice]) -> list[list[Choice]]:
        """The fastest by prediction, if steps can be tried here with those that come close to it; then each other."""
        fits = [c for c in found if not self._tries or c is found[0] or max(c.peak) <= self._room]
        close = [c for c in fits if self._tries and c.seconds <= CLOSE * found[0].seconds] or fits[:1]
        return [close, *([c] for c in fits if c not in close)]

    def _decided(self, laid_out: LaidOut, schedule: Schedule, counts: Sequence[int]) -> list[Choice]:
        """The first rank decides for all."""
        options, whole = self.options, whole_of(laid_out)
        settings = counts, options.chunks, options.search_seconds, self.measure(whole), self._link
        search = partial(decide, laid_out, schedule, options.choices, *settings)
        return from_first(self.ranks, "searching the layout", search)

    @cached_property
    def _tries(self) -> bool:
        """Whether steps run here as they will later: in one process ranks take turns."""
        return self.ranks.group is not None and self.ranks.count > 1 and self.options.hardware is None

    @cached_property
    def _room(self) -> float:
        """Bytes that every rank has; without a limit of memory it was never checked whether a layout fits."""
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

    def _compiled(self, choice: Choice, of: int) -> list[Program]:
        """The choice compiled, in the order that is best for its graphs as all ranks measure them, and in others close
        to it; the first rank searches, in its part of the time. Raises ScheduleError, on every rank, if none fits."""
        layout, ranks = choice.layout, self.ranks
        task = self.microbatch(layout.microbatches), self._step_of(choice), choice.order
        program = self.make(*task, layout.within(self.options.choices), layout.edges)
        measured = agreed_seconds(ranks, together(ranks, "measuring", lambda: pass_seconds(program)))

        def search() -> list[Choice] | ScheduleError:
            try:
                return order_by_graphs(program, choice, self.options.search_seconds / of, measured, self._link)
            except ScheduleError as error:  # no order fits: every rank is to raise the same
                return error

        orders = from_first(ranks, "searching the order", search)
        if isinstance(orders, ScheduleError):
            raise ranks.watch.known_to_all(orders)
        return [reordered(program, each) for each in orders]

    def _on_trial(self, finalists: Sequence[Choice]) -> Program:
        """The fastest by trial steps: the layouts, each in the order found for it, then the best of them in that and
        other orders."""
        clock, tried = TrialTime(self.ranks, self.options.search_seconds), list[Program]()
        for number, choice in enumerate(finalists):
            if tried and not clock.allows_another():
                self._say(f"search_seconds leaves no time to try {len(finalists) - number} more of the best layouts")
                break
            try:
                orders = self._compiled(choice, len(finalists))
                microbatch = self.microbatch(choice.layout.microbatches)
                trial = TrialProgram(orders[0], microbatch, self.model, self.options, self.ranks)
                tried += self._timed(trial, orders[:1])
            except CompileError:
                if not tried:
                    raise
            except ScheduleError:  # it holds more than was estimated
                if number == len(finalists) - 1 and not tried:
                    raise
            else:
                if tried[-1] is min(tried, key=_seconds):
                    best = tried[-1], trial, orders
        among, trial, orders = [best[0]], *best[1:]
        if len(orders) > 1 and clock.allows_another():
            among = self._timed(trial, orders)
            tried = [*(each for each in tried if each is not best[0]), *among]
        chosen = min(among, key=_seconds)
        others = sorted((each for each in tried if each is not chosen), key=_seconds)
        plans = [each.plan for each in (chosen, *others) if each.plan is not None]
        return replace(chosen, plan=replace(plans[0], tried=tuple(each.tried[0] for each in plans)))

    def _timed(self, trial: TrialProgram, orders: Sequence[Program]) -> list[Program]:
        """Steps in several orders of the same graphs; the plan of each program says what they took."""
        plans = [order.plan for order in orders if order.plan is not None]
        with self.ranks.watch.position.turn_to(f"steps on trial: {'; '.join(plan.way for plan in plans)}"):
            found = trial.times(orders)
        for plan, times in zip(plans, found, strict=True):
            self._say(f"on trial a step takes {times}: {plan.way}")
        timed = [replace(plan, tried=((plan.way, *times),)) for plan, times in zip(plans, found, strict=True)]
        return [replace(order, plan=plan) for order, plan in zip(orders, timed, strict=True)]

    def _say(self, text: str) -> None:
        if self.ranks.is_first:
            print(f"zbcompile: {text}.")


@dataclass
class TrialTime:
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


def _seconds(program: Program) -> float:
    """The median of its trial steps."""
    return program.plan.tried[0][1] if program.plan else 0.0


def _are_alike(one: LaidOut | None, other: LaidOut) -> bool:
    """Whether the steps can be cut at the same places."""
    return one is other or (one is not None and targets_of(one.line) == targets_of(other.line))
