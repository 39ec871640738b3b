"""The checker between passes: a correct graph that is damaged in any of these ways is caught, and the message names the
pass, the operation with its line, and the rule."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed._functional_collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

import zbcompile
from tests.support.random_models import WIDTH, RandomModel
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.capture.export import Captured
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import VerificationError
from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.pass_list.passes_in_order import OVERLAP, PASSES
from zbcompile.passes.pass_list.run_passes import PassRun
from zbcompile.passes.split.simplify import copy_joint
from zbcompile.passes.stage.piece import Piece
from zbcompile.passes.stage.stage_program import finish_stage
from zbcompile.passes.torch_private import ASSERTIONS, LazyGraphModule
from zbcompile.passes.verification.graph_rules import collectives_waited
from zbcompile.passes.verification.model_rules import groups_named
from zbcompile.passes.verification.rule import verify
from zbcompile.schedules import build

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
RULES = {each.name: each.holds for each in PASSES}


class Net(nn.Module):
    """Three layers, so three stages; the first draws random numbers, the second changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8 + 2 * i) for i in range(2))
        self.norm = nn.BatchNorm1d(10)
        self.last = nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.layers[0](x)), 0.1)
        left, right = torch.tanh(self.layers[1](x)).split(5, 1)
        x = self.norm(torch.cat([right, left], 1))
        return self.last(torch.relu(x))


class Made(NamedTuple):
    """What a pass made, and what it was given."""

    made: Any
    before: Any


@pytest.fixture(scope="module")
def made() -> dict[tuple[str, int | None], Made]:
    """What every pass made of `Net`, by pass and stage."""
    found: dict[tuple[str, int | None], Made] = {}

    def note(ran: PassRun) -> None:
        found[ran.name, ran.stage] = Made(ran.made, ran.before)

    x = torch.randn(4, 8)
    example = zbcompile.Example(Net(), (x,), loss=F.mse_loss, target=x)
    choices = Choices(balance=("layers.1", "last"), recompute="selective")
    compile_example(example, build("zb-h1", 3, 6), choices, note)
    return found


def changed(owner: Any, change: Callable[[Graph], Any]) -> Any:
    """A copy of a piece, a stage or a canonical graph, its graph changed."""
    graph = Graph()
    graph.output(graph.graph_copy(owner.module.graph, {}))
    module = LazyGraphModule(owner.module, graph, class_name="Damaged")
    change(module.graph)
    return replace(owner, module=module)


def calls(graph: Graph, target: Any) -> Node:
    """The first operation that calls `target`."""
    return next(node for node in graph.nodes if node.target is target)


def call_after(graph: Graph, node: Node, target: Any, *args: Any) -> Node:
    with graph.inserting_after(node):
        new = graph.call_function(target, args)
    new.meta = {key: value for key, value in node.meta.items() if key != "slot"}
    return new


# Damages of the model's graph.


def forget_value(made: Any) -> Any:
    return changed(made, lambda graph: calls(graph, aten.tanh.default).meta.pop("val"))


def compute_for_nobody(made: Any) -> Any:
    def change(graph: Graph) -> None:
        tanh = calls(graph, aten.tanh.default)
        call_after(graph, tanh, aten.neg.default, tanh)

    return changed(made, change)


def write_in_place(made: Any) -> Any:
    def change(graph: Graph) -> None:
        calls(graph, aten.relu.default).target = aten.relu_.default

    return changed(made, change)


def check_a_shape(made: Any) -> Any:
    def change(graph: Graph) -> None:
        tanh = calls(graph, aten.tanh.default)
        call_after(graph, tanh, ASSERTIONS[0], tanh)

    return changed(made, change)


def read_too_early(made: Any) -> Any:
    def change(graph: Graph) -> None:
        relu = calls(graph, aten.relu.default)
        relu.args[0].append(call_after(graph, relu, aten.neg.default, relu))  # behind its argument's argument
        relu.args[0].prepend(relu)

    return changed(made, change)


def call_by_another_role(made: Any) -> Any:
    def change(graph: Graph) -> None:
        graph.find_nodes(op="placeholder")[0].meta["slot"] = Slot("buffer", "somewhere")

    return changed(made, change)


def give_a_role_twice(made: Any) -> Any:
    inputs = made.captured.inputs

    def change(graph: Graph) -> None:
        graph.find_nodes(op="placeholder")[1].meta["slot"] = inputs[0]

    twice = changed(made, change)
    return replace(twice, captured=replace(made.captured, inputs=(inputs[0], inputs[0], *inputs[2:])))


def lose_a_role(made: Any) -> Any:
    return replace(made, captured=replace(made.captured, outputs=made.captured.outputs[:-1]))


def take_an_input_for_a_buffer(made: Any) -> Any:
    place = next(i for i, slot in enumerate(made.captured.outputs) if slot.kind == "mutation")

    def change(graph: Graph) -> None:
        (results,) = graph.output_node().args
        graph.output_node().args = ((*results[:place], graph.find_nodes(op="placeholder")[0], *results[place + 1 :]),)

    return changed(made, change)


def refer_to_nothing(made: Any) -> Any:
    def change(graph: Graph) -> None:
        tanh = calls(graph, aten.tanh.default)
        with graph.inserting_before(tanh):
            tanh.replace_input_with(tanh.args[0], graph.create_node("get_attr", "missing"))

    return changed(made, change)


def take_another_part(made: Any) -> Any:
    def change(graph: Graph) -> None:
        split = calls(graph, aten.split.Tensor)
        split.meta["val"] = [split.meta["val"][0], split.meta["val"][1][:, :2]]

    return changed(made, change)


def forget_gradients(made: Any) -> Any:
    return changed(made, lambda graph: calls(graph, aten.relu.default).meta.pop("differentiable"))


# Damages of the stages.


def send_nothing(made: Any) -> Any:
    first, *rest = made

    def change(graph: Graph) -> None:
        graph.output_node().args = ((),)

    return (replace(changed(first, change), outputs=()), *rest)


def receive_another_shape(made: Any) -> Any:
    def change(graph: Graph) -> None:
        node = next(n for n in graph.find_nodes(op="placeholder") if n.meta["slot"].kind == "activation")
        node.meta["val"] = node.meta["val"][:1]

    first, second, third = made
    return first, changed(second, change), third


def draw_on_another_stage(made: Any) -> Any:
    draw = next(filter(is_random, made[0].module.graph.nodes))

    def change(graph: Graph) -> None:
        node = calls(graph, aten.relu.default)
        again = call_after(graph, node, draw.target, node, *draw.args[1:])
        node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)

    return made[0], changed(made[1], change), made[2]


def lose_a_changed_buffer(made: Any) -> Any:
    place = next(i for i, slot in enumerate(made[1].outputs) if slot.kind == "mutation")

    def change(graph: Graph) -> None:
        (results,) = graph.output_node().args
        graph.output_node().args = ((*results[:place], *results[place + 1 :]),)

    outputs = made[1].outputs[:place] + made[1].outputs[place + 1 :]
    return made[0], replace(changed(made[1], change), outputs=outputs), made[2]


# Damages of joint graphs.


def exchange_gradients(made: Any) -> Any:
    places = [i for i, (slot, _) in enumerate(made.outputs) if slot.kind == "gradient"]
    outputs = list(made.outputs)
    one, other = places[:2]
    outputs[one], outputs[other] = (outputs[one][0], outputs[other][1]), (outputs[other][0], outputs[one][1])
    return replace(made, outputs=tuple(outputs))


def read_a_gradient_in_the_forward(made: Any) -> Any:
    made = copy_joint(made)
    tangent = next(node for slot, node in made.inputs if slot.kind == "tangent")
    forward = calls(made.module.graph, aten.tanh.default)
    forward.args = (tangent,)
    return made


def return_what_is_recomputed(made: Any) -> Any:
    made = copy_joint(made)
    calls(made.module.graph, aten.tanh.default).meta["recomputed"] = True
    return made


def draw_again(made: Any) -> Any:
    made = copy_joint(made)
    draw = next(filter(is_random, made.module.graph.nodes))
    call_after(made.module.graph, draw, draw.target, *draw.args)
    return made


def list_another_result(made: Any) -> Any:
    (slot, _), *rest = made.outputs
    return replace(made, outputs=((slot, calls(made.module.graph, aten.t.default)), *rest))


# Damages of F, B, W and BW.


def compute_twice(made: Any) -> Any:
    """The first operation of F, in W as well."""
    source = next(node for node in made.forward.module.graph.nodes if node.op == "call_function")

    def change(graph: Graph) -> None:
        with graph.inserting_before(next(node for node in graph.nodes if node.op == "call_function")):
            holder = graph.find_nodes(op="placeholder")[0]
            copy = graph.create_node("call_function", aten.neg.default, (holder,), name=source.name)
        copy.meta = dict(source.meta)

    return replace(made, weight=changed(made.weight, change))


def lose_an_operation(made: Any) -> Any:
    def change(graph: Graph) -> None:
        node = calls(graph, aten.tanh.default)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    return replace(made, forward=changed(made.forward, change))


def fuse_one_less(made: Any) -> Any:
    def change(graph: Graph) -> None:
        node = calls(graph, aten.mm.default)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    return replace(made, fused=changed(made.fused, change))


def repeat_a_product(made: Any) -> Any:
    def change(graph: Graph) -> None:
        calls(graph, aten.mm.default).meta["repeated"] = True

    return replace(made, weight=changed(made.weight, change))


def draw_in_the_backward(made: Any) -> Any:
    def change(graph: Graph) -> None:
        calls(graph, aten.mm.default).target = aten.bernoulli.p

    return replace(made, backward=changed(made.backward, change))


def forget_to_save(made: Any) -> Any:
    piece = made.forward
    place = next(i for i, slot in enumerate(piece.outputs) if slot.kind == "saved")

    def change(graph: Graph) -> None:
        (results,) = graph.output_node().args
        graph.output_node().args = ([*results[:place], *results[place + 1 :]],)

    outputs = piece.outputs[:place] + piece.outputs[place + 1 :]
    return replace(made, forward=replace(changed(piece, change), outputs=outputs))


def miscount_bytes(made: Any) -> Any:
    return replace(made, crossing=replace(made.crossing, kept=made.crossing.kept + 1))


def return_a_gradient_early(made: Any) -> Any:
    piece = made.backward
    slot = Slot("gradient", "layers.1.weight")
    return replace(made, backward=replace(piece, outputs=(slot, *piece.outputs[1:])))


def of_weight(change: Callable[[Piece], Piece]) -> Callable[[Any], Any]:
    """A damage of W of a finished stage."""
    return lambda made: replace(made, pieces={**made.pieces, "W": change(made.pieces["W"])})


@of_weight
def never_add(piece: Any) -> Any:
    def change(graph: Graph) -> None:
        graph.erase_node(calls(graph, aten.addmm_.default))

    return changed(piece, change)


@of_weight
def add_into_what_is_saved(piece: Any) -> Any:
    def change(graph: Graph) -> None:
        saved = next(n for n in graph.find_nodes(op="placeholder") if n.meta["slot"].kind == "saved")
        node = calls(graph, aten.addmm_.default)
        node.args = (saved, *node.args[1:])

    return changed(piece, change)


def train_another_parameter(made: Any) -> Any:
    return replace(made, trained=(*made.trained, "nobody"))


def share_a_gradient(made: Any) -> Any:
    def change(graph: Graph) -> None:
        first, second = graph.output_node().all_input_nodes[:2]
        second.meta["val"] = first.meta["val"].view(-1)[:1]

    return of_weight(lambda piece: changed(piece, change))(made)


def describe_another_message(made: Any) -> Any:
    (name, spec), *rest = made.receives.items()
    return replace(made, receives=dict([(name, spec._replace(dtype="float64")), *rest]))


DAMAGES = [  # the pass, the stage, the damage, the rule, and the operation that the message must name
    ("infer-values", None, forget_value, "values-present", "tanh"),
    ("infer-values", None, compute_for_nobody, "nothing-unused", "neg"),
    ("infer-values", None, write_in_place, "nothing-in-place", "relu"),
    ("infer-values", None, check_a_shape, "no-runtime-checks", "_assert"),
    ("infer-values", None, read_too_early, "operations-in-order", "relu"),
    ("infer-values", None, call_by_another_role, "roles-on-inputs", "p_"),
    ("infer-values", None, give_a_role_twice, "roles-unique", "p_"),
    ("infer-values", None, lose_a_role, "roles-complete", ""),
    ("infer-values", None, take_an_input_for_a_buffer, "changing-buffers-separate", "p_"),
    ("infer-values", None, refer_to_nothing, "calls-only", "missing"),
    ("infer-values", None, take_another_part, "parts-fit", "getitem"),
    ("infer-values", None, forget_gradients, "differentiability-known", "relu"),
    ("cut", None, send_nothing, "boundaries-agree", ""),
    ("cut", None, receive_another_shape, "boundaries-agree", "activation"),
    ("cut", None, draw_on_another_stage, "draws-kept", ""),
    ("cut", None, lose_a_changed_buffer, "results-once", ""),
    ("simplify", 1, exchange_gradients, "gradients-fit", ""),
    ("simplify", 1, read_a_gradient_in_the_forward, "forward-alone", "tanh"),
    ("recompute", 1, return_what_is_recomputed, "forward-alone", "tanh"),
    ("recompute", 0, draw_again, "draws-unchanged", ""),
    ("simplify", 1, list_another_result, "joint-listed", "t"),
    ("split", 1, compute_twice, "each-operation-once", ""),
    ("split", 1, lose_an_operation, "each-operation-once", "tanh"),
    ("split", 1, fuse_one_less, "fused-is-both", "mm"),
    ("split", 1, repeat_a_product, "repeats-cheap", "mm"),
    ("split", 1, draw_in_the_backward, "draws-in-forward", "mm"),
    ("split", 1, forget_to_save, "saved-arrives", "saved"),
    ("split", 1, miscount_bytes, "crossing-counted", ""),
    ("split", 1, return_a_gradient_early, "roles-allowed", ""),
    ("accumulate", 1, never_add, "only-buffers-written", "accumulator"),
    ("accumulate", 1, add_into_what_is_saved, "only-buffers-written", "addmm_"),
    ("accumulate", 1, train_another_parameter, "gradients-complete", ""),
    ("accumulate", 1, describe_another_message, "messages-described", "activation"),
]


@pytest.mark.mostly_slow(every=6, suite=1)
@pytest.mark.parametrize(("name", "stage", "damage", "rule", "node"), DAMAGES, ids=[d[2].__name__ for d in DAMAGES])
def test_a_damage_is_caught_where_it_is(
    made: dict[tuple[str, int | None], Made],
    name: str,
    stage: int | None,
    damage: Callable[[Any], Any],
    rule: str,
    node: str,
) -> None:
    correct, before = made[name, stage]
    verify(name, RULES[name], correct, before)
    with pytest.raises(VerificationError) as caught:
        verify(name, RULES[name], damage(correct), before)
    text = str(caught.value)
    assert text.startswith(f"after the pass {name}")
    assert f"breaks the rule {rule}: " in text
    assert node in text
    assert not node or node[0] in "pasm" or "test_rules.py:" in text  # inputs come from no line


def test_gradients_that_share_memory(made: dict[tuple[str, int | None], Made]) -> None:
    """Returned gradients, as with exact=True, become `.grad` without a copy."""
    program = finish_stage(made["split", 1].made, Choices(exact=True))
    verify("accumulate", RULES["accumulate"], program)
    with pytest.raises(VerificationError, match=r"after the pass accumulate, in W .* breaks the rule gradients-own"):
        verify("accumulate", RULES["accumulate"], share_a_gradient(program))


def test_an_operation_that_a_pair_loses(made: dict[tuple[str, int | None], Made]) -> None:
    pieces = made["accumulate", 1].made.pieces
    merged = OVERLAP.run((pieces["F"], pieces["B"]))
    verify("overlap", OVERLAP.holds, merged)

    def change(graph: Graph) -> None:
        node = calls(graph, aten.tanh.default)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    with pytest.raises(VerificationError, match=r"after the pass overlap, in the pair .* the rule halves-complete"):
        verify("overlap", OVERLAP.holds, changed(merged, change))


def exchanged(group: str, starts: bool, waits: bool) -> Captured:
    """A graph that sums its input over a group."""
    graph = Graph()
    result = holder = graph.placeholder("x")
    if starts:
        result = graph.call_function(c10d.all_reduce.default, (result, "sum", group))
    if waits:
        result = graph.call_function(c10d.wait_tensor.default, (result,))
    graph.output((result,))
    holder.meta["slot"] = Slot("input", "args[0]")
    module = LazyGraphModule(nn.Module(), graph)
    inputs, outputs = (holder.meta["slot"],), (Slot("output", "0"),)
    return Captured(module, inputs, outputs, {}, frozenset(), {}, None, {}, groups={"group0": "0"})


@pytest.mark.parametrize(
    ("damaged", "rule", "said"),
    [
        (exchanged("group0", True, False), "collectives-waited", "all_reduce_default is read by output"),
        (exchanged("group0", False, True), "collectives-waited", "wait_tensor_default waits for a collective that"),
        (exchanged("17", True, True), "groups-named", "all_reduce_default names the group 17"),
    ],
)
def test_collectives(damaged: Captured, rule: str, said: str) -> None:
    """None is cut from its wait, and none names the group of one process."""
    rules = (collectives_waited, groups_named)
    verify("name-groups", rules, exchanged("group0", True, True))
    with pytest.raises(VerificationError, match=f"after the pass name-groups, in the model: {said}.*the rule {rule}: "):
        verify("name-groups", rules, damaged)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 7])
def test_random_models_break_no_rule(seed: int) -> None:
    """Every test of this suite runs the checker; here are graphs with everything that a model may contain."""
    x = torch.randn(6, WIDTH)
    example = zbcompile.Example(RandomModel(seed), (x,), loss=F.mse_loss, target=x)
    choices = Choices(exact=seed == 3, recompute="selective")
    compile_example(example, build("zb-v", 2, 4), choices)
