"""Replicas take steps of as many microbatches, and compile together: what they are about to do is compared."""

from typing import Any

from zbcompile.distributed.agreement import equal_everywhere, gathered
from zbcompile.distributed.ranks import Ranks
from zbcompile.model.batch import Microbatches
from zbcompile.program_cache.step_outputs import KINDS, keyword


def require_equal_steps(ranks: Ranks, step: Microbatches, outputs: bool | str, change: str, may_compile: bool) -> None:
    """Raise PipelineError, on every rank, if replicas have other numbers of microbatches, or want other outputs, or, if
    any of them may have to compile, other shapes or another `change` of what forward reads in Python."""
    shapes, count, leader = step.shapes(), len(step.each), ranks.members[0]
    if equal_everywhere(ranks, count * len(KINDS) + KINDS.index(outputs), (shapes, change), may_compile):
        return
    passed: tuple[Any, ...] = (count, shapes, outputs, change)
    found = gathered(ranks, passed)
    *expected, own = found[0]
    for rank, (*other, there) in zip(ranks.members, found, strict=True):
        if other == expected and there != own:
            same = "nothing has changed"
            raise ranks.refusal(
                f"what forward reads in Python differs between ranks: on rank {leader} {own or same}, "
                f"on rank {rank} {there or same}. Change it on every rank."
            )
        if other != expected:
            first, here = (f"{n} microbatches of {of[0]}, {keyword(to)}" for n, of, to in (expected, other))
            raise ranks.refusal(
                f"rank {leader} passes {first}, rank {rank} {here}. Replicas take as many microbatches in every step, "
                "and compile together: pass batches of one size, and equal keywords."
            )
