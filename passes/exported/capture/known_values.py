"""Known values: results that depend on no input have a real tensor beside them during the trace.

Models read such values in Python: transformers asks `(position_ids.diff() == 1).all()` once per
forward. A trace cannot answer, because its tensors are fake. `KnownValues` runs the same operations
on real tensors and answers from them. It never answers about inputs, parameters, buffers or random
numbers, except for the inputs that the user declares static.
"""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.exported.capture.source_lines import LINE, users_line
from zbcompile.passes.exported.capture.unsupported import (
    HAS_A_GENERATOR,
    NO_INPUT,
    READS_A_TRAINED_TENSOR,
    READS_A_VALUE,
    WRITES_A_PLAIN_TENSOR,
    at,
    static,
)
from zbcompile.passes.exported.torch_private import (
    READ_SCALAR,
    OpOverload,
    TorchDispatchMode,
    draws_numbers,
    is_unlifted_constant,
    pytree,
    real_mode,
    replaced_tolist,
    set_node_annotation,
    storage_key,
    written_arguments,
)

aten = torch.ops.aten
# Kernels that draw a number per element in the order of memory. Functionalization would replace
# them by operators that draw in the order of indices.
_FILLED_IN_MEMORY_ORDER = (aten.bernoulli_.float, aten.uniform_.default)
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
MAX_ELEMENTS = 1 << 24  # larger results are not computed for real


class KnownValues(TorchDispatchMode):
    """A dispatch mode around a model's forward and its loss.

    Args:
        static_values: Real tensors by the traced input whose values the model may read.
    """

    supports_higher_order_operators = True  # torch.cond, flex_attention

    def __init__(self) -> None:
        super().__init__()
        self._real = WeakTensorKeyDictionary()
        self._inputs = WeakTensorKeyDictionary()  # paths of the batch inputs that it depends on
        self.question: frozenset[str] = frozenset()  # those of the last value that was asked for
        self._overwritten: set[int] = set()  # storages whose real values are out of date
        self._protected: dict[int, str] = {}
        self.draws = 0  # operations so far that may have drawn random numbers
        self._tolist: AbstractContextManager[None] | None = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo, by which torch.cond traces its branches, runs under such modes only."""
        return True

    def __enter__(self) -> "KnownValues":
        self._tolist = replaced_tolist(self._value_for_python)
        self._tolist.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        assert self._tolist is not None
        self._tolist.__exit__(kind, error, traceback)

    def declare(self, tensor: Tensor, path: str, value: Tensor | None) -> None:
        """Declares a traced batch input. `value` is its known value if it is a static input."""
        self._inputs[tensor] = frozenset({path})
        if value is not None:
            self._real[tensor] = value

    def protect(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes a write into one of these tensors an error. They belong to Python, not to the step,
        so a graph could not write them."""
        self._protected = {storage_key(tensor): path for path, tensor in tensors.items()}

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the real value of a traced tensor on the CPU, or None if it is not known."""
        if is_unlifted_constant(tensor):
            return None if tensor.is_meta else tensor
        value = self._real.get(tensor)
        if value is None or storage_key(value) in self._overwritten:
            return None
        return value  # type: ignore[no-any-return]

    def _value_for_python(self, tensor: Tensor) -> Tensor | None:
        value = self.value_of(tensor)
        if value is None:
            self.question = self._inputs_of([tensor])
        return value

    def number_of(self, tensor: Tensor) -> Any:
        """Returns the number that a tensor with one element holds.

        Raises:
            CaptureError: It is not known.
        """
        value = self.value_of(tensor)
        if value is None:
            place = at(users_line(sys._getframe(1)))
            remedy = static(self._inputs_of([tensor]))
            raise CaptureError(READS_A_VALUE.format(at=place, static=remedy))
        with real_mode():
            return value.item()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        line = users_line(sys._getframe(1))
        set_node_annotation(LINE, line)
        if not isinstance(func, OpOverload):  # its results are not known
            self.draws += 1
            return func(*args, **kwargs)
        self._refuse_writes(func, args, kwargs, line)
        if draws_numbers(func, args, kwargs):
            self.draws += 1
            if isinstance(kwargs.get("generator"), torch.Generator):
                raise CaptureError(HAS_A_GENERATOR.format(line=line))
        if func in _FILLED_IN_MEMORY_ORDER:
            func(_in_memory_order(args[0]), *args[1:], **kwargs)
            return args[0]
        if func in _INDEXING:
            args = (args[0], self._without_known_masks(args[1]), *args[2:])
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if (
            torch.is_grad_enabled()
            and func is not aten.detach.default
            and any(tensor.requires_grad and is_unlifted_constant(tensor) for tensor in tensors)
        ):
            raise CaptureError(READS_A_TRAINED_TENSOR.format(line=line))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or any(self.value_of(tensor) is None for tensor in tensors):
            return self._run_unknown(func, args, kwargs, tensors, is_random)
        if tensors and func is READ_SCALAR:
            return self._run(func, args, kwargs)
        if tensors and torch.Tag.dynamic_output_shape in func.tags:  # nonzero, unique
            return pytree.tree_map_only(Tensor, self._constant, self._run(func, args, kwargs))
        result = func(*args, **kwargs)
        traced = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if traced and all(tensor.numel() <= MAX_ELEMENTS for tensor in traced):
            real = pytree.tree_leaves(self._run(func, args, kwargs))
            values = [leaf for leaf in real if isinstance(leaf, Tensor)]
            for tensor, value in zip(traced, values, strict=True):
                self._real[tensor] = value
        else:
            self._forget_written(func, args, kwargs)
        return result

    def _run_unknown(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        is_random: bool,
    ) -> Any:
        """Runs an operator on values that are not known, and notes what its results depend on."""
        inputs = self._inputs_of(tensors) | ({NO_INPUT} if is_random else set())
        if func is READ_SCALAR or torch.Tag.dynamic_output_shape in func.tags:
            masks = [tensor for tensor in tensors if not tensor.is_floating_point()]
            if any(tensor in self._inputs for tensor in masks or tensors):
                self.question = self._inputs_of(masks or tensors)
        result = func(*args, **kwargs)
        self._forget_written(func, args, kwargs)
        for leaf in pytree.tree_leaves((result, written_arguments(func, args, kwargs))):
            if isinstance(leaf, Tensor):
                self._inputs[leaf] = inputs
        return result

    def _without_known_masks(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Returns indices with the positions of known masks in place of the masks.

        The shape of the result is then known, too.
        """
        result: list[Tensor | None] = []
        for index in indices:
            value = None
            if index is not None and index.dtype is torch.bool:
                value = self.value_of(index)
            if value is None:
                result.append(index)
                continue
            with real_mode():
                positions = value.nonzero(as_tuple=True)
            result += map(self._constant, positions)
        return result

    def _inputs_of(self, tensors: list[Tensor]) -> frozenset[str]:
        """Returns the batch inputs that the unknown ones among these tensors depend on."""
        unknown = [tensor for tensor in tensors if self.value_of(tensor) is None]
        other = frozenset({NO_INPUT})
        return frozenset().union(*(self._inputs.get(tensor, other) for tensor in unknown))

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator on the known values of its operands, on the CPU."""
        with real_mode():
            args, kwargs = pytree.tree_map_only(Tensor, self.value_of, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)

    def _constant(self, value: Tensor) -> Tensor:
        """Returns a traced constant with this value."""
        tensor: Tensor = aten.lift_fresh_copy.default(value)
        self._real[tensor] = value
        return tensor

    def _refuse_writes(self, func: OpOverload, args: Any, kwargs: Any, line: str) -> None:
        for leaf in pytree.tree_leaves(written_arguments(func, args, kwargs)):
            if isinstance(leaf, Tensor) and is_unlifted_constant(leaf):
                path = self._protected.get(storage_key(leaf))
                if path is not None:
                    raise CaptureError(WRITES_A_PLAIN_TENSOR.format(path=path, line=line))

    def _forget_written(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        for leaf in pytree.tree_leaves(written_arguments(func, args, kwargs)):
            value = self._real.get(leaf) if isinstance(leaf, Tensor) else None
            if value is not None:
                self._overwritten.add(storage_key(value))


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a view of a dense tensor whose dimensions are sorted by stride."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    view = tensor.permute(order)
    return view if view.is_contiguous() and not tensor.is_contiguous() else tensor
