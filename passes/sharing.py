"""Parameters and buffers that several stages or model copies use: what cannot be kept as eager keeps it is refused."""

from torch.fx import Node

from zbcompile.passes.cutting import Stage
from zbcompile.passes.errors import CompileError


def refuse_inexact_sharing(stages: tuple[Stage, ...], trainable: frozenset[str]) -> None:
    """Raise CompileError where a stage would add two uses of a parameter before the uses of later stages are added.

    Eager adds the uses one at a time, the last use of the model first: (g3 + g2) + g1. A stage that holds the first two
    hands over g2 + g1, and the sum g3 + (g2 + g1) has other bits.
    """
    last = {name: stage.index for stage in stages for name in stage.named("parameter")}
    for stage in stages:
        for node in stage.module.graph.find_nodes(op="placeholder"):
            slot = node.meta["slot"]
            shared = slot.kind == "parameter" and slot.name in trainable and stage.index < last[slot.name]
            if shared and _uses(node) > 1:
                raise CompileError(
                    f"parameter {slot.name} is used {_uses(node)} times on stage {stage.index} and again on stage "
                    f"{last[slot.name]}; exact=True cannot keep the order in which eager adds these gradients. Use "
                    "exact=False (equal within 1e-6), or fewer stages."
                )


def refuse_shared_mutation(stages: tuple[Stage, ...]) -> None:
    """Raise CompileError for a buffer that one stage changes and another reads: the reader would see stale values."""
    for stage in stages:
        for changed in (slot.name for slot in stage.outputs if slot.kind == "mutation"):
            readers = [other.index for other in stages if changed in other.named("buffer") and other is not stage]
            if readers:
                raise CompileError(
                    f"buffer {changed} is changed on stage {stage.index} and read on stage {readers[0]}, which would "
                    "see stale values. Use fewer stages, so that both happen on one, or give the readers their own."
                )


def refuse_mutation_of_copies(stages: tuple[Stage, ...]) -> None:
    """Raise CompileError for a changed buffer under a schedule of two model copies: each copy would see half of it."""
    changed = [(slot.name, s.index) for s in stages for slot in s.outputs if slot.kind == "mutation"]
    if changed:
        name, stage = changed[0]
        raise CompileError(
            f"buffer {name} is changed by the forward of stage {stage}. This schedule keeps two copies of the model, "
            "each of which would change its own from half of the microbatches. Use dualpipe-v, which has the same "
            "overlap with one copy."
        )


def _uses(node: Node) -> int:
    """How often a parameter is read by something that a gradient flows through."""
    return sum(user.op == "call_function" and bool(user.meta.get("differentiable")) for user in node.users)
