"""Questions that forward asks about the values of its inputs, such as `if mask.all():`.

Capture takes eager's answer for the microbatch at hand. The tensor that was asked becomes an output of the traced
graph, from which `zbcompile.passes.capture.guards` cuts what every other microbatch is asked.
"""

import contextlib
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.capture.data_dependent_shapes import with_known_size
from zbcompile.passes.capture.deferred_checks import require_fit, required_answer
from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.roles import Kind
from zbcompile.passes.graph.source_location import calling_line
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.torch_private import (
    FakeTensor,
    OpOverload,
    is_in_place,
    is_part_of_vmap,
    nowhere_traced,
    pytree,
    storage_key,
    traced_node,
)

OWN_LIBRARY = "zbcompile"
UNKNOWN = object()


class InputValues:
    """Values by node. `known` are those of the inputs; a node that is not in `values` depends on more than inputs, one
    that is UNKNOWN there could not be computed."""

    def __init__(self, known: Mapping[Node, Any]) -> None:
        self.values: dict[Node, Any] = dict(known)
        self._other: set[Node] = set()  # depends on a parameter, a buffer or a random number
        self._memory: set[int] = set()  # the storages of these: an operation in place may have written into them

    def of(self, node: Node, root: torch.nn.Module) -> Any:
        """The value of a node of the graph that is being traced; None if it depends on more than inputs."""
        with nowhere_traced(), torch.no_grad():
            for each in node.graph.nodes:
                if each not in self.values and each not in self._other:
                    self._visit(each, root)
        return None if self._is_other(node) else self.values[node]

    def _visit(self, node: Node, root: torch.nn.Module) -> None:
        if self._is_computable(node, root):
            self.values[node] = self._computed(node, root)
            return
        self._other.add(node)
        written = [node, *node.all_input_nodes] if is_in_place(node.target) else [node]
        for each in written:
            self._memory |= set(_storages(each))

    def _is_computable(self, node: Node, root: torch.nn.Module) -> bool:
        if node.op == "get_attr":
            return isinstance(getattr(root, str(node.target), None), torch.Tensor)
        if node.op != "call_function" or is_random(node) or any(map(self._is_other, node.all_input_nodes)):
            return False
        if isinstance(node.target, OpOverload):
            return node.target.namespace != OWN_LIBRARY  # such an operator is the call of an autograd.Function
        return node.target is operator.getitem or is_part_of_vmap(node.target)

    def _is_other(self, node: Node) -> bool:
        return node not in self.values or not self._memory.isdisjoint(_storages(node))

    def _computed(self, node: Node, root: torch.nn.Module) -> Any:
        if node.op == "get_attr":
            return getattr(root, str(node.target))
        if any(self.values[each] is UNKNOWN for each in node.all_input_nodes):
            return UNKNOWN
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)  # type: ignore[misc,arg-type]
        try:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # answers of another rank's microbatch may lead where this one's values do not fit
            return UNKNOWN


def _storages(node: Node) -> Iterator[int]:
    for tensor in tensors_of(node.meta.get("val")):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # values inside a vmap have no storage
            yield storage_key(tensor)


Answer = Any  # a bool or a number


_Make = Callable[..., torch.Tensor]
_T = torch.Tensor
_EQUAL = (_T.equal, torch.equal)
DECISIONS: Mapping[Any, _Make] = {  # what is asked of a tensor -> the tensor that has the answer
    **dict.fromkeys((_T.__bool__, _T.is_nonzero, torch.is_nonzero), lambda tensor: tensor.reshape(()) != 0),
    **dict.fromkeys(_EQUAL, lambda one, other: (one == other).all()),
    **dict.fromkeys((_T.allclose, torch.allclose), lambda *args, **kwargs: torch.isclose(*args, **kwargs).all()),
    _T.__contains__: lambda tensor, element: (tensor == element).any(),
}
NUMBERS: Mapping[Any, tuple[_Make, Callable[[Any], Any]]] = {  # a trace reads lists number by number
    read: (lambda tensor: tensor.reshape(()).clone(), convert)
    for read, convert in ((_T.item, lambda value: value), (_T.__int__, int), (_T.__index__, int), (_T.__float__, float))
}


@dataclass(frozen=True)
class ForeignAnswers:
    """The answers of another rank, or for another shape, and whether the model got the numbers that it read when it
    asked for them."""

    with_numbers: bool
    answers: tuple[Answer, ...]


class Check(NamedTuple):
    """A check of a step: `kind` says what `holds`, the result of the graph, stands for; `lines` are the Python lines
    that asked."""

    kind: Kind
    holds: torch.Tensor
    lines: str


@dataclass
class Questions:
    """The questions of one trace. `example` is the microbatch at hand, flat; `given` are answers to use in place of its
    own. `gives_numbers` says whether forward gets the whole numbers that it reads, `left_open` whether it read some
    that it did not get, but would in a second trace. `answers`, `lines` and `tensors` are what was asked, `checks` what
    is checked when the graph runs."""

    example: Sequence[Any] = ()
    given: ForeignAnswers | None = None
    gives_numbers: bool = False
    left_open: bool = False
    answers: list[Answer] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    _values: InputValues | None = None

    @property
    def results(self) -> list[torch.Tensor]:
        """What the traced graph returns last."""
        return [*(each.holds for each in self.checks), *self.tensors]

    def begin(self, inputs: Any) -> None:
        """A forward begins, on these fake inputs; it may be traced several times."""
        for each in (self.answers, self.lines, self.tensors, self.checks):
            each.clear()
        pairs = zip(pytree.tree_leaves(inputs), self.example, strict=True)
        traced = {fake: real for fake, real in pairs if isinstance(fake, FakeTensor)}
        nodes = {found[0]: real for fake, real in traced.items() if (found := traced_node(fake))}
        self._values = InputValues({node: UNKNOWN if isinstance(r, FakeTensor) else r for node, r in nodes.items()})

    def ask(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The answer to a call that asks about inputs; NotImplemented for any other call."""
        if "input" in kwargs:  # torch's name for the first argument
            args, kwargs = (kwargs["input"], *args), {name: each for name, each in kwargs.items() if name != "input"}
        if function in _EQUAL and len({each.shape for each in (*args, *kwargs.values())}) > 1:  # shapes are fixed
            return False
        if function in DECISIONS:
            return self._answer(DECISIONS[function], bool, args, kwargs)
        if function not in NUMBERS:
            return with_known_size(function, args, kwargs, self._count)
        if type(args[0]) is torch.Tensor:  # of a plain attribute or a global: nothing else is real inside of a trace
            return self._answer(*NUMBERS[function], (args[0].clone(),), kwargs)
        if args[0].is_floating_point():  # a float rarely repeats, so every batch would need its own program
            return NotImplemented
        if not self.gives_numbers:
            self.left_open = self.given is None
            return NotImplemented
        return self._answer(*NUMBERS[function], args, kwargs)

    def defer(self, function: Any, args: Any) -> Any:
        """The answer that an assertion needs, if one is asking, which is then checked when the graph runs;
        NotImplemented for any other call."""
        if function is require_fit:
            return self._check("fits", args[0], None)
        if not args or not isinstance(args[0], FakeTensor) or traced_node(args[0]) is None:
            return NotImplemented
        answer = required_answer(function)
        if answer is None:
            return NotImplemented
        return self._check("check", (args[0].reshape(()) != 0) == answer, answer)

    def _check(self, kind: Kind, holds: torch.Tensor, answer: Any) -> Any:
        self.checks.append(Check(kind, holds, "".join(traceback.format_stack())))
        return answer

    def _count(self, number_of: _Make, tensor: torch.Tensor) -> int | None:
        answer = self._answer(number_of, int, (tensor,), {})
        return None if answer is NotImplemented else answer

    def _answer(self, make: _Make, convert: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
        asked = [each for each in (*args, *kwargs.values()) if isinstance(each, FakeTensor)]
        if not asked or any(self._value(each) is None for each in asked):
            return NotImplemented
        tensor = make(*args, **kwargs)
        value = self._value(tensor)
        if self.given is not None and len(self.answers) < len(self.given.answers):
            answer = self.given.answers[len(self.answers)]
        elif isinstance(value, torch.Tensor):
            with nowhere_traced(), torch.no_grad():
                answer = value.tolist()
        else:
            return NotImplemented
        self.answers.append(answer)
        self.lines.append(calling_line())
        self.tensors.append(tensor)
        return convert(answer)

    def is_open(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is computed in the trace and depends on more than inputs."""
        return traced_node(tensor) is not None and self._value(tensor) is None

    def _value(self, tensor: torch.Tensor) -> Any:
        found = traced_node(tensor)
        return None if found is None or self._values is None else self._values.of(*found)
