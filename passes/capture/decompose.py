"""`run_decompositions({})`, which traces every operation of an exported program: here only one of those that are equal.

What becomes of an operation depends on it and on the tensors that it reads alone, unless something writes in place. So
torch decomposes a short program that has each distinct operation once, and all equal ones get copies of the result.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature, graph_signature as signatures
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from zbcompile.passes.capture.mutations import changes_nothing
from zbcompile.passes.capture.opaque_calls import is_call
from zbcompile.passes.graph.fx import NodeNumber, call_text, is_getitem, like, operator_name, output_values
from zbcompile.passes.graph.storage import form_of_tensor
from zbcompile.passes.torch_private import (
    ANNOTATIONS,
    AUTOCAST_REGION,
    GRAD_MODE_REGION,
    MODEL_KEYS,
    FakeTensor,
    OpOverload,
    annotate_node,
    fake_mode_of,
    is_in_place,
    pytree,
)

_UNIT = "unit"  # the note of which operation a node is, or has become of


class _Unit(NamedTuple):
    """An operation or region, the tensors that it reads, and its results: itself, or what is taken out of its tuple."""

    node: Node
    reads: list[Node]
    results: list[Node]

    def key(self, values: Mapping[Node, torch.Tensor]) -> Hashable:
        """Equal for operations that decompose alike; a region is equal to none."""
        if not isinstance(self.node.target, OpOverload):
            return self.node
        numbers = {read: NodeNumber(f"%{i}") for i, read in enumerate(self.reads)}
        taken = tuple(each.args[1:] for each in self.results if each is not self.node)
        return call_text(self.node, numbers), *(form_of_tensor(values[each]) for each in self.reads), taken

    def run(self, values: Mapping[Node, torch.Tensor]) -> list[torch.Tensor]:
        """The results, as operations decompose: on fake tensors without gradients. Of a region those of the export."""
        if not isinstance(self.node.target, OpOverload):
            return [each.meta["val"].detach() for each in self.results]
        args, kwargs = map_arg((self.node.args, self.node.kwargs), values.__getitem__)
        if self.results:
            with fake_mode_of(self.results[0].meta["val"]), torch.no_grad():
                made = self.node.target(*args, **kwargs)
        return [made if each is self.node else made[each.args[1]] for each in self.results]


class _Form(NamedTuple):
    """What became of a unit: the nodes, what they read, and the results, which may be among these."""

    nodes: list[Node]
    reads: list[Node]
    results: list[Any]


def decomposed(program: ExportedProgram) -> ExportedProgram:
    """The same program in functional form, decomposed as `run_decompositions({})` does it."""
    module = program.graph_module
    values = {node: node.meta["val"] for node in module.graph.find_nodes(op="placeholder")}
    devices = {value.device.type for value in values.values() if isinstance(value, torch.Tensor)} - {"meta"}
    if any(map(torch.is_autocast_enabled, devices)) or not _is_regular(module):  # one cast serves all who read it
        return program.run_decompositions({})
    distinct = dict[Hashable, tuple[_Unit, list[torch.Tensor]]]()
    known: list[tuple[_Unit, Hashable]] = []
    for unit in _units(module.graph, values):
        known.append((unit, key := unit.key(values)))
        if key not in distinct:
            distinct[key] = unit, unit.run(values)
        values.update(zip(unit.results, distinct[key][1], strict=True))
    found = _forms(module, [unit for unit, _ in distinct.values()], values)
    if found is None:
        return program.run_decompositions({})
    forms = dict(zip(distinct, found, strict=True))
    graph = _composed(module.graph, {unit.node: (unit, forms[key]) for unit, key in known})
    graph.eliminate_dead_code()
    module.graph = graph
    return program


def _is_regular(module: GraphModule) -> bool:
    """Whether the operations of a graph, and of its regions, can be decomposed one by one."""
    return all(_is_operation(module, node) for node in module.graph.nodes)


def _is_operation(module: GraphModule, node: Node) -> bool:
    if node.op == "get_attr":
        return isinstance(getattr(module, str(node.target), None), GraphModule)
    if node.op != "call_function" or is_getitem(node) or changes_nothing(node) or is_call(node):
        return True
    if node.target in (GRAD_MODE_REGION, AUTOCAST_REGION):
        return all(map(_is_regular, _regions(module, node)))
    result = node.meta.get("val")
    values = [*(each.meta.get("val") for each in _reads(node)), *([] if result is None else pytree.tree_leaves(result))]
    are_tensors = all(isinstance(v, FakeTensor) and all(type(n) is int for n in v.shape) for v in values)
    return are_tensors and isinstance(node.target, OpOverload) and not is_in_place(node.target)


def _regions(module: GraphModule, node: Node) -> list[GraphModule]:
    return [getattr(module, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]


def _reads(node: Node) -> list[Node]:
    return [each for each in node.all_input_nodes if each.op != "get_attr"]


def _units(graph: Graph, values: dict[Node, torch.Tensor]) -> Iterator[_Unit]:
    for node in graph.nodes:
        if changes_nothing(node):
            values[node] = values[node.args[0]]
        elif is_call(node):
            values |= {each: each.meta["val"].detach() for each in node.users}
        elif node.op == "call_function" and not is_getitem(node):
            value = node.meta.get("val")
            several = [*node.users] if isinstance(value, tuple | list) else [node]
            yield _Unit(node, _reads(node), [] if value is None else several)


def _forms(module: GraphModule, units: Sequence[_Unit], values: Mapping[Node, torch.Tensor]) -> list[_Form] | None:
    """What becomes of each in a program that has nothing else. None if something is added for all of them, or if
    results are not the tensors that were taken for them."""
    parts = _short(module, units, values).run_decompositions({}).graph
    holders, results = parts.find_nodes(op="placeholder"), output_values(parts)
    taken = [form_of_tensor(values[node]) for unit in units for node in unit.results]
    if len(holders) != sum(len(unit.reads) for unit in units) or parts.find_nodes(op="get_attr"):
        return None
    if [form_of_tensor(node.meta["val"].detach()) for node in results] != taken:
        return None
    read, made = iter(holders), iter(results)
    forms = [_Form([], [*islice(read, len(u.reads))], [*islice(made, len(u.results))]) for u in units]
    for node in (each for each in parts.nodes if each.op == "call_function"):
        node.meta[ANNOTATIONS] = noted = {**node.meta[ANNOTATIONS]}
        forms[noted.pop(_UNIT)].nodes.append(node)
    return forms


def _short(module: GraphModule, units: Sequence[_Unit], values: Mapping[Node, torch.Tensor]) -> ExportedProgram:
    """A program that runs each unit once, on tensors of its own."""
    graph, results = Graph(), list[Node]()
    inputs = [[graph.placeholder(f"read_{i}_{j}") for j in range(len(unit.reads))] for i, unit in enumerate(units)]
    for number, (unit, own) in enumerate(zip(units, inputs, strict=True)):
        copies = dict(zip(unit.reads, own, strict=True))
        for source, copy in copies.items():
            copy.meta["val"] = _tensor_like(values[source])
        copies |= {each: graph.node_copy(each) for each in unit.node.all_input_nodes if each not in copies}
        copies[unit.node] = graph.node_copy(unit.node, copies.__getitem__)
        _number(copies[unit.node], module, number)
        results += [copies[n] if n is unit.node else graph.node_copy(n, copies.__getitem__) for n in unit.results]
    graph.output(tuple(results)).meta["val"] = tuple(node.meta["val"] for node in results)
    given, made = signatures.InputKind.USER_INPUT, signatures.OutputKind.USER_OUTPUT
    holders = graph.find_nodes(op="placeholder")
    signature = signatures.ExportGraphSignature(
        [signatures.InputSpec(given, signatures.TensorArgument(node.name), None) for node in holders],
        [signatures.OutputSpec(made, signatures.TensorArgument(node.name), None) for node in results],
    )
    example = tuple(node.meta["val"] for node in holders), dict[str, Any]()
    takes, gives = map(pytree.tree_structure, (example, tuple(results)))
    whole = ModuleCallEntry("", ModuleCallSignature([], [], takes, gives))
    return ExportedProgram(module, graph, signature, {}, {}, [whole], example, {})


def _number(node: Node, module: GraphModule, number: int) -> None:
    annotate_node(node, _UNIT, number)
    for region in _regions(module, node):
        for inner in region.graph.nodes:
            _number(inner, region, number)


def _tensor_like(value: torch.Tensor) -> torch.Tensor:
    with fake_mode_of(value):
        return like(value).requires_grad_(value.requires_grad)


def _composed(old: Graph, known: Mapping[Node, tuple[_Unit, _Form]]) -> Graph:
    """The graph with what became of its operations. Operators that stand for calls stay as they are."""
    graph, values = Graph(), dict[Node, Any]()
    for node in old.nodes:
        if node.op in ("placeholder", "output"):
            values[node] = graph.node_copy(node, values.__getitem__)
        elif node in known:
            unit, form = known[node]
            inner = dict(zip(form.reads, map(values.__getitem__, unit.reads), strict=True))
            of_model = {key: node.meta[key] for key in (*MODEL_KEYS, ANNOTATIONS) if key in node.meta}
            for each in form.nodes:
                inner[each] = _copied(each, graph, inner)
                inner[each].meta |= of_model if isinstance(node.target, OpOverload) else {}
            values.update(zip(unit.results, map_arg(form.results, inner.__getitem__), strict=True))
        elif changes_nothing(node):
            values[node] = values[node.args[0]]
        elif is_call(node):
            values[node] = _copied(node, graph, values)
            values.update({each: _copied(each, graph, values) for each in node.users})
    return graph


def _copied(node: Node, graph: Graph, copies: Mapping[Node, Any]) -> Node:
    """A copy of an operation, named as torch names it."""
    args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
    copy = graph.create_node(node.op, node.target, args, kwargs, operator_name(node))
    copy.meta = dict(node.meta)
    return copy
