"""A call of an autograd.Function, to be repeated with other tensors wherever a graph is traced or values are inferred.

Beside its arguments, a Function may read tensors that surround it: a module that it was given, a closure. Those are
inputs of the operator too, and take the place of what the code finds. It may also add to `.grad` itself, as layers do
that delay their weight gradients, or call `backward` inside its own; what was added becomes a gradient.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zbcompile.passes.capture.torch_private import is_fake_of, nowhere_traced
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import draws
from zbcompile.passes.graph.source_location import calling_line
from zbcompile.passes.torch_private import (
    FUNCTIONAL_COLLECTIVES,
    UNSAFE_VIEW,
    FakeTensor,
    TorchDispatchMode,
    fake_mode_of,
    functional_instead,
    pytree,
    tensor_tables,
)

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_BATCH_NORMS = ("native_batch_norm.", "cudnn_batch_norm.", "miopen_batch_norm.", "_native_batch_norm_legit.")
_EMPTY = torch.ops.aten.empty_strided.default
Autocast = tuple[str, torch.dtype, bool, bool]  # device, dtype, enabled, cached


class A_TENSOR:
    """Stands for a tensor among the arguments of a call."""


class Outside:
    """The tensors that a Function reads without being given them, in the order in which they are first read.

    While torch.export runs, the parameters of a model are others than before and afterwards, so that they are known by
    their places.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._found: list[Tensor | tuple[dict[str, Tensor], str]] = []
        self.tensors: list[Tensor] = []

    def note(self, tensor: Tensor) -> None:
        places = {id(known): (table, name) for table, name, known in tensor_tables(self.model)}
        self.tensors.append(tensor)
        self._found.append(places.get(id(tensor), tensor))

    def now(self) -> list[Tensor]:
        """What the code finds now."""
        return [found if isinstance(found, Tensor) else found[0][found[1]] for found in self._found]

    @property
    def key(self) -> Hashable:
        return tuple(map(id, self.tensors))


_SAME = {UNSAFE_VIEW: torch.ops.aten.view.default}  # a matmul has either, as it is traced


class Operations(TorchDispatchMode):
    """Notes the operations that run inside with their numbers, and whether they draw random ones."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.random = False
        self.exchanges = False
        self.statistics = False  # whether a batch norm has updated its own: its schema does not say so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim" and func is not _EMPTY:  # those of "prim" are questions about a tensor
            numbers = pytree.tree_map_only(Tensor, _in_words, (args, kwargs))
            self.seen.append(f"{_SAME.get(func, func)} {numbers!r}")
        self.random = self.random or draws(func, args, kwargs or {})
        if func.__name__.startswith(_BATCH_NORMS):
            self.statistics = self.statistics or (isinstance(args[3], Tensor) and bool(args[5]))
        self.exchanges = self.exchanges or func.namespace in FUNCTIONAL_COLLECTIVES
        return func(*args, **(kwargs or {}))


def _in_words(tensor: Tensor) -> str:
    """A tensor that Python has just made of numbers, as torch.tensor does, is not fake: it differs by these."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.is_sparse:
        return "tensor"
    with nowhere_traced():
        return f"{tensor.dtype} {tensor.tolist()}"


def refuse_set_data(func: Any) -> None:
    """Raise CaptureError if `func` gives a tensor other memory: a graph knows it by what it was."""
    if func == _SET_DATA:
        raise Refusal.SET_DATA.error(line=calling_line())


class Inside(TorchFunctionMode):
    """Gives the code of a Function `replace(tensor)` for every tensor that it uses; `.data` is the detach it means, and
    an exchange in place a functional one."""

    def __init__(self, replace: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr:
            raise TypeError("a traced tensor has no memory to point to")
        refuse_set_data(func)
        args, kwargs = pytree.tree_map_only(Tensor, self.replace, (args, kwargs or {}))
        return args[0].detach() if func == _DATA else functional_instead(func)(*args, **kwargs)

    def around(self, function: Any) -> Any:
        """`function` with its backward inside, too: autograd calls that on its own."""
        name = "vjp" if function.backward is torch.autograd.Function.backward else "backward"

        def backward(*given: Any) -> Any:
            with self, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not a leaf Tensor is being accessed.*")
                return getattr(function, name)(*given)

        return type(function.__name__, (function,), {name: staticmethod(backward)})


@dataclass(eq=False)
class FunctionCall:
    """All of a call of `function` but its tensors. `leaves` are its flattened arguments, A_TENSOR for each tensor.

    `kinds` describes those tensors, `tried_with` are fake ones like them, `operations` is what forward and backward did
    with these, `draws` whether forward drew random numbers, and `deposits` numbers the tensors to whose `.grad` the
    backward adds, `overwrites` the arguments that an exchange in forward writes into. `results` are fake tensors like
    what it returns.
    """

    function: type[torch.autograd.Function]
    leaves: tuple[Any, ...]
    structure: Any
    autocast: Autocast
    outside: Outside
    kinds: tuple[Hashable, ...]
    tried_with: tuple[Tensor, ...] = ()
    operations: tuple[str, ...] = ()
    draws: bool = False
    deposits: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()
    results: tuple[Tensor, ...] = ()
    name: str = field(default="")

    def __call__(self, tensors: list[Tensor]) -> Any:
        """What the Function returns for `tensors`: its arguments, then those it finds outside."""
        count = len(self.kinds)
        given = [tensor.clone() if i in self.overwrites else tensor for i, tensor in enumerate(tensors[:count])]
        leaves = [*given, *(t.detach().requires_grad_(t.requires_grad) for t in tensors[count:])]
        if self.deposits and any(tensor.requires_grad for tensor in given):
            given = _collecting(given, tensors, leaves, self.deposits)
        known = {id(tensor): leaf for tensor, leaf in zip(self.outside.now(), leaves[count:], strict=True)}
        mode = next((fake_mode_of(tensor) for tensor in tensors if isinstance(tensor, FakeTensor)), None)

        def replace(tensor: Tensor) -> Tensor:
            if mode is not None and id(tensor) not in known and not is_fake_of(tensor, mode):
                raise self.changed("reads another tensor")
            return known.get(id(tensor), tensor)

        return self.run(given, Inside(replace))

    def changed(self, what: str) -> CaptureError:
        return Refusal.CHANGED_FUNCTION.error(function=self.function.__qualname__, does=what)

    def run(self, given: list[Tensor], inside: Inside) -> Any:
        tensors = iter(given)
        leaves = [next(tensors) if leaf is A_TENSOR else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        with torch.autocast(*self.autocast), inside:
            return inside.around(self.function).apply(*args, **kwargs)

    @property
    def key(self) -> Hashable:
        leaves = tuple((type(leaf), _by_value(leaf)) for leaf in self.leaves)
        done = self.operations, self.draws, self.deposits
        return self.function, leaves, self.structure, self.autocast, self.outside.key, self.kinds, done

    @property
    def form(self) -> Hashable:
        return self.name

    @property
    def text(self) -> str:
        """The same for equal calls of several captures; the name of a call that reads what no text stands for."""
        plain = all(leaf is A_TENSOR or type(leaf) in _PLAIN for leaf in self.leaves)
        return self.name if self.outside.tensors or not plain else repr((id(self.function), self.key))


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def _by_value(leaf: Any) -> Hashable:
    """What tells arguments apart: numbers by their text (0.0 is not -0.0), what has no value of its own by identity."""
    return repr(leaf) if type(leaf) in _PLAIN else id(leaf)


def kinds_of(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    return tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)


class _Collect(torch.autograd.Function):
    """The identity of `x`, whose backward runs after all that uses its result: it then takes what has arrived in the
    `.grad` of `leaves` for the gradients of `tensors`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaves: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.leaves = leaves
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = [leaf.grad for leaf in ctx.leaves]
        for leaf in ctx.leaves:
            leaf.grad = None
        return (*gradients, None, *found)


def _collecting(
    given: list[Tensor], tensors: list[Tensor], leaves: list[Tensor], deposits: tuple[int, ...]
) -> list[Tensor]:
    """The arguments, one of them such that gradients follow what the backward adds to `.grad`."""
    at = min((i for i, tensor in enumerate(given) if tensor.requires_grad), key=lambda i: i in deposits)
    added_to = [leaves[i] for i in deposits]
    start: Any = _Collect.apply(given[at], added_to, *(tensors[i] for i in deposits))  # type: ignore[no-untyped-call]
    if at in deposits:
        added_to[deposits.index(at)] = start
    return [*given[:at], start, *given[at + 1 :]]
