"""Changes that need other graphs - recomputation, a sharded output layer, other cuts - each compiled and predicted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zbcompile.compiler.compile_example import CompiledExample, compile_again
from zbcompile.compiler.paired_schedule import in_order
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import CompileError
from zbcompile.prediction.advice import Alternative, ImpossibleChange, Peak, front, judge
from zbcompile.prediction.predict import factors_of, predicted_costs
from zbcompile.program.program import Program
from zbcompile.schedules import Costs, Placement, Schedule, ScheduleError, Timeline, build, names, simulate

Announce = Callable[[str], None]
PeakOf = Callable[[Program | None], Peak]  # what the fullest rank holds of a program; of None: of the one at hand


@dataclass(frozen=True)
class Recompilation:
    """One compilation: `change` in words, `option` as it is written on the command line, the schedules to try on it."""

    change: str
    option: str
    schedules: tuple[Schedule, ...]
    choices: Choices


def run_trials(
    inspected: CompiledExample, costs: Costs, announce: Announce, peak_of: PeakOf, fused: bool = False
) -> tuple[tuple[Alternative, ...], tuple[ImpossibleChange, ...]]:
    """Compile and predict every change; `costs` are those of the program at hand, in seconds.

    Other graphs take as much longer than predicted from their operations (`fused`: see `seconds_of`) as those at hand
    do under `costs`. `announce` is told of each change before it is compiled, `peak_of` gives the memory.
    """
    now = inspected.program
    costs_of = _costs_like(costs, predicted_costs(now, fused), fused)
    found: list[Alternative] = []
    impossible: list[ImpossibleChange] = []
    before = simulate(now.schedule, costs)
    for trial in _trials(now):
        announce(f"trying {trial.option}")
        try:
            program = compile_again(inspected, trial.schedules[0], trial.choices)
        except (CompileError, ScheduleError) as error:
            reason = str(error).splitlines()[0].removeprefix("vocab=1: ").removesuffix(' Use vocab="off".')
            impossible.append(ImpossibleChange(trial.option, reason))
            continue
        found += _judged(trial, program, costs_of(program), before, peak_of)
    return tuple(found), tuple(impossible)


def _costs_like(costs: Costs, predicted: Costs, fused: bool) -> Callable[[Program], Costs]:
    """What makes the costs of other programs: those predicted from their operations, scaled as `costs` of the program
    at hand differ from `predicted`. Links are their own, unless messages of that program differ from the prediction."""
    factors = factors_of(costs, predicted)
    links = {name: getattr(costs, name) for name in ("comm", "bandwidth", "links")}
    links = {} if all(getattr(predicted, name) == value for name, value in links.items()) else links
    return lambda program: replace(predicted_costs(program, fused, factors), **links)


def _judged(
    trial: Recompilation, program: Program, costs: Costs, before: Timeline, peak_of: PeakOf
) -> list[Alternative]:
    """The schedules of a trial, all with the same stages, that no other one beats in both time and memory."""
    whole, now = peak_of(program), peak_of(None)(before)

    def judged(schedule: Schedule) -> Alternative:
        option = trial.option if len(trial.schedules) == 1 else f"--schedule {schedule.name}"
        then = simulate(in_order(program, schedule).schedule, costs)
        found = judge(trial.change, option, before, then)
        return replace(found, peak_ratio=whole(then) / now if now else 1.0)

    return front(map(judged, trial.schedules))


def _trials(program: Program) -> Iterator[Recompilation]:
    schedule, choices = program.schedule, program.choices
    here = (schedule,)
    if choices.recompute != "full":
        more = replace(choices, recompute="full")
        yield Recompilation("B recomputes everything of F", "--recompute full", here, more)
    if any(stage.recomputed for stage in program.stages):
        yield Recompilation("B recomputes nothing of F", "--recompute off", here, replace(choices, recompute="off"))
    if choices.vocab == "off" and not choices.exact:
        yield Recompilation("output layer sharded over all ranks", "--vocab 1", here, replace(choices, vocab=1))
    if choices.balance != "flops":
        yield Recompilation("cut into equal FLOPs", "--balance flops", here, replace(choices, balance="flops"))
    yield from _other_placements(schedule, choices)


def _other_placements(schedule: Schedule, choices: Choices) -> Iterator[Recompilation]:
    """The schedules that cut the model otherwise, by their stages. Of those with two copies of the model none."""
    by_placement: dict[Placement, list[Schedule]] = {}
    for name in names():
        try:
            other = build(name, schedule.ranks, schedule.microbatches)
        except ScheduleError:
            continue
        if other.placement not in (schedule.placement, Placement("dual", schedule.ranks)):
            by_placement.setdefault(other.placement, []).append(other)
    for placement, others in by_placement.items():
        cut = f"{placement.stages} stages, {_KINDS[placement.kind]}"
        given = choices if isinstance(choices.balance, str) else replace(choices, balance="flops")
        given = replace(given, recompute="hints") if isinstance(given.recompute, tuple) else given
        yield Recompilation(cut, f"schedules of {cut}", tuple(others), given)


_KINDS = {"linear": "one a rank", "looped": "in turn on the ranks", "v": "down the ranks and up again"}
