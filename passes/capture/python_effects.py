"""What forward does in Python that a compiled step does not repeat: numbers drawn outside torch, and output.

Capture runs forward once. A number from Python's or numpy's generators is then the same in every step, an error that
has no bound, so it is refused. Printing, or reading a value for logging, happens only once, which is worth a warning.
"""

import builtins
import contextlib
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from zbcompile.passes.capture.torch_private import traced_graph
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.source_location import calling_line, is_users_name, shown_path
from zbcompile.passes.torch_private import HigherOrderOperator, nowhere_traced, replaced, told_of_calls


@contextlib.contextmanager
def numbers_drawn_outside_torch(held: Mapping[str, Any], problem: Callable[[str], None]) -> Iterator[None]:
    """Around a forward: call `problem` if Python's or numpy's generators advance, or one among the values `held` by
    modules and functions, by path."""
    names = {"Python's random module": random, "numpy.random": getattr(sys.modules.get("numpy"), "random", None)}
    found = {name: (module.random.__self__, module) for name, module in names.items() if module is not None}
    before, lines = {name: state_of(generator) for name, (generator, _) in found.items()}, dict[str, str]()
    others = {f"the generator {path}": value for path, value in held.items() if is_generator(value)}
    before |= {name: state_of(generator) for name, generator in others.items()}
    with contextlib.ExitStack() as stack:
        for name, (generator, module) in found.items():
            tell = lambda name=name: lines.setdefault(name, calling_line())  # noqa: E731
            for function in [n for n, f in vars(module).items() if getattr(f, "__self__", None) is generator]:
                if function[0] != "_":
                    stack.enter_context(told_of_calls(module, function, tell))
        yield
    now = {name: state_of(generator) for name, (generator, _) in found.items()}
    now |= {name: state_of(generator) for name, generator in others.items()}
    for name, state in now.items():
        if not _equal(state, before[name]):
            line = f" ({lines[name]})" if name in lines else ""
            problem(Refusal.OWN_RANDOM.text(generator=name, line=line))


# What forward may ask of torch and no graph can answer, by the names in its code
_UNANSWERED: Mapping[tuple[str, ...], str] = {
    ("default_generator", "set_state"): "the state of torch's generator",
    ("initial_seed",): "the seed",
    ("mkldnn", "enabled"): "whether oneDNN is enabled, which torch.export turns off while it traces",
    ("get_num_threads",): "the number of threads",
    ("is_anomaly_enabled",): "whether anomalies are detected",
}


def refuse_unanswered(functions: Iterable[FunctionType], problem: Callable[[str], None]) -> None:
    """Call `problem` if a function of forward or loss asks torch for what is different in a compiled step."""
    for code, (names, asked) in itertools.product((each.__code__ for each in functions), _UNANSWERED.items()):
        if set(names) <= names_in(code):
            line = f"{shown_path(code.co_filename)}:{code.co_firstlineno}: {code.co_name}"
            problem(Refusal.STATE_OF_TORCH.text(asked=asked, line=line))


def is_generator(value: Any) -> bool:
    """Whether a value draws random numbers."""
    kind = type(value)  # an object that imports what it is asked for is asked for nothing
    drawing = hasattr(kind, "getstate") or hasattr(kind, "bit_generator") or issubclass(kind, torch.Generator)
    return drawing or (kind.__name__ == "RandomState" and kind.__module__.startswith("numpy"))


def state_of(generator: Any) -> Any:
    """The state of a generator of Python or numpy; None for any other, which torch.export refuses."""
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate()
    return generator.get_state(legacy=False) if type(generator).__name__ == "RandomState" else None


@contextlib.contextmanager
def generator_seeded(problem: Callable[[str], None]) -> Iterator[None]:
    """Around a forward: call `problem` if it seeds torch's generator, also inside of torch.random.fork_rng. A trace
    draws nothing, so that nothing else sets its state. A state that is put back seeds nothing if eager would have drawn
    nothing since forward read it."""
    before, lines, states = torch.get_rng_state(), list[tuple[str, str]](), dict[int, tuple[torch.Tensor, int]]()
    read, restore = torch.get_rng_state, torch.set_rng_state

    def noted() -> torch.Tensor:
        graph, state = traced_graph(), read()
        if graph is not None:
            states[id(state)] = state, len(graph.nodes)
        return state

    def restored(state: torch.Tensor) -> None:
        known = id(state) in states and not _may_have_drawn(states[id(state)][1])
        with nowhere_traced(), torch.no_grad():
            if not torch.equal(state, read()) or (not known and _is_users_call(inspect.currentframe())):
                lines.append(("puts back the state of", calling_line()))
            restore(state)

    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random):
            stack.enter_context(replaced(module, "get_rng_state", noted))
            stack.enter_context(replaced(module, "set_rng_state", restored))
            for name in ("manual_seed", "seed"):
                stack.enter_context(told_of_calls(module, name, lambda: lines.append(("seeds", calling_line()))))
        yield
    if lines or not torch.equal(torch.get_rng_state(), before):
        torch.set_rng_state(before)
        does, line = next(iter(lines), ("seeds", ""))
        problem(Refusal.SEED.text(does=does, line=f" ({line})" if line else ""))


def _may_have_drawn(first: int) -> bool:
    """Whether the operations that were traced from this number on draw random numbers; those of a region might."""
    graph = traced_graph()
    nodes = itertools.islice(graph.nodes, first, None) if graph is not None else ()
    return graph is None or any(is_random(node) or isinstance(node.target, HigherOrderOperator) for node in nodes)


def _is_users_call(frame: FrameType | None) -> bool:
    """Whether code of a user has called the function of this frame, also by way of torch.random.fork_rng: what is drawn
    between a state and its return is drawn again in eager. torch's own code puts states back around what it traces."""
    frame = None if frame is None else frame.f_back
    while frame is not None and frame.f_globals.get("__name__") in ("contextlib", torch.random.__name__):
        frame = frame.f_back
    return frame is not None and is_users_name(frame.f_globals.get("__name__"))


def _equal(one: Any, other: Any) -> bool:
    """Whether two states are equal; they hold numbers, tuples, mappings and arrays."""
    if isinstance(one, dict):
        return isinstance(other, dict) and all(_equal(one[key], other.get(key)) for key in one)
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def output_of_forward(warning: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """Around a forward: call `warning` for every line that prints. The builtin itself must be replaced: forward may
    print to any file, and would see a replaced sys.stdout, while code that has kept the original would bypass it."""

    def tell() -> None:
        line = calling_line()
        if line:
            warning(f"forward prints ({line}); a compiled step runs no Python, so this happens once, at capture.")

    return told_of_calls(builtins, "print", tell)


def names_in(code: CodeType) -> frozenset[str]:
    """Returns the globals and attributes that code names, with the functions inside of it."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*inner)
