"""The canonical graph: one placeholder per tensor, no operation without effect, and a description of each value.

Every later pass reads `node.meta["val"]` (a fake tensor), `node.meta["differentiable"]`, `node.meta["slot"]` (on
placeholders) and `node.meta["recompute"]` (in checkpoint regions), all set here, in the order of
`zbcompile.passes.pass_list.passes_in_order`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from zbcompile.passes.capture.autocast import is_autocasts
from zbcompile.passes.capture.export import Captured
from zbcompile.passes.capture.functional_writes import separate_changing_buffers
from zbcompile.passes.capture.opaque_calls import is_call, overwritten_by
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.gpu import kind_of
from zbcompile.passes.graph.fx import (
    NodeNumber,
    call_text,
    copied,
    drop_unused_inputs,
    is_random,
    like,
    output_values,
    with_graph,
)
from zbcompile.passes.graph.gpu_kernels import kernel_of
from zbcompile.passes.graph.kernel_layouts import kernels_layouts
from zbcompile.passes.graph.process_groups import is_collective, is_under_way, is_wait, name_groups
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.source_location import not_inferred, source_line
from zbcompile.passes.graph.storage import form_of_tensor, moved_value, tensors_of
from zbcompile.passes.torch_private import (
    ASSERTIONS,
    AUTOCAST,
    RECOMPUTE,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    is_in_place,
    storage_key,
    take_annotations,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Canonical:
    """A captured graph in canonical form. `outputs` pairs each role with the node that makes it."""

    captured: Captured
    module: GraphModule
    mode: FakeTensorMode

    @property
    def graph(self) -> Graph:
        return self.module.graph

    @property
    def outputs(self) -> list[tuple[Slot, Any]]:
        return list(zip(self.captured.outputs, output_values(self.graph), strict=True))


def copy_graph(captured: Captured) -> Captured:
    """Copy the graph, so that the canonicalisations after this one can change it in place."""
    graph = copied(captured.module.graph)
    for node, slot in zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
        node.meta["slot"] = slot
    return replace(captured, module=with_graph(captured.module, graph))


def on_graph(change: Callable[[Graph], None]) -> Callable[[Captured], Captured]:
    """Make a pass of `change`, which changes a graph in place and may drop inputs: the result takes a captured graph
    and returns the next one."""

    def run(captured: Captured) -> Captured:
        graph = captured.module.graph
        change(graph)
        return replace(captured, inputs=tuple(node.meta["slot"] for node in graph.find_nodes(op="placeholder")))

    return run


def with_separate_buffers(captured: Captured) -> Captured:
    separate_changing_buffers(captured.module.graph, captured.outputs)
    return captured


def with_early_writes(captured: Captured) -> Captured:
    """Detach a buffer's new value where it is computed: an assignment (`self.n = self.n + 1`) is traced as a write at
    the end of forward, and no cut may come between the reads of a buffer and its write."""
    outputs = output_values(captured.module.graph)
    for value in (value for slot, value in zip(captured.outputs, outputs, strict=True) if slot.kind == "mutation"):
        chain = []
        while value.target is aten.detach.default and len(value.users) == 1:
            chain.append(value)
            value = value.args[0]
        for each in reversed(chain):
            value.append(each)
            value = each
    return captured


def with_named_groups(captured: Captured) -> Captured:
    return replace(captured, groups=name_groups(captured.module, captured.dimensions))


def with_values(captured: Captured) -> Canonical:
    """The canonical graph. Raises CaptureError for sparse gradients, and results that cannot be inferred beforehand."""
    captured.module.recompile()
    for node in captured.module.graph.find_nodes(op="call_function", target=aten.embedding.default):
        if True in node.args[4:5]:
            raise Refusal.SPARSE_CALL.error(operation=node.name, line=source_line(node))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    infer_values(captured.module, captured, mode)
    return Canonical(captured, captured.module, mode)


def keep_marks(graph: Graph) -> None:
    """`meta["recompute"]`: the number of the torch.utils.checkpoint region that the model computed a node in.
    `meta["autocast"]`: the number of the autocast region that made a cast."""
    for node in graph.nodes:
        noted = take_annotations(node)
        if node.op == "call_function" and RECOMPUTE in noted:
            node.meta["recompute"] = noted[RECOMPUTE]
        if node.op == "call_function" and AUTOCAST in noted and is_autocasts(node):
            node.meta["autocast"] = noted[AUTOCAST]


def merge_tied_placeholders(graph: Graph) -> None:
    """Tied parameters arrive as several placeholders; keep the first of each slot. Drop the unused ones."""
    first: dict[Slot, Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        keeper = first.setdefault(node.meta["slot"], node)
        if keeper is not node:
            node.replace_all_uses_with(keeper)
    drop_unused_inputs(graph)


def drop_checks(graph: Graph) -> None:
    """Drop run-time assertions on metadata: shapes are static here, and the graph must never be cut at a check."""
    for node in list(graph.nodes):
        if node.target in ASSERTIONS:
            graph.erase_node(node)


def drop_no_ops(graph: Graph) -> None:
    """Drop casts to the dtype a value already has, dropout that drops nothing, copies, detaches of integers, and a wait
    for what has been waited for."""
    for node in list(graph.nodes):
        rule = _waits_again if is_wait(node) else _NO_OPS.get(node.target)
        if rule is not None and isinstance(node.args[0], Node) and rule(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _same_tensor(node: Node) -> bool:
    before, after = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or node.kwargs.get("copy"):
        return False
    same = before.dtype == after.dtype and before.device == after.device and before.stride() == after.stride()
    return same and before.shape == after.shape and not any(arg is True for arg in node.args[1:])


def _integer(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _copies_for_itself(node: Node) -> bool:
    """Whether a copy or an alias is the only reader of its input, as torch.export makes of dropout that drops nothing.
    If there are other readers, it determines the order in which gradients are added: a slice of everything is one."""
    source = node.args[0]
    return source.op == "call_function" and len(source.users) == 1 and _same_tensor(node)  # type: ignore[union-attr]


def _waits_again(node: Node) -> bool:
    """Whether a wait is for another wait, or for an operator that waits by itself."""
    source = node.args[0]
    return is_collective(source) and not is_under_way(source)  # type: ignore[arg-type]


_NO_OPS: dict[Any, Callable[[Node], bool]] = {
    aten.to.dtype: _same_tensor,
    aten.to.dtype_layout: _same_tensor,
    aten.to.device: _same_tensor,
    aten.dropout.default: lambda node: bool(node.args[1] == 0.0) or node.args[2] is False,  # drops nothing
    aten.clone.default: _copies_for_itself,
    aten.detach.default: _integer,
    aten.alias.default: lambda node: _integer(node) or _copies_for_itself(node),
}


def drop_dead_code(graph: Graph) -> None:
    """Remove what no output needs; eager draws random numbers even for unused values, so those stay."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or is_random(node))
    drop_unused_inputs(graph)


class _GradientReach(Interpreter):
    """Runs the graph on fake tensors with autograd on, noting each value and whether a gradient reaches it. Of equal
    operations on equal tensors one runs; the others get tensors like its own."""

    def __init__(self, module: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # our errors name the line
        self.mode, self.first = mode, dict[Hashable, Node]()

    def run_node(self, n: Node) -> Any:
        first = self.first.setdefault(self._key(n), n)
        if first is n:
            value = self._run(n)
            n.meta["val"] = torch.fx.node.map_aggregate(value, _detached)  # type: ignore[arg-type]
        else:
            storages = {
                storage_key(a.meta["val"]): b.meta["val"].untyped_storage()
                for a, b in zip(first.all_input_nodes, n.all_input_nodes, strict=True)
            }
            n.meta["val"] = moved_value(first.meta["val"], storages, self.mode)
            value = moved_value(self.env[first], storages, self.mode)
        n.meta["differentiable"] = any(t.requires_grad for t in tensors_of(value))
        return value

    def _run(self, n: Node) -> Any:
        try:
            with self.mode:
                value = super().run_node(n)
        except Exception as error:  # torch.export accepts operations whose shape depends on the data
            raise not_inferred(n, error) from error
        _refuse_overwritten(n)
        return value

    def _key(self, n: Node) -> Hashable:
        """Equal for equal operations on equal tensors; what is more than an operation is equal to nothing."""
        reads = {node: NodeNumber(f"%{i}") for i, node in enumerate(n.all_input_nodes)}
        values = [self.env[node] for node in reads]
        plain = all(type(value) is FakeTensor for value in values) and isinstance(n.target, OpOverload)
        if not plain or is_in_place(n.target) or is_call(n) or any(v.is_complex() or v.is_neg() for v in values):
            return n
        keys = [storage_key(value) for value in values]
        places = [(value.storage_offset(), keys.index(key)) for value, key in zip(values, keys, strict=True)]
        return call_text(n, reads), *map(form_of_tensor, values), *places

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run attention that the capture kept whole by its kernel. On a CPU torch would compute it by its formula if
        the mask were trained, so the mask counts as untrained, as in a forward without gradients."""
        if target is aten.scaled_dot_product_attention.default and kind_of(args[0].device) == "cpu":
            args = (*args[:3], *map(_detached, args[3:4]), *args[4:])
            kwargs = {name: _detached(each) if name == "attn_mask" else each for name, each in kwargs.items()}
        return super().call_function(kernel_of(target, args), args, kwargs)


def _refuse_overwritten(node: Node) -> None:
    for source in overwritten_by(node):
        if len(source.users) > 1 or source.op == "placeholder":
            raise Refusal.WRITTEN_EXCHANGE.error(line=source_line(node), name=source.name)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def infer_values(module: GraphModule, captured: Captured, mode: FakeTensorMode) -> None:
    """Set `val` and `differentiable` of every node by one run on fake tensors."""
    with torch.enable_grad(), kernels_layouts():
        with mode:
            inputs = [_fake_input(node, captured) for node in module.graph.find_nodes(op="placeholder")]
        _GradientReach(module, mode).run(*inputs)


def _fake_input(node: Node, captured: Captured) -> Any:
    slot, old = node.meta["slot"], node.meta["val"]
    if not isinstance(old, torch.Tensor):
        return old
    trained = slot.kind == "parameter" and slot.name in captured.trainable
    return like(old).requires_grad_(trained or slot.kind == "activation")
