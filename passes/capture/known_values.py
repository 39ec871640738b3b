"""Known values: real tensors of results that depend on no input, for the length of a trace.

Models read such values in Python: transformers asks `(position_ids.diff() == 1).all()` once per
forward. A trace cannot answer, because its tensors are fake. `KnownValues` runs the same operations
on real tensors and answers from them. It never answers about inputs, parameters, buffers or random
numbers, except for the inputs that the user declares static.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zbcompile.passes.capture.refusals import Questions, has_dynamic_shape
from zbcompile.passes.capture.unsupported import (
    HAS_A_GENERATOR,
    NO_INPUT,
    READS_A_TRAINED_TENSOR,
    READS_A_VALUE,
    WRITES_A_PLAIN_TENSOR,
    at,
    static,
)
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import tensors_of
from zbcompile.passes.graph.row_exchanges import RoutedExchanges
from zbcompile.passes.graph.source_location import LINE, users_line
from zbcompile.passes.torch_private import (
    READ_SCALAR,
    OpOverload,
    TorchDispatchMode,
    is_unlifted_constant,
    pytree,
    real_mode,
    set_node_annotation,
    storage_key,
    written_arguments,
)

aten = torch.ops.aten
# Kernels that draw a number per element in the order of memory. Functionalization would replace
# them by operators that draw in the order of indices.
_FILLED_IN_MEMORY_ORDER = (aten.bernoulli_.float, aten.uniform_.default)
MAX_ELEMENTS = 1 << 24  # larger results are not computed for real


class KnownValues(TorchDispatchMode):
    """A dispatch mode around a model's forward and its loss.

    Args:
        questions: Receives the inputs whose values are not known and asked for.
    """

    supports_higher_order_operators = True  # torch.cond, flex_attention

    def __init__(self, questions: Questions) -> None:
        super().__init__()
        self.questions = questions
        self._real = WeakTensorKeyDictionary()
        self.routed = RoutedExchanges(lambda tensor: self.value_of(tensor) is None)
        self._overwritten: set[int] = set()  # storages whose real values are out of date
        self._protected: dict[int, str] = {}
        self._inputs = WeakTensorKeyDictionary()  # paths of the batch inputs that it depends on

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo, by which torch.cond traces its branches, runs under such modes only."""
        return True

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

    def value_for_python(self, tensor: Tensor) -> Tensor | None:
        """Returns the value of a tensor that Python reads, None if it is not known. Then the inputs
        that it depends on are noted, for the error."""
        value = self.value_of(tensor)
        if value is None:
            self.questions.value = self._inputs_of([tensor])
        return value

    def numbers_of(self, values: list[Any] | tuple[Any, ...]) -> tuple[Any, torch.dtype]:
        """Returns a list with numbers in place of its tensors, and the dtype that torch.tensor
        gives to the list.

        Raises:
            CaptureError: The value of a tensor is not known.
        """
        tensors = tensors_of(values)
        if any(self.value_of(tensor) is None for tensor in tensors):
            place, remedy = at(users_line(sys._getframe(1))), static(self._inputs_of(tensors))
            raise CaptureError(READS_A_VALUE.format(at=place, static=remedy))
        with real_mode():
            real = pytree.tree_map_only(Tensor, self.value_of, values)
            return pytree.tree_map_only(Tensor, Tensor.item, real), torch.tensor(real).dtype

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
        if not isinstance(func, OpOverload):  # calls graphs, such as torch.cond
            return func(*args, **kwargs)
        written = tensors_of(written_arguments(func, args, kwargs))
        self._refuse_writes(written, line)
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise CaptureError(HAS_A_GENERATOR.format(line=line))
        if func in _FILLED_IN_MEMORY_ORDER:
            func(_in_memory_order(args[0]), *args[1:], **kwargs)
            return args[0]
        tensors = tensors_of((args, kwargs))
        if (
            torch.is_grad_enabled()
            and func is not aten.detach.default
            and any(tensor.requires_grad and is_unlifted_constant(tensor) for tensor in tensors)
        ):
            raise CaptureError(READS_A_TRAINED_TENSOR.format(line=line))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or any(self.value_of(tensor) is None for tensor in tensors):
            func, args = self._without_known_masks(func, args)
            inputs = self._inputs_of(tensors) | ({NO_INPUT} if is_random else set())
            self._note_question(func, tensors)
            result = func(*args, **kwargs)
            self._forget(written)
            if torch.Tag.dynamic_output_shape in func.tags and has_dynamic_shape(result):
                self.questions.shape_line = self.questions.shape_line or line
            for tensor in tensors_of((result, written)):
                self._inputs[tensor] = inputs
            return result
        if tensors and func is READ_SCALAR:
            return self._run(func, args, kwargs)
        if tensors and torch.Tag.dynamic_output_shape in func.tags:  # nonzero, unique
            return pytree.tree_map_only(Tensor, self._constant, self._run(func, args, kwargs))
        result = func(*args, **kwargs)
        traced = tensors_of(result)
        if traced and all(tensor.numel() <= MAX_ELEMENTS for tensor in traced):
            values = tensors_of(self._run(func, args, kwargs))
            for tensor, value in zip(traced, values, strict=True):
                self._real[tensor] = value
        else:
            self._forget(written)
        return result

    def _note_question(self, func: OpOverload, tensors: list[Tensor]) -> None:
        """Notes the inputs that a number or a shape depends on which an operator reads."""
        if func is READ_SCALAR:
            self.questions.value = self._inputs_of(tensors)
        elif torch.Tag.dynamic_output_shape in func.tags and not self.questions.shape_line:
            masks = [tensor for tensor in tensors if not tensor.dtype.is_floating_point]
            self.questions.shape = self._inputs_of(masks or tensors)

    def _inputs_of(self, tensors: list[Tensor]) -> frozenset[str]:
        """Returns the batch inputs that the unknown ones among these tensors depend on."""
        unknown = [tensor for tensor in tensors if self.value_of(tensor) is None]
        default = frozenset({NO_INPUT})
        return frozenset().union(*(self._inputs.get(tensor, default) for tensor in unknown))

    def _without_known_masks(
        self, func: OpOverload, args: tuple[Any, ...]
    ) -> tuple[OpOverload, tuple[Any, ...]]:
        """Returns a call in which masks with known values are the places of their True entries."""
        if func is aten.masked_select.default:
            mask, shape = self.value_of(args[1]), torch.broadcast_shapes(*(x.shape for x in args))
            if mask is not None:
                with real_mode():
                    mask = mask.expand(shape)
                expanded = aten.expand.default(args[0], shape)
                return aten.index.Tensor, (expanded, self._places(mask, shape))
        if func is aten.index.Tensor:
            places, dim = list[Tensor | None](), 0
            for index in args[1]:
                places += self._places(index, args[0].shape[dim:])
                dim = len(places)
            return func, (args[0], places)
        return func, args

    def _places(self, index: Tensor | None, shape: torch.Size) -> list[Tensor | None]:
        """Returns the indices of the True entries of a mask with known values, else the index."""
        if index is None or not index.ndim or index.shape != shape[: index.ndim]:
            return [index]
        mask = self.value_of(index) if index.dtype == torch.bool else None
        if mask is None:
            return [index]
        with real_mode():
            return [*map(self._constant, mask.nonzero().unbind(1))]

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator on the known values of its operands, on the CPU."""
        with real_mode():
            args, kwargs = pytree.tree_map_only(Tensor, self.value_of, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)

    def _constant(self, value: Tensor) -> Tensor:
        """Returns a traced constant with this value and its strides."""
        order = _order_in_memory(value)
        with real_mode():
            dense = value.permute(order)
        tensor: Tensor = aten.lift_fresh_copy.default(dense)  # contiguous
        if order != sorted(order):
            tensor = aten.permute.default(tensor, [order.index(dim) for dim in sorted(order)])
        self._real[tensor] = value
        return tensor

    def _refuse_writes(self, written: list[Tensor], line: str) -> None:
        for tensor in filter(is_unlifted_constant, written):
            path = self._protected.get(storage_key(tensor))
            if path is not None:
                raise CaptureError(WRITES_A_PLAIN_TENSOR.format(path=path, line=line))

    def _forget(self, written: list[Tensor]) -> None:
        for tensor in written:
            value = self._real.get(tensor)
            if value is not None:
                self._overwritten.add(storage_key(value))


def _order_in_memory(tensor: Tensor) -> list[int]:
    """Returns the dimensions of a tensor, those of large strides first."""
    return sorted(range(tensor.ndim), key=lambda dim: -tensor.stride()[dim])


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a view of a dense tensor whose dimensions are sorted by stride."""
    view = tensor.permute(_order_in_memory(tensor))
    return view if view.is_contiguous() and not tensor.is_contiguous() else tensor
