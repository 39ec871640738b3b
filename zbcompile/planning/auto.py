"""`schedule="auto"`: the named schedule whose predicted step is the shortest."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from zbcompile.compiler.paired_schedule import in_order
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.errors import CompileError
from zbcompile.prediction.memory_limit import peak_bytes, policies_of, too_little_memory
from zbcompile.prediction.predict import hardware_of, predicted_costs
from zbcompile.program.program import Program
from zbcompile.schedules import Placement, Schedule, ScheduleError, build, names, simulate
from zbcompile.schedules.checking.schedule_rules import OWN_WEIGHT_ORDER

EQUAL = 1e-9  # relative difference of two steps that are as long
COMPARED = 5  # names in the summary
UNSURE = 0.05  # relative error of the ratio of two predicted steps
Compile = Callable[[Schedule, CompileOptions], Program]


@dataclass(frozen=True)
class NamedStep:
    """A program in the order of one named schedule, with its predicted seconds of a step and the
    bytes of activations on its fullest rank."""

    name: str
    seconds: float
    waiting: float
    program: Program


def compile_auto(
    compile_: Compile,
    choices: CompileOptions,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
) -> Program:
    """Returns the program of the named schedule with the shortest predicted step; of equally short
    ones the one that holds least.

    The model is compiled once for each placement of stages (`compile_`), and all names of a
    placement are simulated under the costs of its stages. Under `memory=` names that do not fit are
    left out; a placement is compiled again with more recomputation if none of its names fits.
    Raises CompileError if no name can be compiled, or fits.
    """
    steps, errors = list[NamedStep](), list[CompileError]()
    build_ = partial(build, ranks=ranks, microbatches=microbatches, chunks=chunks)
    for names_ in names_by_placement(build_).values():
        try:
            steps += _candidates(compile_, choices, names_, build_)
        except CompileError as error:
            errors.append(error)
    if not steps:
        raise errors[0]
    shortest = min(step.seconds for step in steps)
    best = min(
        (step for step in steps if step.seconds <= shortest * (1 + EQUAL)),
        key=lambda step: step.waiting,
    )
    slower = sorted(
        (step for step in steps if step.name != best.name), key=lambda step: step.seconds
    )
    return replace(best.program, plan=_summary(best, slower))


def names_by_placement(build_: Callable[..., Schedule]) -> dict[Placement, list[str]]:
    """Returns the names that the counts admit, by placement. Names that hold two copies of the
    model, or sum weight gradients in another order than that of the microbatches, are left out:
    they change memory and bits.
    """
    by_placement: dict[Placement, list[str]] = defaultdict(list)
    for name in names():
        if name == "auto" or name in OWN_WEIGHT_ORDER:
            continue
        with suppress(ScheduleError):
            placement = build_(name).placement
            if placement.copies == 1:
                by_placement[placement].append(name)
    return by_placement


def _candidates(
    compile_: Compile, choices: CompileOptions, names_: list[str], build_: Callable[..., Schedule]
) -> list[NamedStep]:
    """Returns the names of one placement that fit. Raises PartitionError if none does."""
    steps, needed = list[NamedStep](), dict[int, Program]()
    for policy in policies_of(choices):
        program = compile_(build_(names_[0]), replace(choices, recompute=policy))
        costs = predicted_costs(program)
        for name in names_:
            ordered = in_order(program, build_(name, costs=costs))
            if choices.memory is not None and (peak := peak_bytes(ordered)) > choices.memory:
                needed[peak] = ordered
                continue
            timeline = simulate(ordered.schedule, costs)
            steps.append(
                NamedStep(name, float(timeline.makespan), max(timeline.peak_memory), ordered)
            )
        if steps:
            return steps
    assert choices.memory is not None
    raise too_little_memory(choices.memory, needed)


def _summary(best: NamedStep, slower: list[NamedStep]) -> str:
    """Returns what was chosen, what it was compared with, and how sure that is, in three lines."""
    shortest = best.seconds or 1.0
    compared = ", ".join(
        f"{step.name} {step.seconds / shortest - 1:+.1%}" for step in slower[:COMPARED]
    )
    more = f" and {len(slower) - COMPARED} slower names" if len(slower) > COMPARED else ""
    machine = hardware_of(best.program)
    return (
        f"auto: {best.name}, predicted step {best.seconds:.4g} s on {machine}\n"
        f"compared with {compared or 'no other name'}{more}\n"
        f"not measured: names within {UNSURE:.0%} may change places on the machine at hand; inspect"
        " --compare NAMES --costs measured runs their passes"
    )
