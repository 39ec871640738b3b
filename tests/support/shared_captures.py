"""What was captured before in this test run is not captured again: half of a test's time is torch.export.

Two models are the same where all that a capture reads of them is: their attributes, hooks and code, the kinds of their
tensors and which of these are one, the loss, the microbatch, torch's switches. That is compared as pickled bytes; what
does not pickle (a lambda as loss, a class made inside a test) is captured each time, as is what warns. Passes change
none of their inputs, so that one capture serves many compilations. Tests of the capture itself do not come here.
"""

import contextlib
import io
import marshal
import pickle
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from tests.support.stored_captures import index_of, own_gpu, program_to_bytes, read_or_make
from zbcompile.batches.batch import Microbatch, whole_batch
from zbcompile.compiler.compile_model import LaidOut, compile_laid_out
from zbcompile.compiler.inference import Frame, compile_forward
from zbcompile.compiler.vocabulary_sharding import VocabularySharding, choose_sharding
from zbcompile.model.model_info import facts_of
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.capture.export import Captured
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.module_state import PLAIN as PLAIN_VALUES, functions_of, globals_in
from zbcompile.passes.partition.liveness import lay_out_line
from zbcompile.passes.pass_list.passes_in_order import CAPTURE, CAPTURE_INFERENCE, canonicalise
from zbcompile.passes.pass_list.run_passes import SILENT, PassManager
from zbcompile.passes.torch_private import global_hooks, is_compiled, storage_key, tensor_hooks, written_so_far
from zbcompile.program.program import Program

PASS_LIST = "zbcompile.passes.pass_list.passes_in_order"
MOST = 64  # of those used last
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
KEYS: WeakKeyDictionary[nn.Module, bytes] = WeakKeyDictionary()  # of captured graphs


class _Sketch(pickle.Pickler):
    """Pickles an object with the kinds of its tensors in place of their values, and the code of its modules."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.numbers: dict[int, int] = {}
        self.memories: dict[int, int] = {}

    def persistent_id(self, found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return self._tensor(found)
        if isinstance(found, nn.Module) and is_compiled(found):
            raise pickle.PicklingError("a compiled module")
        return None

    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, torch.device):
            return _named, (found.type, index_of(found))
        if not isinstance(found, nn.Module):
            return NotImplemented
        return _named, (type(found), marshal.dumps(type(found).forward.__code__)), found.__dict__

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in PLAIN or tensor_hooks(tensor):
            raise pickle.PicklingError("a tensor of its own kind")
        number = self.numbers.setdefault(id(tensor), len(self.numbers))
        memory = self.memories.setdefault(storage_key(tensor), len(self.memories))
        place = tensor.device.type, index_of(tensor.device), tensor.stride(), tensor.storage_offset()
        written = 0 if isinstance(tensor, nn.Parameter) or tensor.is_inference() else written_so_far(tensor)
        kind = type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad
        return number, *map(str, (memory, *kind, written, *place))


def _globals(given: tuple[Any, ...]) -> list[tuple[str, str]]:
    """The plain globals that functions of the model and the loss name."""
    model = next(each for each in given if isinstance(each, nn.Module))
    losses = (each for each in given if callable(each) and each is not model)
    functions = functions_of(model, next(losses, None))
    found = {(f.__module__, name): f.__globals__.get(name) for f in functions for name in globals_in(f.__code__)}
    return sorted((f"{place}", repr(value)) for place, value in found.items() if isinstance(value, PLAIN_VALUES))


def _named(*_: Any) -> Any:
    raise NotImplementedError("a sketch is compared, never read")


def sketch(*given: Any) -> bytes | None:
    """Equal for what would be captured alike; None where that cannot be told."""
    switches = (
        torch.is_grad_enabled(),
        *((torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")),
        *(torch.get_default_dtype(), torch.get_num_threads(), torch.backends.mkldnn.enabled),
        *(torch.are_deterministic_algorithms_enabled(), torch.backends.mha.get_fastpath_enabled()),
        *(torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
    )
    file = io.BytesIO()
    try:
        _Sketch(file).dump((switches, given, _globals(given)))
    except Exception:  # whatever an object raises that does not let itself be pickled
        return None
    return None if global_hooks() else file.getvalue()


class Recent(OrderedDict[Any, Any]):
    """A table of the `MOST` results used last."""

    def get_or_make(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self:
            self[key] = make()
        self.move_to_end(key)
        while len(self) > MOST:
            self.popitem(last=False)
        return self[key]


def _once(name: str, capture: Callable[..., Any]) -> Callable[..., Any]:
    found = Recent()

    def captured(*given: Any) -> Any:
        key = sketch(*given)
        if key is None:
            return capture(*given)
        here = own_gpu(), key
        made = found.get_or_make(here, lambda: None)
        if made is not None and _fits(made, given):
            return made
        with _warnings() as seen:
            made = read_or_make(
                name.encode() + key, lambda stored: _fits(stored, given), lambda: (capture(*given), not seen)
            )
        if not seen:
            found[here] = made
        if not seen:
            KEYS[made.module] = name.encode() + key + repr(made.guards and made.guards.given.answers).encode()
        return made

    return captured


@contextlib.contextmanager
def _warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Those that are given inside, which come at the end."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen
    for warning in seen:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _fits(made: Captured | Program, given: tuple[Any, ...]) -> bool:
    """Whether a graph that was captured before is right for the values of this microbatch, too."""
    if made.guards is None:
        return True
    args, kwargs, target = (*given[1:], None)[:3]
    return not made.guards.different(whole_batch(args, kwargs, target).whole.tensors)


def _once_per_object(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found = Recent()  # with the objects, so that no other one gets their ids
    return lambda given: found.get_or_make(id(given), lambda: (given, function(given)))[1]


def _canonical_once() -> Callable[..., Canonical]:
    """As `canonicalise`, unless somebody watches the passes."""
    found = Recent()

    def canonicalised(captured: Captured, manager: PassManager = SILENT) -> Canonical:
        if manager.observe is not None:
            return canonicalise(captured, manager)
        mesh = () if _is_local(captured) else tuple(sorted(captured.dimensions.items()))
        key = id(captured.module), mesh
        return found.get_or_make(key, lambda: (captured, canonicalise(captured, manager)))[1]

    return canonicalised


def _is_local(captured: Captured) -> bool:
    """Whether nothing in it communicates: then it is the same on every mesh."""
    return not captured.functions and not any(map(is_collective, captured.module.graph.nodes))


def _sharding_once() -> Callable[..., VocabularySharding | None]:
    """As `choose_sharding`, unless somebody watches the passes."""
    found = Recent()

    def chosen(
        whole: Canonical, schedule: Any, choices: Any, manager: PassManager = SILENT
    ) -> VocabularySharding | None:
        if manager.observe is not None:
            return choose_sharding(whole, schedule, choices, manager)
        key = id(whole), schedule if choices.vocab == "auto" else None, repr(choices)
        return found.get_or_make(key, lambda: (whole, choose_sharding(whole, schedule, choices, manager)))[1]

    return chosen


def _once_per_plan(compile_: Callable[..., Program]) -> Callable[..., Program]:
    """As `compile_laid_out`, for a line that was drawn before, the same schedule and the same choices."""
    found = Recent()

    def compiled(model: Any, microbatch: Any, laid_out: LaidOut, *plan: Any, **more: Any) -> Program:
        schedule, choices, like, *_ = (*plan, None)
        if more.get("observe") or laid_out.canonical.captured.groups:
            return compile_(model, microbatch, laid_out, *plan, **more)
        mesh = tuple(sorted(set(laid_out.captured.dimensions.values())))
        decided = schedule, repr(choices), more.get("edges"), mesh, _placement(like)

        def make() -> Program:
            with _warnings() as seen:
                return _stored(
                    laid_out, decided, lambda: (compile_(model, microbatch, laid_out, *plan, **more), not seen)
                )

        made = found.get_or_make((id(laid_out.line), id(laid_out.sharding), *decided), lambda: (laid_out, make()))
        return replace(made[1], model=facts_of(model, laid_out.captured.constants))

    return compiled


def _placement(like: Program | None) -> str:
    """What a program that is placed as another one takes from it."""
    return repr(like and (like.cuts, like.homes, like.canonical_targets, like.vocabulary and like.vocabulary.bounds))


def _stored(laid_out: LaidOut, decided: tuple[Any, ...], make: Callable[[], tuple[Program, bool]]) -> Program:
    """The program from the folder of captures, if what was captured can be told. Other ranks read it: for tests in one
    process writing costs more than the few that another process reads."""
    if laid_out.captured.module not in KEYS or not _is_local(laid_out.captured) or not dist.is_initialized():
        return make()[0]
    shards = laid_out.sharding and (laid_out.sharding.head.weight, laid_out.sharding.lookup is None)
    key = KEYS[laid_out.captured.module] + repr(("program", torch.get_num_threads(), decided, shards)).encode()
    return read_or_make(key, lambda _: True, make, program_to_bytes)  # type: ignore[no-any-return]


def _forward_once(compile_: Callable[..., Program]) -> Callable[..., Program]:
    """As `compile_forward`, for the same model placed alike."""
    found = Recent()

    def compiled(model: nn.Module, microbatch: Microbatch, wanted: Any, frame: Frame, given: Any = None) -> Program:
        like, mesh = frame.like, sorted(set(frame.dimensions.values()))
        decided = repr((wanted, given, frame.schedule, frame.choices, _placement(like), mesh, sorted(frame.sharded)))
        key = sketch("forward", model, microbatch.example, decided)
        if key is None:
            return compile_(model, microbatch, wanted, frame, given)
        here = own_gpu(), key
        made = found.get_or_make(here, lambda: None)
        if made is None or not _fits(made, ("", *microbatch.example)):
            with _warnings() as seen:
                made = read_or_make(
                    key,
                    lambda stored: _fits(stored, ("", *microbatch.example)),
                    lambda: (compile_(model, microbatch, wanted, frame, given), not seen),
                    program_to_bytes if dist.is_initialized() else lambda _: None,
                )
            if not seen and not made.groups:
                found[here] = made
        return replace(made, model=facts_of(model, made.model.constants))

    return compiled


@contextlib.contextmanager
def shared_captures() -> Iterator[None]:
    """What the compiler captures inside, and compiles from it, is shared."""
    passes = [(each, replace(each, run=_once(each.name, each.run))) for each in (CAPTURE, CAPTURE_INFERENCE)]
    functions = [
        (canonicalise, _canonical_once()),
        (choose_sharding, _sharding_once()),
        (lay_out_line, _once_per_object(lay_out_line)),
        (compile_laid_out, _once_per_plan(compile_laid_out)),
        (compile_forward, _forward_once(compile_forward)),
    ]
    with contextlib.ExitStack() as stack:
        for original, shared in [*passes, *functions]:
            for module, name in _importing(original):
                stack.enter_context(mock.patch.object(module, name, shared))
        yield


def _importing(original: Any) -> list[tuple[Any, str]]:
    """Where modules of the package import a function or a pass; not where it is defined."""
    home = original.__module__ if callable(original) else PASS_LIST
    modules = [module for name, module in sys.modules.items() if name.startswith("zbcompile.") and name != home]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if value is original]
