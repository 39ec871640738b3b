"""torch.autograd.Function inside a model: each call is one operator of the captured graph.

Its forward runs once, where the model calls it, on fake tensors that nothing traces; what it did is on a tape, which
every trace runs again. Its backward runs when the stage is traced, as in eager after forward, with the ctx of that
forward and for gradients of the form that arrives; what it did is on a tape, too. Python code of the Function that is
unlike when it runs again is thus no trouble.

    with calls_as_operators(found, model, ignored):  # around torch.export.export
        ...                                          # MyFunction.apply(x, 2.0) becomes function([x], "MyFunction#7")
    captured.functions                               # keeps what is in `found` for as long as the graph

Besides its arguments, a Function may read tensors that surround it: a module that it was given, a closure. Those are
inputs of the operator too. It may also add to `.grad` itself, as layers do that delay their weight gradients, or call
`backward` inside its own; what was added becomes a gradient.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from zbcompile.passes.capture.opaque_calls import OpaqueCall, OpaqueCalls, Tape, autocast_on, emitted
from zbcompile.passes.capture.torch_private import (
    instead_of_function_apply,
    is_fake_of,
    traced_graph,
    waiting_collectives,
)
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import like
from zbcompile.passes.graph.source_location import calling_line, failing_line
from zbcompile.passes.graph.strides import is_dense, laid_out_like
from zbcompile.passes.torch_private import (
    FakeTensorMode,
    functional_instead,
    nowhere_traced,
    pytree,
    single_threaded_backward,
    tensor_tables,
    written_so_far,
)

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@contextlib.contextmanager
def calls_as_operators(found: OpaqueCalls, model: nn.Module, ignored: Callable[[type], bool]) -> Iterator[None]:
    """Inside, what torch.export traces of a Function's call is one operator. A call without gradients, or for arguments
    that need none, is its forward alone, which is traced through like any other code; so are Functions that are
    `ignored`."""

    def apply(original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is _TrialReplay:
            return original(*args, **kwargs)
        graph = traced_graph()
        if graph is None or not torch.is_grad_enabled() or ignored(function):
            with contextlib.nullcontext() if graph is None else FunctionBody(lambda tensor: tensor):
                return original(*args, **kwargs)
        if function is CheckpointFunction:
            return _checkpointed(*args)
        if not _gets_gradients(args):  # traced through, since a result may share memory with an argument
            with torch.no_grad(), FunctionBody(lambda tensor: tensor):
                return original(*args, **kwargs)
        trial = _Trial(function, args, kwargs, model)
        result = trial.run()
        return emitted(found, trial.call(), [*trial.arguments, *trial.around], result)

    with instead_of_function_apply(apply):
        yield


def _gets_gradients(args: tuple[Any, ...]) -> bool:
    """Whether autograd calls the backward of a Function: never for what is nested in an argument, or around it."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in args)


def _checkpointed(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """`torch.utils.checkpoint` with re-entry: a region that the backward recomputes. As in eager, nothing inside gets a
    gradient unless one of its inputs does."""
    if not _gets_gradients(args):
        with torch.no_grad():
            return run(*args)
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def refuse_set_data(func: Any) -> None:
    """Raise CaptureError if `func` gives a tensor other memory: a graph knows it by what it was."""
    if func == _SET_DATA:
        raise Refusal.SET_DATA.error(line=calling_line())


class FunctionBody(TorchFunctionMode):
    """Runs the code of a Function with `replace(tensor)` for every tensor that it uses. `.data` becomes a detach, and
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
        """`function` inside this mode, and its backward too, which autograd calls on its own. What it leaves on ctx is
        dropped, so that it can run again."""
        name = "vjp" if function.backward is torch.autograd.Function.backward else "backward"

        def backward(ctx: Any, *given: Any) -> Any:
            before = dict(vars(ctx))
            with self, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not a leaf Tensor is being accessed.*")
                found = getattr(function, name)(ctx, *given)
            vars(ctx).clear()
            vars(ctx).update(before)
            return found

        return type(function.__name__, (function,), {name: staticmethod(backward)})


@dataclass(frozen=True)
class _Backward:
    """What a backward did with gradients of one form: `arriving` has their places, `leaving` those of the gradients of
    all inputs of the operator."""

    tape: Tape
    arriving: list[int]
    leaving: list[int | None]

    @property
    def read(self) -> set[int]:
        return self.tape.read() | {place for place in self.leaving if place is not None}


class _Trial:
    """A call of a Function that a model makes, run where it stands; its autograd graph and its ctx stay.

    `arguments` are its tensors, `around` those that it reads without being given them.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module) -> None:
        self.function, self.model, self.line = function, model, calling_line()
        self.leaves, self.structure = pytree.tree_flatten((args, kwargs))
        self.arguments = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.around: list[Tensor] = []
        self.fakes: list[Tensor] = []  # in the place of both
        self.overwrites: tuple[int, ...] = ()
        self.results: list[Tensor] = []
        self._homes: dict[int, tuple[dict[str, Tensor], str]] = {}  # of the tensors around, by their number
        self._versions: list[int] = []
        self._backwards: dict[Any, _Backward] = {}
        self._is_over = False
        self._inside = FunctionBody(self._replaced)

    def run(self) -> Any:
        """What the call returns, with fake tensors. Raises CaptureError for what would be lost: changes of its inputs,
        random numbers in the backward, and whatever cannot be traced."""
        with nowhere_traced(), FakeTensorMode(allow_non_fake_inputs=True) as self.mode, waiting_collectives():
            self.fakes = [_fresh(tensor) for tensor in self.arguments]
            self.forward = Tape({id(tensor): i for i, tensor in enumerate(self.fakes)})
            self.inputs = list(range(len(self.fakes)))  # the places of all inputs of the operator
            self._versions = [written_so_far(tensor) for tensor in self.fakes]
            result = self._forward()
        self.results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.places = [self.forward.place(tensor) for tensor in self.results]
        self.tried = self.backward_of([result if result.requires_grad else None for result in self.results])
        self.kept = sorted(self.tried.read.intersection(self.places))
        self._backwards.clear()  # what the backward finds around it may change until forward is over
        self._is_over = True
        return result

    def call(self) -> OpaqueCall:
        kinds = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in self.fakes]
        results = [(place, tensor.requires_grad) for place, tensor in zip(self.places, self.results, strict=True)]
        backward = self.tried.tape.text, self.tried.arriving, self.tried.leaving
        text = str((kinds, self.inputs, self.overwrites, self.forward.text, results, backward))
        with nowhere_traced():
            fakes = tuple(tensor.detach() for tensor in self.results)
        name = self.function.__qualname__
        return OpaqueCall(name, self.again, fakes, self.forward.random, self.overwrites, text)

    def again(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """The result of the same call for other tensors."""
        with torch.autocast(self.fakes[0].device.type, enabled=False):  # the casts are on the tape
            found: Any = _TrialReplay.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return found  # type: ignore[no-any-return]

    def _forward(self) -> Any:
        fakes = iter(list(self.fakes))
        leaves = [next(fakes) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        autocast = autocast_on(self.fakes[0].device.type)
        before = list(self._versions)
        try:
            with torch.autocast(*autocast), self.forward, self._inside:
                result = self._explained("forward", lambda: self._inside.around(self.function).apply(*args, **kwargs))
        finally:
            now = [written_so_far(tensor) for tensor in self.fakes[: len(before)]]
            self.overwrites = tuple(i for i, version in enumerate(now) if version != before[i])
            if self.overwrites and not self.forward.exchanges:
                raise self._refused(Refusal.FUNCTION_INPUT)
            self._versions[: len(before)] = now
        if self.forward.statistics:
            raise self._refused(Refusal.FUNCTION_STATISTICS)
        self._refuse_written()
        return result

    def backward_of(self, gradients: Sequence[Tensor | None]) -> _Backward:
        """What the backward does with gradients like these, one per result."""
        kinds = tuple(None if g is None else (g.shape, g.stride(), g.dtype) for g in gradients)
        if kinds not in self._backwards:
            with nowhere_traced(), self.mode, waiting_collectives(), single_threaded_backward():
                self._backwards[kinds] = self._backward([None if g is None else like(g) for g in gradients])
        return self._backwards[kinds]

    def _backward(self, gradients: Sequence[Tensor | None]) -> _Backward:
        pairs = [(r, g) for r, g in zip(self.results, gradients, strict=True) if g is not None and r.requires_grad]
        tape = Tape(self.forward.places)
        arriving = [tape.place(gradient) for _, gradient in pairs]
        wanted = [tensor for tensor in self.fakes[: len(self.arguments)] if tensor.requires_grad]
        found: list[Tensor | None] = [None] * len(wanted)
        with tape, torch.autocast(self.fakes[0].device.type, enabled=False):
            if pairs:
                results, given = zip(*pairs, strict=True)
                grad = torch.autograd.grad
                found = self._explained("backward", lambda: grad(results, wanted, given, True, allow_unused=True))
            by_argument = {id(tensor): gradient for tensor, gradient in zip(wanted, found, strict=True)}
            leaving = [self._added_up(tensor, by_argument.get(id(tensor))) for tensor in self.fakes]
        if tape.random:
            raise self._refused(Refusal.FUNCTION_RANDOM)
        self._refuse_written(Refusal.FUNCTION_INPUT_LATER)
        return _Backward(tape, arriving, [None if gradient is None else tape.place(gradient) for gradient in leaving])

    def _added_up(self, tensor: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The gradient of an input, with what the backward has added to its `.grad`."""
        if not tensor.is_leaf or tensor.grad is None:
            return gradient
        added, tensor.grad = tensor.grad, None
        return added if gradient is None else gradient + added

    def _refuse_written(self, of_arguments: Refusal | None = None) -> None:
        """Refuse writes into a tensor that stands for another one: that other one would not change."""
        written = [i for i, fake in enumerate(self.fakes) if written_so_far(fake) != self._versions[i]]
        if of_arguments is not None and any(i < len(self.arguments) for i in written):
            raise self._refused(of_arguments)
        if any(i >= len(self.arguments) for i in written):
            raise self._refused(Refusal.FUNCTION_AROUND)

    def _explained(self, part: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            names = {"part": part, "line": failing_line(error), "error": reason}
            raise self._refused(Refusal.UNTRACED_FUNCTION, **names) from error

    def _refused(self, refusal: Refusal, **names: str) -> CaptureError:
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        return refusal.error(function=f"{name} ({self.line})", **names)

    def _replaced(self, tensor: Tensor) -> Tensor:
        """A fake tensor for one that the trial did not make. Parameters are found by their places in the model: while
        torch.export runs, the model has other parameter objects."""
        if is_fake_of(tensor, self.mode):
            return tensor
        count = len(self.arguments)
        now = [self._homes[i][0][self._homes[i][1]] if i in self._homes else each for i, each in enumerate(self.around)]
        at = next((i for i, each in enumerate(now) if each is tensor), None)
        if at is None and self._is_over:
            raise self._refused(Refusal.FUNCTION_READS)
        if at is None:
            at = len(self.around)
            homes = {id(known): (table, name) for table, name, known in tensor_tables(self.model)}
            if id(tensor) in homes:
                self._homes[at] = homes[id(tensor)]
            with nowhere_traced(), self.mode:
                self.fakes.append(like(tensor).requires_grad_(tensor.requires_grad))
            self.around.append(tensor)
            self._versions.append(written_so_far(self.fakes[-1]))
            self.inputs.append(self.forward.place(self.fakes[-1]))
        return self.fakes[count + at]


class _TrialReplay(torch.autograd.Function):
    """Runs the tapes of a trial on other tensors, with the derivative that the trial recorded."""

    @staticmethod
    def forward(ctx: Any, trial: _Trial, *tensors: Tensor) -> Any:
        values = {}
        for i, (place, tensor, fake) in enumerate(zip(trial.inputs, tensors, trial.fakes, strict=True)):
            values[place] = tensor.clone() if i in trial.overwrites else laid_out_like(tensor, fake.stride())
        trial.forward.run(values)
        results = tuple(values[place] for place in trial.places)
        ctx.trial, ctx.values = trial, {p: value for p, value in values.items() if p not in trial.places}
        ctx.save_for_backward(*(values[place] for place in trial.kept))  # a result on ctx would keep itself
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for r, t in zip(results, trial.results, strict=True) if not t.requires_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        done = ctx.trial.backward_of(gradients)
        values = ctx.values | dict(zip(ctx.trial.kept, ctx.saved_tensors, strict=True))
        values |= zip(done.arriving, (gradient for gradient in gradients if gradient is not None), strict=True)
        done.tape.run(values)
        return None, *(None if place is None else values[place] for place in done.leaving)


def _fresh(tensor: Tensor) -> Tensor:
    """A fake tensor like one that autograd knows, a result of something if that is one: no view if it can be helped,
    which would begin another history if an exchange writes into it."""
    new = like(tensor).requires_grad_(tensor.requires_grad)
    return new if tensor.is_leaf else new.clone() if is_dense(new) else new.view_as(new)


class _Product(torch.autograd.Function):
    """A product of factors with eager's gradient, for which a trace has another formula: where no factor is zero, the
    product divided by each; a trace, which cannot look, multiplies the others in both cases."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, dim: int | None) -> Tensor:
        result = factors.prod() if dim is None else factors.prod(dim, keepdim=True)
        ctx.dim = dim
        ctx.save_for_backward(factors, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (factors, result), (gradient,) = ctx.saved_tensors, gradients
        with torch.enable_grad():
            again = factors.detach().requires_grad_()
            product = again.prod() if ctx.dim is None else again.prod(ctx.dim, keepdim=True)
            (of_others,) = torch.autograd.grad(product, again, gradient)
        zeros = (factors == 0).sum()
        if ctx.dim is None:
            of_others = torch.where(zeros > 1, 0, of_others)
        return torch.where(zeros == 0, gradient * (result / factors).conj(), of_others), None


def product(
    input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """torch.prod, with eager's gradient."""
    factors = input if input.is_floating_point() or input.is_complex() else input.long()
    result: Tensor = _Product.apply(factors if dtype is None else factors.to(dtype), dim)  # type: ignore[no-untyped-call]
    return result if keepdim or dim is None or not input.ndim else result.squeeze(dim)
