"""Parameters that several stages use: where the order of eager's additions can be kept, and where not."""

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


def _uses(node: Node) -> int:
    """How often a parameter is read by something that a gradient flows through."""
    return sum(user.op == "call_function" and bool(user.meta.get("differentiable")) for user in node.users)
