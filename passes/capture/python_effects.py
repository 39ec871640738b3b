"""What forward does in Python that a compiled step does not repeat: numbers drawn outside torch, and output.

Capture runs forward once. A number from Python's or numpy's generators is then the same in every step, an error that
has no bound, so it is refused. Printing, or reading a value for logging, happens only once, which is worth a warning.
"""

import builtins
import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import nn

from zbcompile.passes.graph.source_location import calling_line
from zbcompile.passes.torch_private import replaced

_REMEDY = (
    "capture runs forward once, so every step would use the same number. Draw it with torch (torch.rand), or pass it "
    "as an input"
)


@contextlib.contextmanager
def numbers_drawn_outside_torch(model: nn.Module, problem: Callable[[str], None]) -> Iterator[None]:
    """Around a forward: call `problem` if Python's or numpy's generators advance, or one that a module holds."""
    before, lines = _states(model), dict[str, str]()
    with contextlib.ExitStack() as stack:
        for name, module, owner in _global_generators():
            for function in _functions_of(module, owner):
                original = getattr(module, function)
                stack.enter_context(replaced(module, function, _noting(original, name, lines)))
        yield
    for name, state in _states(model).items():
        if not _equal(state, before.get(name)):
            line = f" ({lines[name]})" if lines.get(name) else ""
            problem(f"forward draws from {name}{line}; {_REMEDY}.")


def _global_generators() -> Iterator[tuple[str, ModuleType, Any]]:
    """The global generators of Python and numpy, of those modules that are imported."""
    yield "Python's random module", random, random.Random
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield "numpy.random", numpy.random, numpy.random.RandomState


def _functions_of(module: ModuleType, owner: type) -> list[str]:
    """The public functions of a module that are methods of its global generator."""
    return [n for n, f in vars(module).items() if n[0] != "_" and isinstance(getattr(f, "__self__", None), owner)]


def _noting(function: Callable[..., Any], name: str, lines: dict[str, str]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        lines.setdefault(name, calling_line())
        return function(*args, **kwargs)

    return noting


def _states(model: nn.Module) -> dict[str, Any]:
    """The states of the global generators and of those that modules hold, by a name for messages."""
    found: dict[str, Any] = {"Python's random module": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy.random"] = numpy.random.get_state(legacy=False)
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            name = f"the generator {path}.{attribute}".replace(" .", " ")
            if isinstance(value, random.Random):
                found[name] = value.getstate()
            elif numpy is not None and isinstance(value, numpy.random.Generator):
                found[name] = value.bit_generator.state
            elif numpy is not None and isinstance(value, numpy.random.RandomState):
                found[name] = value.get_state(legacy=False)
    return found


def _equal(one: Any, other: Any) -> bool:
    """Whether two states are equal; they hold numbers, tuples, mappings and arrays."""
    if isinstance(one, dict):
        return isinstance(other, dict) and all(_equal(one[key], other.get(key)) for key in one)
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


@contextlib.contextmanager
def output_of_forward(warning: Callable[[str], None]) -> Iterator[None]:
    """Around a forward: call `warning` for every line that prints."""
    original = builtins.print

    def noting(*args: Any, **kwargs: Any) -> None:
        line = calling_line()
        if line:
            warning(f"forward prints ({line}); a compiled step runs no Python, so this happens once, at capture.")
        original(*args, **kwargs)

    with replaced(builtins, "print", noting):
        yield
