"""Effects of forward and loss in Python, which a compiled step does not repeat.

A step is traced once. Attributes that forward sets, numbers that it draws from Python's or numpy's
generators and seeds that it sets would be the same in every later step.
"""

import contextlib
import dis
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.passes.capture.known_values import KnownValues
from zbcompile.passes.capture.state_snapshot import HOOKS, SUBMODULES, StateSnapshot
from zbcompile.passes.capture.unsupported import (
    CARRIES_A_TENSOR,
    CATCHES_A_QUESTION,
    CHANGES_HOOKS,
    DRAWS_OUTSIDE_TORCH,
    REPLACES_A_MODULE,
    SETS_A_SEED,
    at,
)
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.source_location import is_called_by_user, users_line
from zbcompile.passes.module_state import functions_of
from zbcompile.passes.torch_private import DATA_DEPENDENT_ERRORS, real_mode, replaced

_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")


class TraceAgain(Exception):
    """The step must be traced again: forward installed hooks, as some models do when they first
    run, or the first run of the step returned other gradients than its trace."""


class PythonEffects:
    """Watches what forward and loss do in Python during every run of an export.

    Attributes:
        changed: Paths of the module state that forward changes, such as `model.calls`.
        warnings: Sentences for the user.
    """

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self.changed: frozenset[str] = frozenset()
        self.warnings: list[str] = []
        self._roots = (model, loss)
        self._runs = 0
        self._hooks_are_installed = False

    @contextlib.contextmanager
    def watched(self, known: KnownValues) -> Iterator[None]:
        """Context of one run of forward and loss, after which the module state is as before.

        Raises:
            CaptureError: Forward does what no graph can repeat.
        """
        snapshot = StateSnapshot(*self._roots)
        known.protect(
            {path: value for path, value in snapshot.values.items() if isinstance(value, Tensor)}
        )
        generators = _generators(snapshot.values)
        before = {name: _state(generator) for name, generator in generators.items()}
        lines: dict[str, str] = {}
        try:
            with _lines_of_draws(lines), _seeds_refused(), _caught_questions_refused():
                yield
        finally:  # also if a question failed: the model believes that its hooks are there
            installs = not self._hooks_are_installed and snapshot.installed_hooks()
            changes = snapshot.restore()
        for path, _ in changes:
            if path.startswith(SUBMODULES):
                raise CaptureError(REPLACES_A_MODULE.format(path=path.removeprefix(SUBMODULES)))
        if installs:
            self._hooks_are_installed = True
            raise TraceAgain
        # The second run finds the generators where the first one left them, unless forward seeds
        # them: then every run draws the same numbers.
        self._runs += 1
        for name, generator in generators.items():
            if self._runs > 1 and _state(generator) != before[name]:
                place = at(lines.get(name, ""))
                raise CaptureError(DRAWS_OUTSIDE_TORCH.format(generator=name, at=place))
        self._note_changes(changes)

    def _note_changes(self, changes: list[tuple[str, bool]]) -> None:
        for path, carries in changes:
            if path.startswith(HOOKS):
                raise CaptureError(CHANGES_HOOKS.format(path=path))
            name = path.rpartition(".")[2]
            if carries and name in self._names_read():
                raise CaptureError(CARRIES_A_TENSOR.format(path=path))
            sentence = (
                f"forward changes {path}. A compiled step runs no Python, so it never does: "
                "what reads this before it is written gets the value from before the first step."
            )
            if sentence not in self.warnings:
                self.warnings.append(sentence)
        self.changed |= {path for path, _ in changes}

    def _names_read(self) -> set[str]:
        """Returns the attributes and globals that the user's functions read by name."""
        codes = [function.__code__ for function in functions_of(*self._roots)]
        texts = {value for code in codes for value in code.co_consts if isinstance(value, str)}
        return texts | {
            instruction.argval
            for code in codes
            for instruction in dis.get_instructions(code)
            if instruction.opname in _READS
        }


def _generators(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Python's and numpy's generators, and those among the values of the module state."""
    generators: dict[str, Any] = {
        name: module.random.__self__ for name, module in _modules_that_draw().items()
    }
    generators |= {path: value for path, value in values.items() if _state(value) is not None}
    return generators


def _modules_that_draw() -> dict[str, types.ModuleType]:
    numpy = sys.modules.get("numpy")
    modules = {"Python's random module": random, "numpy.random": getattr(numpy, "random", None)}
    return {name: module for name, module in modules.items() if module is not None}


def _state(generator: Any) -> bytes | None:
    """Returns the state of a generator of Python or numpy; None for other objects."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    kind = type(generator)
    draws = kind.__name__ == "RandomState" or hasattr(kind, "bit_generator")
    return pickle.dumps(generator) if draws and kind.__module__.startswith("numpy.") else None


@contextlib.contextmanager
def _lines_of_draws(lines: dict[str, str]) -> Iterator[None]:
    """Context that notes the user's first line which calls a module that draws, by its name."""
    with contextlib.ExitStack() as stack:
        for name, module in _modules_that_draw().items():
            generator = module.random.__self__
            for key, function in list(vars(module).items()):
                if key[0] != "_" and getattr(function, "__self__", None) is generator:
                    note = _before_call(function, lambda line, n=name: lines.setdefault(n, line))  # type: ignore[misc]
                    stack.enter_context(replaced(module, key, note))
        yield


def _before_call(function: Callable[..., Any], note: Callable[[str], Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        note(users_line(sys._getframe(1)))
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _seeds_refused() -> Iterator[None]:
    """Context in which forward must not change the state of torch's generator."""
    restore, before = torch.set_rng_state, torch.get_rng_state()

    def refuse(line: str) -> None:
        raise CaptureError(SETS_A_SEED.format(at=at(line)))

    def set_state(state: Tensor) -> None:
        if is_called_by_user(sys._getframe(1)):  # torch restores states around what it traces
            refuse(users_line(sys._getframe(1)))
        restore(state)

    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random):
            stack.enter_context(replaced(module, "set_rng_state", set_state))
            for name in ("manual_seed", "seed"):
                function = _before_call(getattr(module, name), refuse)
                stack.enter_context(replaced(module, name, function))
        yield
    with real_mode():
        is_unchanged = torch.equal(torch.get_rng_state(), before)
    if not is_unchanged:
        restore(before)
        refuse("")


@contextlib.contextmanager
def _caught_questions_refused() -> Iterator[None]:
    """Context in which forward must not catch the error that reading a value raises in a trace.

    Eager mode raises none, and takes another branch.
    """
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        for kind in DATA_DEPENDENT_ERRORS:
            constructor = _before_call(kind.__init__, lines.append)
            stack.enter_context(replaced(kind, "__init__", constructor))
        yield
    if lines:
        raise CaptureError(CATCHES_A_QUESTION.format(at=at(lines[0])))
