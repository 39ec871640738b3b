"""Collectives of a program that cost more than they must."""

from collections.abc import Iterator

from torch.fx import Node

from zbcompile.passes.graph.process_groups import is_wait
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.stage_program import collectives_of
from zbcompile.program.program import Program

KEEP_SUMS = "view reshape t transpose permute add _to_copy detach clone unsqueeze"


def needless(program: Program) -> list[str]:
    """Collectives of weight gradients, and sums of a microbatch that end in a weight gradient: the
    sum over ranks could follow the sum over microbatches."""
    all_of = [item for stage in program.stages for item in collectives_of(stage)]
    pieces = [piece for stage in program.stages for piece in stage.pieces.values()]
    in_w = [f"{item.kind} in W" for item in all_of if item.name == "W"]
    return in_w + [result for piece in pieces for result in _sums(piece)]


def _sums(piece: PassGraph) -> Iterator[str]:
    outputs = zip(piece.outputs, piece.module.graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
    results = [node for slot, node in outputs if slot.role == "weight_gradient"]
    for node in filter(is_wait, piece.module.graph.nodes):
        if "all_reduce" in str(node.args[0]) and _is_addend(node, results):  # type: ignore[arg-type]
            yield f"{node.name} in {piece.kind}"


def _is_addend(node: Node, results: list[Node]) -> bool:
    """Returns True if a value is added to weight gradients, and nothing else reads it."""
    return bool(node.users) and all(_adds(node, user, results) for user in node.users)


def _adds(node: Node, user: Node, results: list[Node]) -> bool:
    if user.op == "output":
        return node in results
    name = user.target.overloadpacket.__name__  # type: ignore[union-attr]
    if name == "add_":  # into an accumulator
        return user.args[0] is not node
    return name in KEEP_SUMS.split() and _is_addend(user, results)
