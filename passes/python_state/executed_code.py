"""Executed code: which functions of a model run inside a trace, and what their byte code reads and writes."""

import contextlib
import dis
import functools
import gc
import inspect
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

from zbcompile.passes.graph.source_location import is_users_file, shown_path

_NOT_USERS = frozenset((*sys.stdlib_module_names, "torch", "numpy", "sympy", "zbcompile")) - {"__main__"}
Entered = Callable[[FrameType], None]
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_LOADS = (*_GLOBAL, "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_STORES = ("STORE_GLOBAL", "STORE_ATTR", "STORE_DEREF", "STORE_NAME")
_WRITERS = frozenset(("append", "extend", "add", "update", "clear", "insert", "setdefault", "appendleft", "pop"))
_BETWEEN = (
    "LOAD_CONST",
    "LOAD_SMALL_INT",
    "BINARY_",
    "BUILD_SLICE",
    "SWAP",
    "COPY",
    "CACHE",
    "NOP",
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
)


class FunctionWatch:
    """Calls `entered` with the frame of every function of a user's file that begins on this thread, once per code.

    Python tells of every call through its tracer, which slows all code down; so `pause` stops it around what runs no
    code of forward. Python 3.12 and later have a cheaper way, which asks once per code."""

    TOOL = 4  # of the six that sys.monitoring admits, none of those that it names for debuggers and profilers

    def __init__(self, entered: Entered) -> None:
        self._entered = entered
        self.codes: dict[int, CodeType] = {}
        # A garbage collection may come at any moment, so what its callbacks run is not of forward.
        callbacks = (getattr(each, "__code__", None) for each in gc.callbacks)
        self._others: dict[int, CodeType] = {id(code): code for code in callbacks if code is not None}
        self._switch: Callable[[Any], None] | None = None
        self._paused = False
        self._imports = 0  # how many imports ran when it began

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._imports = _imports_running()
        if sys.version_info >= (3, 12) and sys.monitoring.get_tool(self.TOOL) is None:
            with self._monitoring():
                yield
            return
        debugged = sys.gettrace() is not None
        self._switch = sys.setprofile if debugged else sys.settrace  # a debugger keeps its tracer
        before: Any = sys.getprofile() if debugged else None
        self._switch(self._note)
        try:
            yield
        finally:
            self._switch(before)
            self._switch = None

    if sys.version_info >= (3, 12):

        @contextlib.contextmanager
        def _monitoring(self) -> Iterator[None]:
            begins = sys.monitoring.events.PY_START
            sys.monitoring.use_tool_id(self.TOOL, "zbcompile")
            sys.monitoring.register_callback(self.TOOL, begins, self._began)
            sys.monitoring.restart_events()
            sys.monitoring.set_events(self.TOOL, begins)
            try:
                yield
            finally:
                sys.monitoring.set_events(self.TOOL, 0)
                sys.monitoring.free_tool_id(self.TOOL)

        def _began(self, code: CodeType, _: int) -> Any:
            if self._paused or _imports_running() > self._imports:
                return None if is_users_file(code.co_filename) else sys.monitoring.DISABLE
            here = inspect.currentframe()
            if here is not None and here.f_back is not None:
                self._note(here.f_back, "call", None)
            return sys.monitoring.DISABLE

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        paused, self._paused, switch = self._paused, True, self._switch
        if switch is not None:
            switch(None)
        try:
            yield
        finally:
            self._paused = paused
            if switch is not None and not paused:
                switch(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or id(code) in self.codes or id(code) in self._others:
            return
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if not (is_function and is_users_file(code.co_filename) and is_users_name(frame.f_globals.get("__name__"))):
            self._others[id(code)] = code
        elif _imports_running() == self._imports:  # not what an import inside of forward calls
            self.codes[id(code)] = code
            self._entered(frame)


def _imports_running() -> int:
    """How many modules, on the stack of this thread, are being imported."""
    frame, found = inspect.currentframe(), 0
    while frame is not None:
        found += frame.f_code.co_name == "_call_with_frames_removed"  # of importlib, around a module's code
        frame = frame.f_back
    return found


def is_users_name(module: object) -> bool:
    """Whether the name of a module is none of Python's, torch's, numpy's or ours."""
    return isinstance(module, str) and module.partition(".")[0] not in _NOT_USERS


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType, by: tuple[str, ...] = _GLOBAL) -> frozenset[str]:
    """The names that code reads from its globals, or that other instructions name."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in by)


def text_constants(code: CodeType) -> list[str]:
    """The short texts in code: names by which it may look something up."""
    return [each for each in code.co_consts if isinstance(each, str) and len(each) < 100]


def only_updates(codes: Iterable[CodeType], name: str) -> bool:
    """Whether code reads `name` (an attribute, a global, a variable of a closure) only to count or collect there:
    `self.count += 1`, `self.seen.append(x)`."""
    return all(_only_updates(code, name) for code in codes)


def _only_updates(code: CodeType, name: str) -> bool:
    if name in code.co_consts:  # getattr(self, "count")
        return False
    if name not in (*code.co_names, *code.co_freevars, *code.co_cellvars):
        return True
    made = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    places = [i for i, each in enumerate(made) if each.argval == name and each.opname.startswith(_LOADS)]
    return all(_is_update(made, place, name) for place in places)


def _is_update(made: list[dis.Instruction], place: int, name: str) -> bool:
    rest = made[place + 1 :]
    if rest and rest[0].opname in ("LOAD_METHOD", "LOAD_ATTR") and rest[0].argval in _WRITERS:
        call = next((i for i, each in enumerate(rest) if each.opname.startswith("CALL")), len(rest))
        return rest[call + 1 :] != [] and rest[call + 1].opname == "POP_TOP"
    depth = 0  # values on the stack above the one that was read
    for before, each in zip([None, *rest], rest, strict=False):
        if each.opname in ("STORE_SUBSCR", "STORE_SLICE"):  # into it: its key is above it
            keys = 1 if each.opname == "STORE_SUBSCR" else 2
            return depth == keys or (depth == keys + 1 and before is not None and before.opname == "SWAP")
        if not each.opname.startswith(_BETWEEN):
            counts = any(other.opname == "BINARY_OP" for other in rest[: rest.index(each)])
            return counts and each.opname in _STORES and each.argval == name
        depth += dis.stack_effect(each.opcode, each.arg)
    return False


def line_that_writes(codes: Iterable[CodeType], name: str) -> str:
    """The first line of code that assigns `name`, or else the first that reads it: `model.py:12: self.count += 1`."""
    for kinds in (_STORES, _LOADS):
        for code in codes:
            line = code.co_firstlineno
            for each in dis.get_instructions(code):
                line = each.positions.lineno or line if each.positions else line
                if each.argval == name and each.opname.startswith(kinds):
                    text = linecache.getline(code.co_filename, line).strip()
                    return f"{shown_path(code.co_filename)}:{line}: {text}"
    return ""
