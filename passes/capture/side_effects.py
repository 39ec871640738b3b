"""Watching: what a model's forward does besides computing, which a trace would silently lose or freeze.

Findings are noted, not raised, so that one capture reports all of them.
"""

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zbcompile.passes.capture.attention_kernels import (
    attention_kernels,
    by_formula,
    calls_attention,
    is_by_formula,
    is_same_choice,
)
from zbcompile.passes.capture.distributed_regions import Regions, modules_as_operators
from zbcompile.passes.capture.eagers_answers import OPEN_NUMBERS, failed_questions, with_eagers_types
from zbcompile.passes.capture.function_calls import calls_as_operators, product, refuse_set_data
from zbcompile.passes.capture.opaque_calls import OpaqueCalls
from zbcompile.passes.capture.python_effects import (
    generator_seeded,
    numbers_drawn_outside_torch,
    output_of_forward,
    refuse_unanswered,
)
from zbcompile.passes.capture.python_reads import PythonReads, Roots
from zbcompile.passes.capture.questions import Questions
from zbcompile.passes.capture.torch_private import told_of_hooks_on_nodes, without_empty_conversions
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.graph.gpu_kernels import kernel_of
from zbcompile.passes.graph.row_exchanges import RoutedExchanges
from zbcompile.passes.graph.source_location import calling_line
from zbcompile.passes.python_state.executed_code import line_that_writes
from zbcompile.passes.python_state.premises import Premises, attribute, without_joined_loss
from zbcompile.passes.torch_private import (
    FUNCTIONAL_COLLECTIVES_MODULE,
    backward_hooks,
    buffer_table,
    pytree,
    replaced,
    tensor_tables,
)

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_TRAINS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_ASKS = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_STATE = ("grad", "_version")  # of a parameter, which do not exist while a step runs
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad)
_PLAIN_COLLECTIVES = "torch.distributed.distributed_c10d"
_PRODUCTS = (torch.prod, torch.Tensor.prod)
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


@dataclass
class EffectsSeen:
    """What was seen: `problems` forbid the capture, `warnings` are worth telling the user.

    `shape_from_data` is the first line that made a tensor whose shape depends on the data, `questions` are those that
    forward asks about its inputs. `unanswered` says which question failed: a forward that goes on has caught the error.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    shape_from_data: str = ""
    unanswered: str = ""
    calls: OpaqueCalls = field(default_factory=dict)
    questions: Questions = field(default_factory=Questions)
    reads: PythonReads | None = None
    _unset: frozenset[str] = frozenset()  # the attributes that reports would set, which were left out
    _roots: Roots | None = None
    _around: contextlib.ExitStack | None = None

    def begin(self) -> None:
        """Forget what is known of an earlier trace that failed; its problems explain why, and stay."""
        self.warnings.clear()
        self._unset = frozenset()
        self.unanswered, self.questions.left_open = "", False

    @contextlib.contextmanager
    def functions(self, model: nn.Module, regions: Regions) -> Iterator[None]:
        """Around an export of `model`: calls of autograd.Functions, and of modules in `regions`, become operators."""
        self._roots = Roots.of(attribute(model, "model"), attribute(model, "loss"))
        modules = modules_as_operators(self.calls, regions)
        with calls_as_operators(self.calls, model, _is_torchs), modules, _inference_as_no_grad():
            yield

    @contextlib.contextmanager
    def forward(self, model: nn.Module, inputs: Any) -> Iterator[None]:
        """Around the forward of the model, and its loss, inside an export."""
        self.questions.begin(inputs)
        assert self._roots is not None
        self.reads = PythonReads(self._roots, self.problem, self.warning)
        buffers, modules = _buffers(model), _modules(model)
        own = list(model.parameters())
        parameters = {id(parameter) for parameter in own}
        reads, routed = self.reads, RoutedExchanges(self.questions.is_open)
        watches = [
            routed.numbers_read(),
            numbers_drawn_outside_torch(lambda: reads.generators, self.problem),
            generator_seeded(self.problem),
            output_of_forward(self.warning),
            told_of_hooks_on_nodes(partial(self.note_hook_on_node, any(map(backward_hooks, model.modules())))),
            failed_questions(self.note_unanswered),
            without_empty_conversions(),
        ]
        with (
            without_joined_loss(model),
            self.reads.recording(),
            _Calls(self, parameters, routed),
            contextlib.ExitStack() as around,
        ):
            for watch in watches:
                around.enter_context(watch)
            with contextlib.ExitStack() as self._around:
                yield
                self._put_back(buffers)
        refuse_unanswered(reads.functions.codes.values(), self.problem)
        self._refuse_replaced(model, modules, own)

    def _refuse_replaced(self, model: nn.Module, modules: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Note modules that forward has replaced, or else parameters: a new module brings its own."""
        replaced_modules = [path for path, new in _modules(model).items() if modules.get(path, new) is not new]
        for path in replaced_modules:
            self.problem(Refusal.MODULE_REPLACED.text(path=path))
        pairs = zip(model.parameters(), parameters, strict=False)
        if not replaced_modules and any(now is not before for now, before in pairs):
            self.problem(Refusal.PARAMETER_REPLACED.text())

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def warning(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def leaves_out(self, attributes: frozenset[str]) -> bool:
        """Whether a report, which sets these attributes, is left out: in a second trace, if it sets no buffer."""
        assert self._roots is not None
        if any(name in attributes for _, name, _ in tensor_tables(self._roots.model)):
            return False
        if not self.questions.gives_numbers:
            self.questions.left_open = self.questions.given is None
            return False
        self._unset |= attributes
        self.warning(f"what stands behind {calling_line()} only reports something; a compiled step leaves it out.")
        return True

    def refuse_unreported(self, premises: Premises) -> None:
        """Note what forward reads and a report that was left out would have set."""
        for each in premises.reads:
            if each.key in self._unset:
                self.problem(Refusal.PYTHON_CHANGE.text(path=each.path, line="only where it is not traced"))

    def note_unanswered(self) -> None:
        """A question failed."""
        self.unanswered = self.unanswered or Refusal.CAUGHT_QUESTION.text(line=calling_line())

    def note_hook_on_node(self, modules_have_some: bool) -> None:
        """Forward has registered a hook on a node of autograd; those that torch registers for modules with backward
        hooks before forward are refused with these."""
        by = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(None))
        if "torch.utils.hooks" in by:
            if not modules_have_some:
                assert self.reads is not None
                line = line_that_writes(list(self.reads.functions.codes.values()), "register_full_backward_hook")
                self.problem(Refusal.LATE_MODULE_HOOK.text(line=line))
            return
        self.problem(Refusal.NODE_HOOK.text(line=calling_line()))

    def note_open(self) -> None:
        """Forward has read a number that has no value in the trace."""
        self.warning(
            f"forward reads a number out of a tensor ({calling_line()}); a compiled step runs no Python, so what it "
            "does with the number happens once, at capture."
        )
        if self._around is not None:
            self._around.enter_context(with_eagers_types())
            self._around = None  # once is enough

    def _put_back(self, before: dict[tuple[nn.Module, str], torch.Tensor]) -> None:
        """Turn assignments to buffers into in-place changes, the only ones that torch.export sees."""
        for (module, name), old in before.items():
            new = buffer_table(module).get(name)
            if new is old:
                continue
            if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                now = "nothing" if new is None else f"{new.dtype} {list(new.shape)}"
                before_it = f"{old.dtype} {list(old.shape)}"
                names = {"name": name, "module": type(module).__name__, "before": before_it, "now": now}
                self.problem(Refusal.BUFFER_REPLACED.text(**names))
                continue
            with torch.no_grad():
                old.copy_(new.detach())
            buffer_table(module)[name] = old


class _Calls(TorchFunctionMode):
    """Notes hooks on activations, collectives that autograd does not see and changes of requires_grad, and treats
    `.data` as what it means: a detach."""

    def __init__(self, watch: EffectsSeen, parameters: set[int], routed: RoutedExchanges) -> None:
        super().__init__()
        self.watch, self.parameters, self.routed = watch, parameters, routed
        self.kernels = attention_kernels()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA:
            return args[0].detach()
        refuse_set_data(func)
        if self.watch.questions.left_open and _has_open_number((args, kwargs)):
            self.watch.note_unanswered()
        answer = self.watch.questions.ask(func, args, kwargs or {})
        if answer is NotImplemented:
            answer = self.watch.questions.defer(func, args)
        if answer is NotImplemented:
            answer = self.routed.result(func, args, kwargs or {})
        if answer is not NotImplemented:
            return answer
        if func in _HOOKS:
            self._refuse(Refusal.ACTIVATION_HOOK, function=func.__name__)
        if func in _GRADIENTS:
            self._refuse(Refusal.OWN_GRADIENTS)
        if getattr(func, "__module__", "") == _PLAIN_COLLECTIVES and _carries_gradient(args):
            self._refuse(Refusal.PLAIN_COLLECTIVE, function=func.__name__)
        if _accessed(func) in _STATE and id(args[0]) in self.parameters:
            self._refuse(Refusal.PARAMETER_STATE, attribute=_accessed(func))
        if func in _TRAINS and id(args[0]) in self.parameters:
            self._refuse(Refusal.REQUIRES_GRAD)
        if calls_attention(func, kwargs or {}):
            func = self._attention(func, args, kwargs or {})
        if func in _PRODUCTS and _carries_gradient((*args, *(kwargs or {}).values())):
            func = product
        func = kernel_of(func, args)
        result = self._result(func, args, kwargs or {})
        if func == _ASKS and id(args[0]) in self.parameters and self.watch.reads is not None:
            self.watch.reads.read_trained(args[0], result)
        if func is torch.Tensor.item and not isinstance(result, int | float):  # known only when a step runs
            self.watch.note_open()
        sizes = result.shape if isinstance(result, torch.Tensor) else ()
        if not self.watch.shape_from_data and not all(isinstance(size, int) for size in sizes):
            self.watch.shape_from_data = calling_line()
        return result

    def _refuse(self, refusal: Refusal, **names: str) -> None:
        self.watch.problem(refusal.text(line=calling_line(), **names))

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        reads = self.watch.reads
        if reads is None or torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        with reads.functions.pause():
            return func(*args, **kwargs)

    def _attention(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What eager makes of a call of attention: inside `sdpa_kernel`, or with a mask that is trained."""
        before, now = self.kernels, attention_kernels()
        if is_by_formula(func, now, args, kwargs):
            return by_formula
        device = next(v.device for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        if is_same_choice(before, now, device):
            return func
        self._refuse(Refusal.ATTENTION_KERNELS)
        return func


def _accessed(func: Any) -> str:
    """The attribute of a tensor that is read or assigned, if `func` does that."""
    owner = getattr(func, "__self__", None) if func.__name__ in ("__get__", "__set__", "__delete__") else None
    return getattr(owner, "__name__", "")


def _has_open_number(given: Any) -> bool:
    leaves = pytree.tree_leaves(given)
    bounds = [bound for each in leaves if isinstance(each, slice) for bound in (each.start, each.stop, each.step)]
    return any(type(each) in OPEN_NUMBERS for each in (*leaves, *bounds))


def _is_torchs(function: type) -> bool:
    """Whether a Function is a part of torch that torch.export knows how to trace."""
    hooks = function.__qualname__ == "BackwardHookFunction"  # a hook is refused by name
    return hooks or function.__module__.startswith(("torch._", "torch.fx", FUNCTIONAL_COLLECTIVES_MODULE))


def _carries_gradient(args: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)


@contextlib.contextmanager
def _inference_as_no_grad() -> Iterator[None]:
    """Make inference_mode a no_grad region: torch.export drops the former, and parameters inside would be trained."""
    regions: list[Any] = []

    def enter(self: Any) -> None:
        regions.append(torch.no_grad() if self.mode else torch.enable_grad())
        regions[-1].__enter__()

    def leave(self: Any, *error: Any) -> None:
        regions.pop().__exit__(*error)

    with replaced(torch.inference_mode, "__enter__", enter), replaced(torch.inference_mode, "__exit__", leave):
        yield


def _buffers(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor]:
    return {(m, name): b for m in model.modules() for name, b in buffer_table(m).items() if b is not None}


def _modules(model: nn.Module) -> dict[str, Any]:
    """The submodules by path, each as its attributes: torch's tracer may hand out proxies, which share them."""
    return {path: vars(module) for path, module in model.named_modules()}
