"""What a node costs: floating-point operations and bytes moved, counted on fake tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from zbcompile.passes.torch_private import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    FakeTensorMode,
    OpOverload,
    is_composite,
    storage_key,
)


@dataclass(frozen=True)
class Machine:
    """Nominal speeds that turn operations and bytes into one number. Only their ratio moves a cut."""

    flops_per_second: float
    bytes_per_second: float


# One CPU core with AVX2 in fp32; one data-centre GPU in bf16.
CPU = Machine(5e10, 1e10)
GPU = Machine(4e14, 3e12)


def machine_for(device: str) -> Machine:
    return CPU if device == "cpu" else GPU


def _attention_forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    *batch, tokens, width = query
    count = 1
    for size in batch:
        count *= size
    return 2 * count * tokens * key[-2] * (width + value[-1])


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return _attention_forward(query, key, value) * 5 // 2  # scores again, then the gradients of scores, q, k and v


# torch's flop counter (2.11-2.13) has no formula for the CPU's attention kernel.
_MISSING = {
    CPU_ATTENTION: _attention_forward,
    CPU_ATTENTION_BACKWARD: _attention_backward,
}


def count_flops(module: GraphModule, mode: FakeTensorMode) -> dict[Node, int]:
    """Floating-point operations of every call (a multiply-add is two), as torch's counter has them.

    From the values in the graph, without running it, unless an operation is made of others or calls a graph.
    """
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    if all(map(_is_elementary, calls)):
        formulas = _counter().flop_registry  # with those that somebody has registered for operators of his own
        return {node: _flops_of(node, formulas) for node in calls}
    return count_flops_by_run(module, mode)


def _is_elementary(node: Node) -> bool:
    return node.target is getitem or (isinstance(node.target, OpOverload) and not is_composite(node.target))


def _counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=_MISSING)


def _flops_of(node: Node, formulas: Mapping[Any, Callable[..., int]]) -> int:
    formula = formulas.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


class _Flops(Interpreter):
    def __init__(self, module: GraphModule, counter: FlopCounterMode) -> None:
        super().__init__(module)
        self.counter = counter
        self.counts: dict[Node, int] = {}

    def run_node(self, n: Node) -> Any:
        before = self.counter.get_total_flops()
        value = super().run_node(n)
        if n.op == "call_function":
            self.counts[n] = self.counter.get_total_flops() - before
        return value


def count_flops_by_run(module: GraphModule, mode: FakeTensorMode) -> dict[Node, int]:
    """The same by one run on fake tensors."""
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with mode, torch.no_grad(), _counter() as counter:
        inputs = [_fresh(value) for value in values]
        runner = _Flops(module, counter)
        runner.run(*inputs, enable_io_processing=False)
    return runner.counts


def _fresh(value: Any) -> Any:
    """The same metadata without the history: a value may come from another fake tensor mode."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's value."""
    return [v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, torch.Tensor)]


def bytes_moved(node: Node) -> int:
    """Bytes read and written; 0 for a node whose result shares its input's storage (a view)."""
    reads = {storage_key(t): t for arg in node.all_input_nodes for t in tensors_of(arg.meta.get("val"))}
    writes = {storage_key(t): t for t in tensors_of(node.meta.get("val"))}
    if not writes or set(writes) & set(reads):
        return 0
    return sum(t.untyped_storage().nbytes() for t in (*reads.values(), *writes.values()))


def storage_key_of(value: torch.Tensor) -> int:
    """Equal for tensors that share a storage."""
    return storage_key(value)


def storage_bytes(values: list[torch.Tensor], without: set[int] = frozenset()) -> int:  # type: ignore[assignment]
    """Bytes of the distinct storages behind `values`, views counted once, those in `without` not at all."""
    storages = {storage_key(v): v.untyped_storage().nbytes() for v in values}
    return sum(size for key, size in storages.items() if key not in without)


def is_view(node: Node) -> bool:
    """Whether a node's result shares its input's storage."""
    return node.op == "call_function" and bool(tensors_of(node.meta.get("val"))) and bytes_moved(node) == 0
