"""What holds of a stage's joint graph: roles, gradients, random numbers, recomputed operations."""

from collections.abc import Iterator
from typing import Any

from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.split.joint_graph import Joint
from zbcompile.passes.split.split import forward_nodes
from zbcompile.passes.verification.graph_rules import form_of
from zbcompile.passes.verification.rule import Break, rule


def _title(joint: Joint) -> str:
    return f"the joint graph of stage {joint.stage.index}"


@rule("a joint graph reads and returns what its stage does, before tangents and gradients")
def stage_inside(made: Joint, before: Any) -> Iterator[Break]:
    own = tuple(slot for slot, _ in made.inputs if slot.kind != "tangent")
    if own != made.stage.inputs:
        yield _differing("reads", set(own), set(made.stage.inputs), made)
    returned = tuple(slot for slot, _ in made.outputs)[: len(made.stage.outputs)]
    if returned != made.stage.outputs:
        yield _differing("returns", set(returned), set(made.stage.outputs), made)


def _differing(verb: str, found: set[Any], wanted: set[Any], joint: Joint) -> Break:
    names = ", ".join(sorted(map(str, found ^ wanted))) or "the same in a different order"
    return Break(f"{verb} other values than its stage: {names}", None, _title(joint))


@rule("inputs and results that a joint graph lists are its graph's own")
def joint_listed(made: Joint, before: Any) -> Iterator[Break]:
    holders = made.module.graph.find_nodes(op="placeholder")
    returned = set(made.module.graph.output_node().all_input_nodes)
    for (slot, node), holder in zip(made.inputs, holders, strict=False):
        if node is not holder:
            yield Break(f"is listed as {slot}, but {slot} is {holder.name}", node, _title(made))
    for slot, node in made.outputs:
        if node not in returned:
            yield Break(f"is listed as {slot} but not returned", node, _title(made))


@rule("a gradient has the shape of what it is the gradient of, and that of an activation its dtype")
def gradients_fit(made: Joint, before: Any) -> Iterator[Break]:
    wanted = {("gradient", slot.name): node for slot, node in made.inputs if slot.kind == "parameter"}
    wanted |= {("input_gradient", slot.name): node for slot, node in made.inputs if slot.kind == "activation"}
    for slot, node in made.outputs:
        if slot.kind not in ("gradient", "input_gradient"):
            continue
        of = wanted.get((slot.kind, slot.name))
        if of is None:
            yield Break(f"is the {slot}, which this stage does not read", node, _title(made))
            continue
        forms = form_of(node.meta["val"]), form_of(of.meta["val"])
        same = node.meta["val"].shape == of.meta["val"].shape
        if not same or (slot.kind == "input_gradient" and forms[0] != forms[1]):
            yield Break(f"has the form {forms[0]}, but {slot.name} has {forms[1]}", node, _title(made))


@rule("what a stage returns depends on no gradient, and on nothing that is recomputed for the backward")
def forward_alone(made: Joint, before: Any) -> Iterator[Break]:
    tangents = {node for slot, node in made.inputs if slot.kind == "tangent"}
    for node in forward_nodes(made):
        read = tangents.intersection(node.all_input_nodes)
        if read:
            yield Break(f"is in the forward and reads the tangent {min(n.name for n in read)}", node, _title(made))
        if "recomputed" in node.meta:
            yield Break("is recomputed, and the forward reads it", node, _title(made))


@rule("rewriting a joint graph neither adds nor drops a draw of random numbers, nor changes their order")
def draws_unchanged(made: Joint, before: Joint) -> Iterator[Break]:
    wanted, drawn = ([n for n in joint.module.graph.nodes if is_random(n)] for joint in (before, made))
    targets = [node.target for node in wanted]
    if [node.target for node in drawn] == targets:
        return
    new = [node for node in drawn if len([n for n in drawn if n.target is node.target]) > targets.count(node.target)]
    what = "draws random numbers more often than before" if new else "draws different random numbers than before"
    yield Break(what, new[-1] if new else None, _title(made))
