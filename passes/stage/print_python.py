"""Printing: a graph as a Python module that a person can read and an interpreter can run.

Every operation has its own line, under the line of the model that it comes from, with the type and size of
what it makes. `forward` in the printed module takes and returns what the graph does and computes the same bits.
"""

import math
import operator
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.amounts import format_bytes
from zbcompile.passes.errors import CompileError
from zbcompile.passes.gpu import ABSENT, kind_of
from zbcompile.passes.graph.fx import is_getitem, output_values
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.graph.storage import is_view, tensors_of
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_names import type_text
from zbcompile.passes.torch_private import FakeTensor, HigherOrderOperator, OpOverload, is_in_place

WIDTH = 100
COMMENT_COLUMN = 52
BACKWARD = ("B", "W", "BW")
_MODULES = {"operator", "math", "zbcompile.passes.stage.overlap"}  # the modules whose functions a graph may call
_WRAP: dict[str, Any] = {"width": WIDTH, "break_on_hyphens": False, "break_long_words": False}


def print_piece(piece: Piece, title: str) -> str:
    """The graph of `piece` as the text of a Python module with one function, `forward`.

    `title` becomes the first line of its docstring. Raises CompileError for an argument that has no Python notation.

    >>> namespace = {}
    >>> exec(print_piece(piece, "stage 1, B"), namespace)  # doctest: +SKIP
    >>> namespace["forward"](*values)                      # doctest: +SKIP
    """
    graph = piece.module.graph
    holders = graph.find_nodes(op="placeholder")
    inputs = [f"{s}, {describe_value(n.meta.get('val'))}" for s, n in zip(piece.inputs, holders, strict=True)]
    called = {_module_of(n.target) for n in graph.nodes if n.op == "call_function" and not is_getitem(n)}
    results = [_literal(value) for value in output_values(graph)]
    returned = ["    return [", *_commented(results, map(str, piece.outputs), 8), "    ]"]
    body = "\n".join(_body(piece.module, piece.name in BACKWARD))
    return "\n".join(
        [
            f'"""{title}\n\n{_summary(graph)}\n"""\n',
            *(f"import {name}" for name in sorted({"torch", *called & _MODULES})),
            "\naten = torch.ops.aten\n",
            *_constants(piece.module),
            "\ndef forward(",
            *_commented([node.name for node in holders], inputs),
            "):",
            body,
            *(returned if results else ["    return []"]),
            "",
        ]
    )


def _summary(graph: Graph) -> str:
    operations = [n for n in graph.nodes if n.op == "call_function" and not is_getitem(n)]
    made_by = sorted({str(n.meta["pass"]) for n in operations if "pass" in n.meta})
    rewritten = f"; some by the pass {', '.join(made_by)}, marked so" if made_by else ""
    return textwrap.fill(f"{len(operations)} operations, from the lines of the model above them{rewritten}.", WIDTH)


def _commented(items: list[str], comments: Iterable[str], indent: int = 4) -> list[str]:
    pairs = zip(items, comments, strict=True)
    return [line for item, comment in pairs for line in _with_comment(f"{' ' * indent}{item},", comment)]


def _with_comment(code: str, comment: str) -> list[str]:
    """The code with its comment behind it, or above it if the line would be too long."""
    if not comment:
        return [code]
    for line in (f"{code:<{COMMENT_COLUMN - 2}}  # {comment}", f"{code}  # {comment}"):
        if len(line) <= WIDTH:
            return [line]
    indent = " " * (len(code) - len(code.lstrip()))
    return [*(textwrap.wrap(comment, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")), code]


def describe_value(value: Any) -> str:
    """Type and size of what a node makes: `float32[2, 32, 64] 16.0 KiB`."""
    if isinstance(value, torch.Tensor):
        return f"{type_text(value)} {format_bytes(value.numel() * value.element_size())}"
    if isinstance(value, tuple | list):
        shown = ", ".join(type_text(v) for v in tensors_of(value)[:4])
        return f"({shown}{', ...' if len(value) > 4 else ''})"
    return "" if value is None else type(value).__name__


def _body(module: GraphModule, backward: bool) -> list[str]:
    lines: list[str] = []
    heading = ("", "")
    for node in module.graph.nodes:
        if node.op not in ("call_function", "placeholder", "output", "get_attr"):
            raise CompileError(f"{node.name} is a {node.op}, which no pass makes; expected a graph of ATen calls.")
        if node.op == "call_function":
            now = _heading(node, backward)
            lines += _heading_lines(*now) if now != heading else []
            lines += _statement(node)
            heading = now
    return lines


def _heading(node: Node, backward: bool) -> tuple[str, str]:
    """The module that a node is from, and the line in it."""
    origin = origin_of(node)
    if origin is None:
        return f"made by {node.meta.get('pass', 'zbcompile')}", ""
    return f"backward of {origin.owner}" if backward else origin.owner, origin.text


def _statement(node: Node) -> list[str]:
    comment = _comment(node)
    if is_getitem(node):
        return _with_comment(f"    {node.name} = {_literal(node.args[0])}[{_literal(node.args[1])}]", comment)
    whole = _with_comment(f"    {node.name} = {_target(node)}({', '.join(_arguments(node))})", comment)
    if len(whole) == 1 and len(whole[0]) <= WIDTH:
        return whole
    opening = f"    {node.name} = {_target(node)}("
    if len(opening) <= WIDTH:
        return [opening, *_wrapped_arguments(node), f"    )  # {comment}"]
    return [f"    {node.name} = (", f"        {_target(node)}(", *_wrapped_arguments(node), f"    ))  # {comment}"]


def _wrapped_arguments(node: Node) -> list[str]:
    return textwrap.wrap(f"{', '.join(_arguments(node))},", initial_indent=" " * 8, subsequent_indent=" " * 8, **_WRAP)


def _heading_lines(owner: str, line: str) -> list[str]:
    """A blank line and the heading, on two lines (module, then line of the model) if both do not fit on one."""
    whole = f"    # {owner}  {line}".rstrip()
    if len(whole) <= WIDTH:
        return ["", whole]
    line = f"    #     {line}"
    return ["", f"    # {owner}", line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ..."]


def _comment(node: Node) -> str:
    value = describe_value(node.meta.get("val"))
    view = " (in place)" if is_in_place(node.target) else " (view)" if not is_getitem(node) and is_view(node) else ""
    return f"{value}{view}{' by ' + node.meta['pass'] if 'pass' in node.meta else ''}"


def _arguments(node: Node) -> list[str]:
    return [*map(_literal, node.args), *(f"{name}={_literal(value)}" for name, value in node.kwargs.items())]


def _target(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, OpOverload):
        namespace, name, overload = str(target).split(".")
        return f"{'' if namespace == 'aten' else 'torch.ops.'}{namespace}.{name}.{overload}"
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    if _module_of(target) in _MODULES:
        return f"{_module_of(target)}.{target.__name__}"
    raise CompileError(f"{node.name} calls {target!r}, which cannot be written as Python; expected an ATen operator.")


def _module_of(target: Any) -> str:
    return (getattr(target, "__module__", None) or "").removeprefix("_")


def _literal(value: Any) -> str:
    for types, write in _NOTATION.items():
        if isinstance(value, types):
            return write(value)
    raise CompileError(f"an argument of type {type(value).__name__} ({value!r}) cannot be written as Python.")


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else f"float('{value}')"


_NOTATION: dict[Any, Callable[[Any], str]] = {
    Node: lambda node: node.name,
    (bool, int, str, type(None), type(...)): repr,
    float: _float,
    complex: lambda value: f"complex({_float(value.real)}, {_float(value.imag)})",
    slice: lambda value: f"slice({_literal(value.start)}, {_literal(value.stop)}, {_literal(value.step)})",
    tuple: lambda value: f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})",
    list: lambda value: f"[{', '.join(map(_literal, value))}]",
    dict: lambda value: "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}",
    (torch.dtype, torch.layout, torch.memory_format): str,
    torch.device: lambda value: f"torch.device({_name(value)!r})",
}


def _name(device: torch.device) -> str:
    return kind_of(device) if device == ABSENT else str(device)


def _constants(module: GraphModule) -> list[str]:
    """Tensors and graphs that the graph holds as attributes, as definitions in front of it."""
    lines: list[str] = []
    for node in module.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(module)
        lines += _subgraph(node.name, value) if isinstance(value, GraphModule) else [f"{node.name} = {_tensor(value)}"]
    return lines


def _subgraph(name: str, module: GraphModule) -> list[str]:
    """A branch or a loop body, as a function."""
    holders = ", ".join(n.name for n in module.graph.find_nodes(op="placeholder"))
    (result,) = module.graph.output_node().args
    body = _body(module, backward=False)
    return [*_constants(module), f"\ndef {name}({holders}):", *body, f"    return {_literal(result)}\n"]


def _tensor(value: Any) -> str:
    """A tensor by its elements; one that has none (it was built under fake tensors) by its shape."""
    if not isinstance(value, torch.Tensor):
        raise CompileError(f"the graph holds a {type(value).__name__}, which cannot be written as Python.")
    device = "" if kind_of(value.device) == "cpu" else f", device={_name(value.device)!r}"
    if isinstance(value, FakeTensor):
        return f"torch.empty({list(value.shape)}, dtype={value.dtype}{device})  # values unknown: a fake tensor"
    return f"torch.tensor({_literal(value.tolist())}, dtype={value.dtype}{device})"
