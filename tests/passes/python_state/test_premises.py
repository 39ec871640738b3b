"""What stands in each kind of Python object is seen to change, and to come back, by one look before a step."""

import argparse
import array
import builtins
import collections
import contextvars
import copy
import enum
import functools
import operator
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile


class Base:
    rate = 1.0

    def __len__(self) -> int:
        return 1


class Settings(Base):
    """A class, one of whose attributes is inherited."""

    def __init__(self) -> None:
        self.tau = 1.0


class Number(float):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = float.__hash__


class Gains(list[float]):
    gain = 1.0


class Mode(enum.Enum):
    SLOW = 1.0


CODE, HOOKED = compile("REAL['a']", "made", "eval"), nn.Identity()
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
SETTINGS, REAL, KEYED = Settings(), {"a": 1.0}, {"tau": 1.0}
REFERENCE, WEAK = weakref.ref(SETTINGS), weakref.WeakValueDictionary(a=SETTINGS)


def plain() -> float:
    return 1.0


def by_class() -> float:
    """Begins when the class of SETTINGS already tells who reads its instances."""
    return object.__getattribute__(SETTINGS, "tau") * Settings.rate  # type: ignore[no-any-return]


@functools.singledispatch
def kind_of(value: object) -> float:
    return 1.0


def other() -> float:
    return 2.0


@functools.cache
def kept() -> float:
    return REAL["a"]


def unchanged(module: nn.Module, args: Any, output: Any) -> None:
    """A hook."""


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


def late() -> float:
    return globals().get("LATE", 1.0)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """How forward reads a value, which the net has as `value`, and a change with its undoing: of the net, or else of an
    object's attribute or item from 1.0 to 2.0."""

    read: Callable[[Any], Any]
    value: Any = None
    change: Callable[[Any], Any] | None = None
    undo: Callable[[Any], Any] | None = None

    def apply(self, net: Any) -> None:
        self.change(net) if self.change else _put(self.value, 2.0)

    def take_back(self, net: Any) -> None:
        self.undo(net) if self.undo else _put(self.value, 1.0)


def _put(value: Any, number: float) -> None:
    if hasattr(value, "tau"):
        value.tau = number
    else:
        value["a" if isinstance(value, collections.abc.Mapping) else len(value) - 1] = number


def hook(new: Any) -> Callable[[Any], None]:
    """Puts a hook in the place of the one that the first layer has."""
    return lambda net: net.layers[0]._forward_hooks.update(dict.fromkeys(net.layers[0]._forward_hooks, new))


def store(owner: Any, name: str, new: Any) -> Callable[[Any], None]:
    return lambda net: setattr(owner, name, new)


CASES = {
    "set": Case(lambda n: len(n.value), {1}, lambda n: n.value.add(2), lambda n: n.value.discard(2)),
    "array": Case(lambda n: n.value[0], np.ones(1)),
    "bytes": Case(lambda n: n.value[0], bytearray(b"a"), lambda n: n.value.append(1), lambda n: n.value.pop()),
    "numbers": Case(lambda n: n.value[0], array.array("d", [1.0])),
    "long list": Case(lambda n: n.value[-1], [1.0] * 300),
    "order": Case(
        lambda n: list(n.value) == ["a", "b"], {"a": 1, "b": 2}, lambda n: n.value.update(a=n.value.pop("a"))
    ),
    "UserDict": Case(lambda n: n.value["a"], collections.UserDict(a=1.0)),
    "ChainMap": Case(lambda n: n.value["a"], collections.ChainMap({"a": 1.0})),
    "proxy": Case(lambda n: n.proxy["a"], REAL),
    "kept result": Case(lambda n: kept(), REAL),
    "argparse": Case(lambda n: n.value.tau, argparse.Namespace(tau=1.0)),
    "weak reference": Case(lambda n: REFERENCE().tau, SETTINGS),  # type: ignore[union-attr]
    "all attributes": Case(lambda n: vars(SETTINGS)["tau"], SETTINGS),
    "own attributes": Case(
        lambda n: vars(n)["value"], 1.0, lambda n: setattr(n, "value", 2.0), lambda n: setattr(n, "value", 1.0)
    ),
    "by object": Case(lambda n: object.__getattribute__(SETTINGS, "tau"), SETTINGS),
    "by object, with a key of that name": Case(
        lambda n: object.__getattribute__(SETTINGS, "tau") * KEYED["tau"], SETTINGS
    ),
    "class that is watched": Case(lambda n: SETTINGS.tau * by_class(), SETTINGS),
    "dir": Case(lambda n: "more" in dir(n), 1.0, lambda n: setattr(n, "more", 2.0), lambda n: delattr(n, "more")),
    "copy": Case(lambda n: copy.copy(SETTINGS).tau, SETTINGS),
    "weak values": Case(lambda n: WEAK["a"].tau, SETTINGS),
    "long list of objects": Case(
        lambda n: n.value[-1].tau,
        [Settings() for _ in range(80)],
        lambda n: setattr(n.value[-1], "tau", 2.0),
        lambda n: setattr(n.value[-1], "tau", 1.0),
    ),
    "long mapping": Case(
        lambda n: n.value[299],
        dict.fromkeys(range(300), 1.0),
        lambda n: n.value.update({299: 2.0}),
        lambda n: n.value.update({299: 1.0}),
    ),
    "order that a class keeps": Case(
        lambda n: float(next(iter(n.value)) == "a"),
        collections.OrderedDict(a=1, b=2),
        lambda n: n.value.move_to_end("a"),
        lambda n: n.value.move_to_end("b"),
    ),
    "class": Case(lambda n: type(SETTINGS).rate, 1, store(Settings, "rate", 2.0), lambda n: delattr(Settings, "rate")),
    "special method": Case(
        lambda n: len(SETTINGS), 1, store(Settings, "__len__", lambda s: 2), lambda n: delattr(Settings, "__len__")
    ),
    "registry": Case(lambda n: kind_of(1), 1, lambda n: kind_of.register(int, lambda value: 2.0)),
    "new": Case(lambda n: len(vars(n)), 1.0, lambda n: setattr(n, "more", 2.0), lambda n: delattr(n, "more")),
    "inherited": Case(lambda n: Settings.rate, None, store(Base, "rate", 2.0), store(Base, "rate", 1.0)),
    "shadowed": Case(lambda n: SETTINGS.rate, 1, store(Settings, "rate", 2.0), lambda n: delattr(Settings, "rate")),
    "subclass of float": Case(lambda n: n.value * 1.0, Number(1.0), lambda n: setattr(n, "value", Number(2.0))),
    "enum": Case(lambda n: n.value.tau, Mode.SLOW),
    "variable": Case(lambda n: VARIABLE.get(), None, lambda n: VARIABLE.set(2.0), lambda n: VARIABLE.set(1.0)),
    "code": Case(
        lambda n: plain(), None, store(plain, "__code__", other.__code__), store(plain, "__code__", plain.__code__)
    ),
    "nothing": Case(
        lambda n: hasattr(n, "extra"), 1.0, lambda n: setattr(n, "extra", None), lambda n: delattr(n, "extra")
    ),
    "None": Case(lambda n: n.none is None, None, lambda n: setattr(n, "none", 2.0), lambda n: setattr(n, "none", None)),
    "list of a subclass": Case(
        lambda n: n.value.gain, Gains([1.0]), lambda n: setattr(n.value, "gain", 2.0), lambda n: vars(n.value).clear()
    ),
    "name of a class": Case(
        lambda n: len(type(SETTINGS).__name__),
        1,
        store(Settings, "__name__", "Other"),
        store(Settings, "__name__", "Settings"),
    ),
    "builtin": Case(lambda n: pow(2.0, 1.0), None, store(builtins, "pow", max), store(builtins, "pow", pow)),
    "code from a text": Case(lambda n: eval(CODE), REAL),
    "hook of another module": Case(
        lambda n: HOOKED(torch.ones(())), None, lambda n: HOOKED.register_forward_hook(lambda m, a, out: out * 2)
    ),
    "hook that is replaced": Case(lambda n: 1.0, None, hook(doubled), hook(unchanged)),
    "absent global": Case(
        lambda n: late(), None, lambda n: globals().update(LATE=2.0), lambda n: operator.delitem(globals(), "LATE")
    ),
    "function of torch": Case(
        lambda n: F.relu(torch.ones(())), None, store(F, "relu", torch.sigmoid), store(F, "relu", F.relu)
    ),
}
Mode.SLOW.tau = 1.0  # type: ignore[attr-defined]


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.value, self._read, self.proxy = case.value, case.read, types.MappingProxyType(REAL)
        self.none = None
        self.layers[0].register_forward_hook(unchanged)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self._read(self)  # type: ignore[no-any-return]


@pytest.mark.mostly_slow(every=6, suite=3)
@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen_and_comes_back(name: str) -> None:
    case, x = CASES[name], torch.ones(2, 2)
    net = Net(case)
    pipe = zbcompile.pipeline(net, schedule="1f1b", ranks=1, microbatches=1, loss=F.mse_loss)
    pipe.compile(x, target=x)
    (standing,) = [each for entry in pipe._compiled.cache.steps for each in entry.standing]
    assert standing.hold(), standing.change()
    case.apply(net)
    try:
        assert not standing.hold()
        assert standing.change()
    finally:
        if case.undo or not case.change:
            case.take_back(net)
            assert standing.hold(), standing.change()
