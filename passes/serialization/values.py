"""The metadata of a graph's values - shapes, types, strides, and which of them share memory - as data, and back.

The runtime needs this: a buffer can be reused once no later pass reads a view of it. Read back, values are fake
tensors that alias as the originals did.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import is_getitem, output_values
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.serialization.arguments import device_from_data
from zbcompile.passes.torch_names import dtype_named
from zbcompile.passes.torch_private import (
    FakeTensorMode,
    HigherOrderOperator,
    UnsupportedOperatorException,
    fake_of,
    pytree,
    storage_key,
)


@dataclass
class ValueWriter:
    """Numbers the storages of a graph in order of appearance; `bytes[i]` is the size of storage i."""

    numbers: dict[int, int] = field(default_factory=dict)
    bytes: list[int] = field(default_factory=list)

    def write(self, value: Any) -> Any:
        """A tensor as [dtype, device, shape, strides, storage, offset], several as a list of these, others as None."""
        if isinstance(value, tuple | list):
            return {"values": [self.write(each) for each in value]}
        if not isinstance(value, torch.Tensor):
            return None
        dtype = str(value.dtype).removeprefix("torch.")
        shape, stride = list(map(int, value.shape)), list(map(int, value.stride()))
        return [dtype, value.device.type, shape, stride, self._number(value), int(value.storage_offset())]

    def _number(self, value: torch.Tensor) -> int:
        key = storage_key(value)
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.bytes.append(int(value.untyped_storage().nbytes()))
        return self.numbers[key]


def _shapes_alone() -> FakeTensorMode:
    """Returns a mode that runs operations on shapes alone, and never a kernel."""
    return FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)


@dataclass
class ValueReader:
    """Makes fake tensors from what a `ValueWriter` wrote."""

    bytes: list[int]
    device: torch.device
    mode: FakeTensorMode = field(default_factory=_shapes_alone)
    storages: dict[int, torch.Tensor] = field(default_factory=dict)

    def read(self, data: Any) -> Any:
        """The value; None if there was no tensor."""
        if data is None:
            return None
        if isinstance(data, dict):
            return tuple(self.read(each) for each in data["values"])
        name, kind, shape, stride, number, offset = data
        dtype = dtype_named(name)
        value = torch.as_strided(self._storage(number, dtype).view(dtype), shape, stride, offset)
        return fake_of(value, self.mode, device_from_data(kind, self.device))

    def _storage(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        if number not in self.storages:
            count = self.bytes[number] // dtype.itemsize
            self.storages[number] = torch.empty(count, dtype=dtype, device="meta")
        return self.storages[number]


def require_true_values(module: GraphModule, mode: FakeTensorMode) -> None:
    """Run a graph on its fake inputs. Raises CompileError for an operation that makes a different dtype, shape or size
    from what is written, or whose size depends on data."""
    found: dict[Node, Any] = {}
    with mode, torch.no_grad():
        for node in module.graph.nodes:
            written = node.meta.get("val")
            if node.op == "get_attr":
                value = getattr(module, node.target)
                found[node] = value if isinstance(value, torch.nn.Module) else written
                _require_same(node, value, written)
            elif node.op == "call_function":
                found[node] = _made(node, found)
                if not _is_plain(found[node]):
                    raise CompileError(f"{node.name} ({node.target}) makes something else than dense tensors.")
                _require_same(node, found[node], written)
            else:
                found[node] = written


def _made(node: Node, found: dict[Node, Any]) -> Any:
    """The result of an operation."""
    args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
    try:
        if isinstance(node.target, HigherOrderOperator):
            _require_branches(node, *args)
            return node.meta.get("val")
        if is_getitem(node):
            return _item(*args)
        made = node.target(*args, **kwargs)  # type: ignore[operator]
        _require_inside(made, pytree.tree_leaves((args, kwargs)))
        return made
    except UnsupportedOperatorException:  # it has no shape function
        return node.meta.get("val")
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise CompileError(f"{node.name} ({node.target}) cannot run on what is written: {first}") from None


def _require_branches(node: Node, question: Any, one: Any, other: Any, operands: Any) -> None:
    """Require that both branches of a `cond` take its operands and return its results."""
    if not isinstance(question, torch.Tensor | bool) or not isinstance(operands, tuple | list):
        raise TypeError("it asks or gives something else than tensors")
    results = list(map(_form, tensors_of(node.meta.get("val"))))
    for branch in (one, other):
        if not isinstance(branch, GraphModule):
            raise TypeError("a branch is no graph")
        takes = [each.meta["val"] for each in branch.graph.find_nodes(op="placeholder")]
        makes = [each.meta["val"] for each in output_values(branch.graph) if isinstance(each, Node)]
        if [list(map(_form, takes)), list(map(_form, makes))] != [list(map(_form, operands)), results]:
            raise TypeError("a branch takes or makes other tensors")


def _require_inside(made: Any, given: list[Any]) -> None:
    """Refuse a result that reaches beyond the tensor that it views, or beyond its own memory. Neither compiled code nor
    as_strided on shapes checks this."""
    for each in tensors_of(made):
        if each.layout is not torch.strided or not each.numel():
            continue
        viewed = [one for one in tensors_of(given) if storage_key(one) == storage_key(each)]
        ours, reaches = _reach(each), list(map(_reach, viewed))
        reaches = reaches or [(0, int(each.untyped_storage().nbytes()))]
        if not any(first <= ours[0] and ours[1] <= last for first, last in reaches):
            raise ValueError("its result reaches out of the tensor that it is a view of")


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of a tensor's bytes in its storage: the first, and the one after the last."""
    last = tensor.storage_offset() + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int(tensor.storage_offset() * tensor.itemsize), int((last + 1) * tensor.itemsize)


def _item(values: Any, index: Any) -> Any:
    """One of the results of an operation: all that getitem may do."""
    if not isinstance(values, tuple | list) or type(index) is not int:
        raise TypeError(f"it takes {index!r} out of {type(values).__name__}, not one of several results")
    return values[index]


def _is_plain(value: Any) -> bool:
    """Whether an operation may return this: tensors and numbers, single or in a tuple."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return dense or value is None or isinstance(value, bool | int | float)


def _require_same(node: Node, value: Any, written: Any) -> None:
    ours, theirs = tensors_of(value), tensors_of(written)
    if list(map(_form, ours)) != list(map(_form, theirs)):
        raise CompileError(f"{node.name} ({node.target}) is not of the dtype and shape that are written for it.")


def _form(value: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return value.dtype, value.shape
