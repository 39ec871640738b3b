"""In-place writes around autograd, separated while the graph still writes in place.

A write under no_grad, or into a detached tensor, changes in eager the values of all tensors over that memory, and the
history of none, or of one. In functional form, the gradients of a write go where its values go. So results of no_grad
are detached, as is what it writes, a detached tensor that becomes differentiable by a write gets memory of its own, and
writes on which the two forms cannot agree are refused.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node

from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import call_like, like
from zbcompile.passes.graph.source_location import not_inferred, source_line
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.torch_private import (
    GRAD_MODE_REGION,
    FakeTensorMode,
    HigherOrderOperator,
    history_of,
    is_in_place,
    is_part_of_vmap,
    pytree,
    storage_key,
    written_arguments,
)

aten = torch.ops.aten
DETACH = aten.detach.default


def detach_no_grad_regions(module: GraphModule) -> None:
    """Put a detach after every result of a no_grad region: run_decompositions({}) drops the region itself."""
    for child in module.children():
        if isinstance(child, GraphModule):
            detach_no_grad_regions(child)
    regions = module.graph.find_nodes(op="call_function", target=GRAD_MODE_REGION)
    for node in regions:
        if node.args[0] is False:
            for result in [user for user in node.users if user.target.__name__ == "getitem"] or [node]:
                _insert_after(module.graph, result, DETACH)
            _detach_what_is_written(getattr(module, node.args[1].target))
    if regions:
        module.recompile()


def _detach_what_is_written(region: GraphModule) -> None:
    """Into tensors from outside a no_grad region, too, its writes carry values alone."""
    for node in filter(lambda node: is_in_place(node.target), list(region.graph.nodes)):
        written = pytree.tree_leaves(written_arguments(node.target, node.args, node.kwargs))
        for source in node.all_input_nodes:
            if source not in written and isinstance(source.meta.get("val"), Tensor):
                with region.graph.inserting_before(node):
                    detached = call_like(region.graph, source, DETACH, (source,), source.meta["val"])
                    node.replace_input_with(source, detached)
    region.recompile()


def changes_nothing(node: Node) -> bool:
    """Whether an operation is in place, but not a write: the detach of a result that nothing else reads."""
    source = node.args[0] if node.target is aten.detach_.default else None
    return isinstance(source, Node) and source.op == "call_function" and len(source.users) == 1


def separate_written(program: ExportedProgram) -> None:
    """Give detached tensors that a write makes differentiable memory of their own.

    Raises CaptureError if a tensor over the same memory is read later, and would get gradients that it must not have,
    or none.
    """
    modules = [each for each in program.graph_module.modules() if isinstance(each, GraphModule)]
    nodes = [node for each in modules for node in each.graph.nodes if node.op == "call_function"]
    writes = any(is_in_place(node.target) and not changes_nothing(node) for node in nodes)
    if not writes or not {node.target for node in nodes} & {DETACH, GRAD_MODE_REGION}:
        return
    seen = _LiveTensors()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        for child in modules[1:]:
            child.forward = _EagerInterpreter(child, seen).run  # type: ignore[method-assign]
        _EagerInterpreter(program.graph_module, seen).run(*_inputs(program))
    for node in seen.becoming_differentiable:
        _insert_after(node.graph, node, aten.clone.default)
    program.graph_module.recompile()


def _inputs(program: ExportedProgram) -> Iterator[Any]:
    parameters = program.graph_signature.inputs_to_parameters
    for node in program.graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            trained = node.name in parameters and program.state_dict[parameters[node.name]].requires_grad
            value = like(value).requires_grad_(trained)
        yield value


def _insert_after(graph: Graph, node: Node, operation: Any) -> None:
    if isinstance(node.meta.get("val"), Tensor):
        with graph.inserting_after(node):
            result = graph.call_function(operation, (node,))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


class _LiveTensors:
    """The live tensors over each memory, and the last writes, to be judged once unreachable tensors are gone."""

    def __init__(self) -> None:
        self.over: dict[int, list[weakref.ref[Tensor]]] = {}
        self.detached: list[tuple[weakref.ref[Tensor], Node]] = []
        self.writes: list[tuple[Node, int, weakref.ref[Tensor], bool]] = []
        self.becoming_differentiable: dict[Node, None] = {}

    def made(self, node: Node, value: Any) -> None:
        for tensor in tensors_of(value):
            self.over.setdefault(storage_key(tensor), []).append(weakref.ref(tensor))
            if node.target is DETACH:
                self.detached.append((weakref.ref(tensor), node))

    def written(self, node: Node, tensor: Tensor) -> None:
        self.writes.append((node, storage_key(tensor), weakref.ref(history_of(tensor)), torch.is_grad_enabled()))

    def judge(self) -> None:
        while self.writes:
            self._judge(*self.writes.pop())

    def _judge(self, node: Node, key: int, reference: weakref.ref[Tensor], recorded: bool) -> None:
        history = reference()
        alive = [tensor for each in self.over.get(key, ()) if (tensor := each()) is not None]
        others = [tensor for tensor in alive if history_of(tensor) is not history]
        hidden = [tensor for tensor in (others if recorded else alive) if tensor.requires_grad and not tensor.is_leaf]
        begins = [node for each, node in self.detached if history is not None and each() is history]
        grown = begins if history is not None and history.requires_grad else []
        if hidden or (grown and others):
            raise Refusal.HIDDEN_WRITE.error(line=source_line(node))
        self.becoming_differentiable.update(dict.fromkeys(grown))


class _EagerInterpreter(Interpreter):
    """Runs an exported graph with eager's autograd, on fake tensors, its regions included."""

    def __init__(self, module: GraphModule, seen: _LiveTensors) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.seen = seen
        self.needed = _needed(module.graph)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        result = super().run(*args, **kwargs)
        self.env.clear()  # which would keep what the region returned
        return result

    def run_node(self, n: Node) -> Any:
        self.seen.judge()
        if n not in self.needed:
            return None
        try:
            value = super().run_node(n)
        except CaptureError:
            raise
        except Exception as error:
            raise not_inferred(n, error) from error
        self.seen.made(n, value)
        for tensor in pytree.tree_leaves(written_arguments(n.target, *self.fetch_args_kwargs_from_env(n))):
            self.seen.written(n, tensor)
        return value


def _needed(graph: Graph) -> set[Node]:
    """What results and writes depend on, and the ends of a vmap. A number that is only logged has no value yet."""
    needed: set[Node] = set()
    for node in reversed(graph.nodes):
        writes = is_in_place(node.target) or isinstance(node.target, HigherOrderOperator)
        ends = is_part_of_vmap(node.target) or node.op in ("placeholder", "output")
        if writes or ends or not needed.isdisjoint(node.users):
            needed.add(node)
    return needed
