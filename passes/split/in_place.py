"""In-place operations below autograd: composite operations (attention with dropout, recurrent cells) trace into them.

Split between F and B, a graph with a write in it would read what F has overwritten, so none may stay. A write into a
fresh tensor that nothing else reads is the ordinary operation under another name. For any other write the graph must be
traced again with copies. Their strides may differ from those of what they replace, and kernels choose their order of
summation, and vectorised formulas, by strides: `calculate_alike` tells whether that changes any bit.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from zbcompile.passes.graph.storage import is_view, tensors_of
from zbcompile.passes.torch_private import arguments_of, is_in_place, nowhere_traced

aten = torch.ops.aten
ELEMENTS = 1 << 14  # results compared, at least
TRIALS = (4, 256)

# Without the underscore: what gives each element the same bits in any layout, because it moves it or rounds once.
_EXACT = frozenset(
    {
        *("copy", "clone", "_to_copy", "lift_fresh_copy", "fill", "zero", "masked_fill", "where", "cat", "stack"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros"),
        *("ones", "ones_like", "new_ones", "full", "full_like", "new_full", "add", "sub", "mul", "div", "neg"),
        *("as_strided_scatter", "slice_scatter", "select_scatter", "slice_backward", "select_backward"),
        *("constant_pad_nd", "bitwise_not", "logical_not", "eq", "ne", "lt", "le", "gt", "ge"),
    }
)


def in_place_operation(module: GraphModule) -> str:
    """The name of an operation of the graph that writes into its input; empty if there is none."""
    return next((str(node.target) for node in module.graph.nodes if is_in_place(node.target)), "")


def replace_writes_into_fresh(module: GraphModule) -> None:
    """Replace, in `module`, every write into a contiguous tensor that only the write reads: same values, same bits."""
    replaced: set[Node] = set()
    for node in module.graph.nodes:
        if is_in_place(node.target) and _is_fresh(node.args[0], replaced):
            ordinary = _ordinary(node.target)
            if ordinary is not None:
                node.args = _with_defaults(node)  # bernoulli_ has one for p, bernoulli has none
                node.target = ordinary
                replaced.add(node)
    if replaced:
        module.recompile()


def _is_fresh(written: Any, replaced: set[Node]) -> bool:
    """Whether a tensor aliases nothing and is contiguous (a copy of another layout may run through another kernel)."""
    made_here = isinstance(written, Node) and written.op == "call_function" and len(written.users) == 1
    if not made_here or not isinstance(written.meta.get("val"), torch.Tensor):
        return False
    own = written in replaced or not (is_view(written) or is_in_place(written.target))
    return own and written.meta["val"].is_contiguous()


def _ordinary(target: Any) -> Any:
    """The operation without the underscore, such as aten.pow.Tensor_Scalar for aten.pow_.Scalar; None if none."""
    packet = getattr(aten, str(target).split(".")[1].removesuffix("_"), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet else []
    return next((found for found in overloads if _types(found) == _types(target)), None)


def _types(target: Any) -> list[str]:
    return [str(declared.type) for declared in arguments_of(target)]


def _with_defaults(node: Node) -> tuple[Any, ...]:
    declared = arguments_of(node.target)[len(node.args) :]  # type: ignore[arg-type]
    return (*node.args, *(argument.default_value for argument in declared if not argument.kwarg_only))


def calculate_alike(one: GraphModule, other: GraphModule) -> bool:
    """Whether two traces of one function, with writes and without, give the same bits: they run the same kernels in
    order, and return the same layouts, and where a kernel works on other layouts, its bits prove equal in trials."""
    returned = [[_layout(each) for each in module.graph.output_node().all_input_nodes] for module in (one, other)]
    return returned[0] == returned[1] and _equal(list(_calculations(one)), list(_calculations(other)))


def _equal(ones: list[Node], others: list[Node]) -> bool:
    tried: set[str] = set()
    for mine, their in itertools.zip_longest(ones, others):
        if mine is None or their is None or _name(mine.target) != _name(their.target):
            return False
        texts = (_call(mine), _call(their))
        if texts[0] != texts[1] and str(texts) not in tried and not equal_in_trials(mine, their):
            return False
        tried.add(str(texts))
    return True


def _calculations(module: GraphModule) -> Iterator[Node]:
    """The operations of a graph whose bits may depend on layouts."""
    return (node for node in module.graph.nodes if node.op == "call_function" and not _is_exact(node))


def _is_exact(node: Node) -> bool:
    if is_view(node) or _name(node.target) == "<built-in function getitem>" or not _has_fractions(node):
        return True
    return _name(node.target) in _EXACT and bool(node.kwargs.get("alpha", 1) == 1)  # some kernels round a + 3 * b once


def _has_fractions(node: Node) -> bool:
    """Whether an operation reads or makes numbers that are rounded."""
    values = [value for each in (node, *node.all_input_nodes) for value in tensors_of(each.meta.get("val"))]
    return any(value.is_floating_point() or value.is_complex() for value in values)


def _name(target: Any) -> str:
    return str(target).removeprefix("aten.").split(".")[0].removesuffix("_").removesuffix("_functional")


def _call(node: Node) -> str:
    """An operation with the layouts on which it works, and that of what it makes."""
    return f"{map_arg((node.args, node.kwargs), _layout)} {_layout(node)[:1]}"  # type: ignore[arg-type]


def _layout(node: Node) -> Any:
    values = tensors_of(node.meta.get("val"))
    return [(value.dtype, value.shape, value.stride()) for value in values]


def equal_in_trials(one: Node, other: Node) -> bool:
    """Whether the calls `one` and `other` of an aten operator, or of its forms that do and do not work in place, give
    equal bits for equal random values, each with operands of its own layout. A kernel that vectorises other elements,
    or sums in another order, rounds some per cent of random numbers differently."""
    if _shapes(one) != _shapes(other) or not str(one.target).startswith("aten."):
        return False
    made = tensors_of(one.meta["val"])[0]
    count = min(max(ELEMENTS // max(made.numel(), 1), TRIALS[0]), TRIALS[1])
    with nowhere_traced(), torch.no_grad(), torch.random.fork_rng():
        return all(_same_bits(one, other, seed) for seed in range(count))


def _shapes(node: Node) -> Any:
    return [(v.dtype, v.shape) for read in node.all_input_nodes for v in tensors_of(read.meta["val"])]


def _same_bits(one: Node, other: Node, seed: int) -> bool:
    ours, theirs = (tensors_of(_run(node, seed)) for node in (one, other))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=False))


def _run(node: Node, seed: int) -> Any:
    torch.manual_seed(seed)
    args, kwargs = map_arg((node.args, node.kwargs), lambda read: _random(read.meta["val"]))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _random(like: Any) -> Any:
    """Random numbers with the layout of `like`: the same for one seed, whatever the layout."""
    if not isinstance(like, torch.Tensor):
        return like
    once = [1 if stride == 0 else size for size, stride in zip(like.shape, like.stride(), strict=True)]
    held = torch.empty_strided(once, like.stride(), dtype=like.dtype, device=like.device)
    return held.copy_(torch.randn(once) if like.is_floating_point() else torch.zeros(once)).expand(like.shape)
