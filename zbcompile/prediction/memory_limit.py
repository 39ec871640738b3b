"""`memory=`: the first way to recompute with which every rank holds less than the limit."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from zbcompile.model.model_info import module_of
from zbcompile.passes.compile_options import CompileOptions, Recompute
from zbcompile.passes.errors import PartitionError
from zbcompile.prediction.predict import predicted_costs
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.program.program import Program

POLICIES = ("hints", "selective", "full")


def policies_of(choices: CompileOptions) -> tuple[Recompute, ...]:
    """Returns the ways to recompute that may be tried, the one that takes least time first.
    `recompute=` other than its default is the only one, and so is the default without a limit."""
    return (
        POLICIES
        if choices.memory is not None and choices.recompute == "hints"
        else (choices.recompute,)
    )


def peak_bytes(program: Program) -> int:
    """Returns the most bytes that any rank holds in a step of the program."""
    model = module_of(program.model)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    memories = rank_memories(program, predicted_costs(program), tensors)
    return max(memory.peak for memory in memories)


def compile_within_memory(
    compile_: Callable[[CompileOptions], Program], choices: CompileOptions
) -> Program:
    """Returns the program of the first of `policies_of(choices)` whose ranks hold at most `memory=`
    bytes.

    Raises PartitionError if none does, with the bytes of the one that needs least.
    """
    if choices.memory is None:
        return compile_(choices)
    needed: dict[int, Program] = {}
    for policy in policies_of(choices):
        program = compile_(replace(choices, recompute=policy))
        if (peak := peak_bytes(program)) <= choices.memory:
            return program
        needed[peak] = program
    raise too_little_memory(choices.memory, needed)


def too_little_memory(limit: float, needed: Mapping[int, Program]) -> PartitionError:
    """Returns the error for programs that do not fit, by the bytes of their fullest ranks."""
    peak = min(needed)
    program, policy = needed[peak], needed[peak].choices.recompute
    return PartitionError(
        f"memory={limit:,.0f} bytes per rank is too small: under {program.schedule.name} with"
        f" recompute={policy!r} the fullest rank holds {peak:,.0f} bytes (parameters, gradients,"
        " optimizer state, activations and messages). Use more ranks, smaller microbatches, or a"
        " schedule that keeps fewer microbatches in flight."
    )
