"""Distinct graphs: stages that differ only in names are traced, split and finished once, and then renamed.

Most stages of a transformer are the same few layers again, with other parameters. `same_work` says what a stage
computes without its names; where two stages agree in it, `renamed` turns the program of one into that of the other.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.graph.fx import NodeNumber, call_text, node_numbers, output_values
from zbcompile.passes.graph.roles import Kind, Slot, TensorSpec
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.split.joint_graph import gradients_before, tangents_of
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.stage_program import StageProgram, tensor_spec
from zbcompile.passes.torch_private import BOOKKEEPING_KEYS, LazyGraphModule, module_stack, source_of, stack_trace

Value = TypeVar("Value")
# Slots of different kinds that are named after the same thing.
_SAME_NAMES: Mapping[str, str] = {
    "gradient": "parameter",
    "accumulator": "parameter",
    "mutation": "buffer",
    "tangent": "activation",
    "input_gradient": "activation",
}
_FIXED: tuple[Kind, ...] = ("loss", "output", "saved")  # named after what is the same in both stages
# Entries that say where a node comes from or are compared elsewhere. Any other may steer a pass, so it must be equal.
_NOT_WORK = BOOKKEEPING_KEYS | {"val", "slot", "recompute"}
_REGION = "recompute"  # the number of a checkpoint region: what counts is which nodes have the same one


Tangents = Mapping[str, torch.Tensor]
Compiled = tuple[StageProgram, Tangents]
StageCompiler = Callable[[Stage, Tangents], Compiled]


def compile_distinct(
    stages: tuple[Stage, ...],
    trainable: frozenset[str],
    compile_stage: StageCompiler,
    behind: Tangents | None = None,
    rename: "Callable[[StageProgram, Renaming], StageProgram] | None" = None,
    apart: frozenset[str] = frozenset(),
    also: Callable[[Stage], object] = lambda stage: None,
    known: MutableMapping[Hashable, Any] | None = None,
) -> tuple[StageProgram, ...]:
    """The programs of all stages, made from the last to the first: a stage's tangents are the gradients of the next.

    `behind` are the gradients that arrive at the last stage; None if it makes the loss.
    `compile_stage(stage, tangents)` gives a program and the fake gradient of each activation that the stage receives;
    it is called once per distinct graph; `rename` (default: `renamed`) makes the program of a stage that has the graph
    of another one. A stage shares graphs only with those that have parameters of `apart` in the same places, and for
    which `also` says the same. `known` has what earlier calls made, and receives what this one makes.
    """
    made: MutableMapping[Hashable, tuple[Stage, Tangents, Compiled]] = {} if known is None else known
    programs: list[StageProgram] = []
    gradients = behind
    for stage in reversed(stages):
        tangents = tangents_of(stage, gradients)
        key = same_work(stage, trainable, tangents, apart), also(stage)
        if key not in made:
            made[key] = (stage, tangents, compile_stage(stage, tangents))
        first, of_first, (program, leaving) = made[key]
        if first is not stage:
            to = renaming((first, of_first), (stage, tangents))
            program, leaving = (rename or renamed)(program, to), to.by_name(leaving, "activation")
        programs.append(program)
        gradients = gradients_before(stage, gradients, leaving)
    return tuple(reversed(programs))


def same_work(stage: Stage, trainable: frozenset[str], tangents: Tangents, apart: frozenset[str] = frozenset()) -> str:
    """A text that is equal for two stages whose compiled programs differ only in names.

    It has every operation with its arguments, the shapes, strides, dtypes and devices of all values, what is trained,
    and the strides with which gradients arrive. Names are replaced by numbers in order of appearance.
    """
    numbers = node_numbers(stage.module.graph)
    regions = _numbered(node.meta.get(_REGION) for node in stage.module.graph.nodes)
    names = {key: str(i) for key, i in _numbered(_keys(stage, tangents)).items()}
    lines = []
    for node in stage.module.graph.nodes:
        region = str(regions[node.meta.get(_REGION)])
        lines.append(f"{region} {_describe(node, numbers, names, (trainable, apart), stage.module)}")
    results = [numbers[node] if isinstance(node, Node) else repr(node) for node in output_values(stage.module.graph)]
    lines += [f"{_anonymous(slot, names)} {value}" for slot, value in zip(stage.outputs, results, strict=True)]
    lines += [f"{_anonymous(Slot('tangent', name), names)} {_spec(value)}" for name, value in tangents.items()]
    return "\n".join(lines)


def _numbered(values: Iterable[Any]) -> dict[Any, int]:
    """Numbers in order of first appearance."""
    return {value: i for i, value in enumerate(dict.fromkeys(values))}


def _describe(
    node: Node,
    numbers: Mapping[Node, NodeNumber],
    names: Mapping[Any, str],
    kinds: Sequence[frozenset[str]],
    module: GraphModule,
) -> str:
    steering = {key: value for key, value in node.meta.items() if key not in _NOT_WORK}
    what = [numbers[node], node.op, _spec(node.meta.get("val")), repr(sorted(steering.items()))]
    if node.op == "placeholder":
        slot: Slot = node.meta["slot"]
        of = [str(slot.kind == "parameter" and slot.name in kind) for kind in kinds]
        return " ".join([*what, _anonymous(slot, names), *of])
    if node.op == "get_attr":  # a branch or a constant of the graph: the same only if it is the same object
        return " ".join([*what, str(id(attrgetter(str(node.target))(module)))])
    return " ".join([*what, call_text(node, numbers)])


def _spec(value: Any) -> str:
    found = [(tuple(tensor_spec(t)), t.requires_grad) for t in tensors_of(value)]
    return repr(found if found else value)


def _keys(stage: Stage, tangents: Tangents) -> dict[tuple[str, str], None]:
    """The things that a stage's slots are named after, in order of appearance."""
    slots = [*stage.inputs, *stage.outputs, *(Slot("tangent", name) for name in tangents)]
    return dict.fromkeys(_key(slot) for slot in slots if slot.kind not in _FIXED)


def _key(slot: Slot) -> tuple[str, str]:
    return _SAME_NAMES.get(slot.kind, slot.kind), slot.name


def _anonymous(slot: Slot, names: Mapping[Any, str]) -> str:
    return f"{slot.kind} {names.get(_key(slot), slot.name)}"


@dataclass(frozen=True)
class Renaming:
    """A mapping from the names and source lines of one stage to those of another that does the same work."""

    stage: int
    names: Mapping[tuple[str, str], str]
    descriptions: Mapping[Any, Mapping[str, Any]]

    def slot(self, slot: Slot) -> Slot:
        return slot.called(self.names.get(_key(slot), slot.name))

    def by_name(self, values: Mapping[str, Value], kind: Kind) -> dict[str, Value]:
        """A mapping from names of slots of one kind, with its keys renamed."""
        return {self.slot(Slot(kind, name)).name: value for name, value in values.items()}

    def travelling(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """What travels, under its new name."""
        return self.by_name(specs, "activation")

    def source_of(self, node: Node) -> Mapping[str, Any]:
        """Where what `node` is in the old stage comes from in the new one."""
        return self.descriptions.get(_description_key(node), {})

    def all_names(self, names: tuple[str, ...], kind: Kind) -> tuple[str, ...]:
        return tuple(self.slot(Slot(kind, name)).name for name in names)


def renaming(old: tuple[Stage, Tangents], new: tuple[Stage, Tangents]) -> Renaming:
    """The renaming between two stages of the same work."""
    names = {before: after for before, (_, after) in zip(_keys(*old), _keys(*new), strict=True)}
    twins = zip(old[0].module.graph.nodes, new[0].module.graph.nodes, strict=True)
    lines = {_description_key(a): source_of(b) for a, b in twins}
    return Renaming(new[0].index, names, {key: line for key, line in lines.items() if any(key)})


def _description_key(node: Node) -> tuple[str, tuple[str, ...]]:
    return stack_trace(node), tuple(module_stack(node))


def renamed(program: StageProgram, to: Renaming) -> StageProgram:
    """The program of a stage that does the same work as the given one. Graphs are copies, fake tensors are shared."""
    return replace(
        program,
        stage=to.stage,
        pieces={name: _renamed_piece(piece, to) for name, piece in program.pieces.items()},
        receives=to.travelling(program.receives),
        sends=to.travelling(program.sends),
        gradients_in=to.travelling(program.gradients_in),
        gradients_out=to.travelling(program.gradients_out),
        parameters=to.all_names(program.parameters, "parameter"),
        buffers=to.all_names(program.buffers, "buffer"),
        trained=to.all_names(program.trained, "parameter"),
        deferred=dict(zip(to.all_names(tuple(program.deferred), "parameter"), program.deferred.values(), strict=True)),
    )


def _renamed_graph(graph: Graph, to: Renaming) -> Graph:
    renamed, copies = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        copies[node] = _copied(renamed, node, copies, to)
    return renamed


def _renamed_piece(piece: Piece, to: Renaming) -> Piece:
    graph = _renamed_graph(piece.module.graph, to)
    module = LazyGraphModule(piece.module, graph, class_name=f"{piece.name}{to.stage}")
    inputs, outputs = (tuple(map(to.slot, slots)) for slots in (piece.inputs, piece.outputs))
    return replace(piece, module=module, inputs=inputs, outputs=outputs)


def _copied(graph: Graph, node: Node, copies: Mapping[Node, Node], to: Renaming) -> Node:
    if node.op == "placeholder":
        slot = to.slot(node.meta["slot"])
        new = graph.placeholder(slot.identifier)
        new.meta = {**node.meta, "slot": slot}
    else:
        new = graph.node_copy(node, copies.__getitem__)
    new.meta.update(to.source_of(node))
    return new
