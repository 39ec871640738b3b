"""Watching: what a model's forward does besides computing, which a trace would silently lose or freeze.

Findings are noted, not raised, so that one capture reports all of them.
"""

import contextlib
import dis
import linecache
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
from zbcompile.passes.capture.joined_loss import without_joined_loss
from zbcompile.passes.capture.opaque_calls import OpaqueCalls
from zbcompile.passes.capture.python_effects import (
    generator_seeded,
    numbers_drawn_outside_torch,
    output_of_forward,
    refuse_unanswered,
)
from zbcompile.passes.capture.questions import Questions
from zbcompile.passes.capture.torch_private import told_of_hooks_on_nodes, without_empty_conversions
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.graph.gpu_kernels import kernel_of
from zbcompile.passes.graph.row_exchanges import RoutedExchanges
from zbcompile.passes.graph.source_location import calling_line, shown_path
from zbcompile.passes.module_state import AttributeSnapshot, functions_of
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
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_STATE = ("grad", "_version")  # of a parameter, which do not exist while a step runs
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad)
_PLAIN_COLLECTIVES = "torch.distributed.distributed_c10d"
_PRODUCTS = (torch.prod, torch.Tensor.prod)
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class HooksInstalled(Exception):
    """Forward has installed hooks, as a model does that installs them when it first runs: the next one may not."""


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
    changed: frozenset[str] = frozenset()  # the values of modules and functions that forward changes
    settled: bool = False  # a forward has installed its hooks, and this one is traced after it
    _unset: frozenset[str] = frozenset()  # the attributes that reports would set, which were left out
    _roots: tuple[nn.Module, Any] | None = None  # the model and the loss: the tracer may hand out proxies
    _around: contextlib.ExitStack | None = None

    def begin(self) -> None:
        """Forget what is known of an earlier trace that failed; its problems explain why, and stay."""
        self.warnings.clear()
        self._unset = frozenset()
        self.unanswered, self.questions.left_open = "", False

    @contextlib.contextmanager
    def functions(self, model: nn.Module, regions: Regions) -> Iterator[None]:
        """Around an export of `model`: calls of autograd.Functions, and of modules in `regions`, become operators."""
        self._roots = model.model, getattr(model, "loss", None)  # type: ignore[assignment]
        modules = modules_as_operators(self.calls, regions)
        with calls_as_operators(self.calls, model, _is_torchs), modules, _inference_as_no_grad():
            yield

    @contextlib.contextmanager
    def forward(self, model: nn.Module, inputs: Any) -> Iterator[None]:
        """Around the forward of the model, and its loss, inside an export."""
        self.questions.begin(inputs)
        assert self._roots is not None
        buffers, modules = _buffers(model), _modules(model)
        own = list(model.parameters())
        parameters = {id(parameter) for parameter in own}
        routed = RoutedExchanges(self.questions.is_open)
        with without_joined_loss(model):
            snapshot = AttributeSnapshot(*self._roots)
        watches = [
            routed.numbers_read(),
            numbers_drawn_outside_torch(snapshot.values, self.problem),
            generator_seeded(self.problem),
            output_of_forward(self.warning),
            told_of_hooks_on_nodes(partial(self.note_hook_on_node, any(map(backward_hooks, model.modules())))),
            failed_questions(self.note_unanswered),
            without_empty_conversions(),
        ]
        with (
            without_joined_loss(model),
            self._restored(snapshot),
            _Calls(self, parameters, routed),
            contextlib.ExitStack() as around,
        ):
            for watch in watches:
                around.enter_context(watch)
            with contextlib.ExitStack() as self._around:
                yield
                self._put_back(buffers)
        refuse_unanswered(functions_of(*self._roots), self.problem)
        self._refuse_replaced(model, modules, own)

    @contextlib.contextmanager
    def _restored(self, snapshot: AttributeSnapshot) -> Iterator[None]:
        """Around forward: what it writes into attributes and containers is undone, and mentioned."""
        installs = False
        try:
            yield
            installs = not self.settled and snapshot.installed_hooks()
        finally:
            changed = snapshot.restore()
        if installs:
            raise HooksInstalled
        for path, carries in changed:
            name = path.rpartition(".")[2]
            line, is_read = self._line_that_sets(name), path.startswith("the hooks") or name in self._names_read
            if carries and is_read:
                self.problem(Refusal.PYTHON_CHANGE.text(path=path, line=line))
                continue
            self.warning(
                f"forward changes {path}{f' ({line})' if line else ''}; a compiled step runs no Python, so it never "
                "does, and it keeps computing with the value that it had at capture."
            )
        self.changed |= frozenset(path for path, _ in changed)

    @property
    def _names_read(self) -> set[str]:
        """The attributes that functions of forward and loss read by name."""
        assert self._roots is not None
        codes = [each.__code__ for each in functions_of(*self._roots)]
        texts = {each for code in codes for each in code.co_consts if isinstance(each, str)}
        return texts | {i.argval for code in codes for i in dis.get_instructions(code) if i.opname in _READS}

    def _line_that_sets(self, name: str) -> str:
        """The line of a function of forward or loss that assigns an attribute; "" if there is none."""
        assert self._roots is not None
        for code in (each.__code__ for each in functions_of(*self._roots)):
            for each in dis.get_instructions(code):
                if each.opname == "STORE_ATTR" and each.argval == name and each.positions and each.positions.lineno:
                    text = linecache.getline(code.co_filename, each.positions.lineno).strip()
                    return f"{shown_path(code.co_filename)}:{each.positions.lineno}: {text}"
        return ""

    def _refuse_replaced(self, model: nn.Module, modules: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Note modules that forward has replaced, or else parameters: a new module brings its own."""
        replaced_modules = [path for path, new in _modules(model).items() if modules.get(path) is not new]
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
        if any(name in attributes for _, name, _ in tensor_tables(self._roots[0])):
            return False
        if not self.questions.gives_numbers:
            self.questions.left_open = self.questions.given is None
            return False
        self._unset |= attributes
        self.warning(f"what stands behind {calling_line()} only reports something; a compiled step leaves it out.")
        return True

    def refuse_unreported(self) -> None:
        """Note what forward reads and a report that was left out would have set."""
        for name in sorted(self._unset & self._names_read) if self._unset else ():
            self.problem(Refusal.PYTHON_CHANGE.text(path=f"model.{name}", line="only where it is not traced"))

    def note_unanswered(self) -> None:
        """A question failed."""
        self.unanswered = self.unanswered or Refusal.CAUGHT_QUESTION.text(line=calling_line())

    def note_hook_on_node(self, modules_have_some: bool) -> None:
        """Forward has registered a hook on a node of autograd; those that torch registers for modules with backward
        hooks before forward are refused with these."""
        by = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(None))
        if "torch.utils.hooks" in by:
            if not modules_have_some:
                self.problem(Refusal.LATE_MODULE_HOOK.text(line=calling_line()))
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
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.item and not isinstance(result, int | float):  # known only when a step runs
            self.watch.note_open()
        sizes = result.shape if isinstance(result, torch.Tensor) else ()
        if not self.watch.shape_from_data and not all(isinstance(size, int) for size in sizes):
            self.watch.shape_from_data = calling_line()
        return result

    def _refuse(self, refusal: Refusal, **names: str) -> None:
        self.watch.problem(refusal.text(line=calling_line(), **names))

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
