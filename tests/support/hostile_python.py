"""Python state that a captured graph does not see, changed between steps by every way that came to mind.

    python -m tests.support.hostile_python [--family hooks] [--only PART] [--every 4] [--show] [--count]

from the repository's root. Every case of hostile_python.txt becomes a module of its own, which is imported twice: one
copy trains in eager mode, the other one as a pipeline in this process. A change is made in both, then both take a step.
The step is right if losses, gradients, parameters and buffers have equal bits. It is refused if one of our errors comes
out, silent if other numbers do, and raw if another exception does; blind if docs/models.md says that nothing sees it.
"""

import argparse
import contextlib
import importlib.util
import inspect
import io
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.damage import OURS

MICROBATCHES, ROWS = 2, 4
PATIENCE = 60  # seconds of the processor for one copy of a case
SCHEDULES = ("zb-h1", "1f1b", "zb-h1", "zb-v", "1f1b")
CASES = Path(__file__).with_suffix(".txt")
AGAIN = "compiling again"  # what the notice of a compilation for a change says
TRACED = {
    "FakeTensor",
    "FunctionalTensor",
    "SymInt",
    "SymFloat",
    "SymBool",
    "Proxy",
}  # nothing of a trace may stay behind
Snapshot = dict[str, Any]

MODULE = """\
import array, argparse, collections, configparser, contextlib, contextvars, copy, dataclasses, datetime, decimal, enum
import functools, io, itertools, json, logging, math, operator, os, pathlib, queue, random, re, secrets, sys, threading
import time, types, uuid, warnings, weakref
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as P
import torch.nn.utils.prune
from torch import nn
from torch.utils.checkpoint import checkpoint

{top}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        {init}

    def forward(self, x{goal}):
        x = torch.tanh(self.a(x))
        {body}
        {end}

def loss(y, t):
    {loss}
    return F.mse_loss(y, t)

model = Net()
{after}
"""
PEFT = """\
from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(r=2, target_modules=["a", "b"]))
model.base_model.model.c.requires_grad_(True)  # something trains without adapters, too
{peft}
for name, parameter in model.named_parameters():
    if "lora_B" in name:
        nn.init.normal_(parameter)
"""

# Places where a number is read. What stands outside of the model finds it as a global.
SCALED = (
    "class Scaled(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x * {first}\n"
)
SCALED += "    @staticmethod\n    def backward(ctx, g):\n        return g * {second}"
READERS: dict[str, dict[str, str]] = {
    "forward": {"body": "x = x * (SELF)"},
    "a branch": {"body": "x = torch.sin(x) if (SELF) > 1.5 else x * (SELF)"},
    "a function": {"top": "def helper(x):\n    return x * (READ)", "body": "x = helper(x)"},
    "the loss": {"loss": "y = y * (READ)"},
    "a submodule": {
        "top": "class Sub(nn.Module):\n    def forward(self, x):\n        return x * (READ)",
        "init": "self.sub = nn.Sequential(nn.Identity(), Sub())",
        "body": "x = self.sub(x)",
    },
    "a hook": {"after": "model.a.register_forward_hook(lambda m, a, out: out * (READ))"},
    "a Function": {"top": SCALED.format(first="(READ)", second="(READ)"), "body": "x = Scaled.apply(x)"},
    "a backward": {"top": SCALED.format(first="1.0", second="(READ)"), "body": "x = Scaled.apply(x)"},
    "a checkpoint": {"body": "x = checkpoint(lambda v: torch.sin(v * (SELF)), x, use_reentrant=False)"},
    "a checkpoint with re-entry": {"body": "x = checkpoint(lambda v: torch.sin(v * (SELF)), x, use_reentrant=True)"},
    "a parametrisation": {
        "top": "class Parametrisation(nn.Module):\n    def forward(self, w):\n        return w * (READ)",
        "after": "P.register_parametrization(model.b, 'weight', Parametrisation())",
    },
    "a comprehension": {"body": "x = sum([x * (SELF) for _ in range(2)])"},
    "a method": {"after": "Net.method = lambda self, x: x * (READ)", "body": "x = self.method(x)"},
    "a tensor": {"body": "x = x * torch.full((6,), float(SELF))"},
    "a size": {"body": "x = F.pad(x[:, : 2 + int(SELF)], (0, 4 - int(SELF)))"},
    "no_grad": {"body": "with torch.no_grad():\n    s = x.mean() * (SELF)\nx = x + s"},
    "a gradient mode": {"body": "with torch.set_grad_enabled((SELF) < 1.5):\n    x = self.b(x * (SELF))"},
    "an exception": {
        "top": "def strict(v):\n    if v > 1.5:\n        raise ValueError(v)\n    return v",
        "body": "try:\n    x = x * strict(SELF)\nexcept ValueError:\n    x = torch.cos(x)",
    },
    "a text": {"body": "x = x * float(f'{float(SELF):.6f}')"},
    "vmap": {"body": "x = torch.vmap(lambda v: v * (SELF))(x)"},
    "code from a string": {
        "top": "CODE = compile('x * (READ)', 'made', 'eval')",
        "body": "x = eval(CODE, globals(), {'x': x})",
    },
    "a generator": {"body": "x = sum(x * k for k in ((SELF) for _ in range(2)))"},
    "a dispatch by type": {
        "top": "class Scale:\n    def __rmul__(self, x):\n        return x.mul(READ)\n    __array_ufunc__ = None",
        "after": "SCALE_OF_ALL = Scale()",
        "body": "x = SCALE_OF_ALL.__rmul__(x)",
    },
    "a callback": {"init": "self.call = lambda x: x * (READ)", "body": "x = self.call(x)"},
    "map": {"body": "x = next(map(lambda v: v * (SELF), [x]))"},
}


@dataclass(frozen=True)
class Case:
    """The source of a module, the changes between the steps, and how the steps are taken."""

    family: str
    name: str
    slots: dict[str, str]
    changes: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    schedule: str = "zb-h1"
    keeps_gradients: bool = False

    def source(self) -> str:
        """A module with `model` and `loss`."""
        slots = dict.fromkeys(("top", "init", "body", "loss", "after"), "") | self.slots
        if "peft" in slots:
            slots["after"] = PEFT.format(peft=slots["peft"]) + slots["after"]
        own = "own" in self.flags
        end = "x = torch.tanh(self.b(x))\nreturn self.c(x)"
        if own:
            end = "return y + self.c(torch.tanh(self.b(x))).mean()"
            slots["after"] += "\nloss = None"
        for slot, depth in (("init", 8), ("body", 8), ("loss", 4)):
            slots[slot] = slots[slot].strip("\n").replace("\n", "\n" + " " * depth)
        return MODULE.format(**slots, goal=", t" if own else "", end=end.replace("\n", "\n        "))


@dataclass
class Run:
    """What came of one copy: a snapshot after every step, and the exception that ended it."""

    snapshots: list[Snapshot] = field(default_factory=list)
    error: BaseException | None = None
    notices: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """right, refused, silent, raw or blind; after how many right steps, and what was said."""

    kind: str
    steps: int
    text: str = ""
    notices: tuple[str, ...] = ()


def read_cases() -> list[Case]:
    """All cases, the same ones in the same order at every call."""
    states, others = CASES.read_text(encoding="utf-8").split("---\n")
    readers = itertools.cycle(READERS)
    first = [_state(family, fields) for family, fields in _rows(states)]
    read = [_read(case, next(readers)) for case in first]
    plain = [_other(family, fields) for family, fields in _rows(others)]
    cases = read + plain + list(_pairs(first, plain, count=80))
    return [
        replace(
            case,
            schedule=SCHEDULES[number % len(SCHEDULES)],
            keeps_gradients=number % 7 == 6,
            flags=case.flags | ({"eval"} if number % 6 == 1 and "own" not in case.flags else set()),
        )
        for number, case in enumerate(cases)
    ]


def _rows(text: str) -> Iterator[tuple[str, list[str]]]:
    family = ""
    for line in text.splitlines():
        if line.startswith("["):
            family = line.strip("[]")
        elif line and not line.startswith("#"):
            yield family, [part.strip().replace("\\n", "\n") for part in re.split(r" \|(?= |$)", line)]


def _state(family: str, fields: Sequence[str]) -> Case:
    """A number that is read, in the slot "read" until a reader is chosen."""
    name, place, read, *changes = fields
    slots, flags = {"read": read}, frozenset[str]()
    if place.startswith("blind:"):
        flags, place = frozenset({"blind"}), place.removeprefix("blind:").strip()
    slot = "init" if place.startswith("self.") else "after" if place.startswith("after:") else "top"
    slots[slot] = place.removeprefix("after:").strip()
    if changes and changes[-1].startswith("last:"):
        slots["last"] = changes.pop().removeprefix("last:").strip()
    return Case(family, name, slots, tuple(changes), flags)


def _read(case: Case, reader: str) -> Case:
    read = case.slots["read"]
    if reader == "the loss" and "self" in read:
        reader = "forward"  # a loss that reads the model is a case of its own
    slots = {slot: text for slot, text in case.slots.items() if slot != "read"}
    for slot, text in READERS[reader].items():
        text = text.replace("SELF", read).replace("READ", re.sub(r"\bself\b", "model", read))
        slots[slot] = "\n".join(filter(None, (slots.get(slot, ""), text)))
    name = case.name if reader == "forward" else f"{case.name}, read in {reader}"
    return replace(case, name=name, slots=slots)


def _other(family: str, fields: Sequence[str]) -> Case:
    slots: dict[str, str] = {}
    changes, flags = [], set()
    for part in fields[1:]:
        key, _, text = part.partition(":")
        text = text.removeprefix(" ")
        if key == "then":
            changes.append(text)
        elif key in ("own", "blind", "eval"):
            flags.add(key)
        else:
            assert key in ("top", "init", "body", "loss", "after", "around", "last", "peft"), part
            slots[key] = text
    return Case(family, fields[0], slots, tuple(changes), frozenset(flags))


def _pairs(states: Sequence[Case], others: Sequence[Case], count: int) -> Iterator[Case]:
    """Two changes, the second a step after the first, the first one then taken back."""
    draw = random.Random(0)
    alone = [
        case
        for case in (*(_read(state, "forward") for state in states), *others)
        if case.changes and not case.flags & {"blind", "own"} and not {"around", "peft", "last"} & set(case.slots)
        and case.family not in ("environment", "seeds")
    ]  # fmt: skip
    found = 0
    while found < count:
        one, two = draw.sample(alone, 2)
        if one.family == two.family or _names(one) & _names(two):
            continue
        slots = {
            slot: "\n".join(filter(None, (one.slots.get(slot), two.slots.get(slot))))
            for slot in (*one.slots, *two.slots)
        }
        changes = [*itertools.chain(*itertools.zip_longest(one.changes, two.changes, fillvalue=""))]
        yield Case("pairs", f"{one.family}: {one.name}, and {two.family}: {two.name}", slots, tuple(changes[:4]))
        found += 1


def _names(case: Case) -> set[str]:
    """What a case binds, and the attributes of the model that it names."""
    text = "\n".join((*case.slots.values(), *case.changes))
    bound = re.findall(r"(\w+)(?:, \w+)*(?:\[.*?\])? [-+*|]?= ", text)
    return {*bound, *re.findall(r"(?:def|class|model\.) ?(\w+)", text)} - {"x"}


def run_case(case: Case, folder: Path) -> Outcome:
    """Train both copies and compare them."""
    file = folder / (re.sub(r"\W+", "_", f"case_{case.family}_{case.name}")[:90] + ".py")
    file.write_text(case.source())
    expected, got = Run(), Run()
    for run, pipelined in ((expected, False), (got, True)):
        with _process_as_before(), _patience():
            _train(case, file, pipelined, run)
    return _compared(case, expected, got)


def _train(case: Case, file: Path, pipelined: bool, run: Run) -> None:
    said = io.StringIO()
    world: ModuleType | None = None
    with (
        warnings.catch_warnings(record=True) as found,
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(said),
    ):
        warnings.simplefilter("always")
        try:
            world = _imported(file, pipelined)
            for snapshot in _steps(case, world, pipelined):
                run.snapshots.append(snapshot)
            run.left = sorted(_left_behind(world)) if pipelined else []
        except Exception as error:
            run.error = error
        finally:
            if world is not None and "last" in case.slots:
                with contextlib.suppress(NameError):  # an error came before what it takes back
                    exec(case.slots["last"], vars(world))
    run.notices = [line for line in said.getvalue().splitlines() if line] + [str(each.message) for each in found]


def _imported(file: Path, pipelined: bool) -> ModuleType:
    name = f"{file.stem}_{'piped' if pipelined else 'eager'}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    world = sys.modules[name] = importlib.util.module_from_spec(spec)
    torch.manual_seed(0)
    spec.loader.exec_module(world)
    return world


def _steps(case: Case, world: ModuleType, pipelined: bool) -> Iterator[Snapshot]:
    """A step, then a step after each change (three steps if there is none)."""
    pipe = None
    if pipelined:
        pipe = zbcompile.pipeline(
            world.model, schedule=case.schedule, microbatches=MICROBATCHES, ranks=2, loss=world.loss, exact=True
        )
    for step, change in enumerate(("", *(case.changes or ("", "")))):
        random.seed(step)
        np.random.seed(step)
        torch.manual_seed(step)
        exec(compile(change, f"<change {step}>", "exec"), vars(world))
        draw = torch.Generator().manual_seed(step)
        kind = next(world.model.parameters()).dtype
        x, goal = (torch.randn(ROWS, width, generator=draw, dtype=torch.float32).to(kind) for width in (6, 4))
        around: Any = eval(case.slots.get("around", "nullcontext()"), vars(world), {"step": step})
        snapshot: Snapshot = {}
        if "eval" in case.flags:
            snapshot["evaluation"] = _evaluated(world, pipe, x)
        with around:
            snapshot["loss"] = _step(world, pipe, x, goal, step)
        snapshot |= _state_of(world)
        _update(world, keep=case.keeps_gradients)
        yield snapshot


def _step(world: ModuleType, pipe: zbcompile.Pipeline | None, x: Tensor, goal: Tensor, step: int) -> Tensor:
    if pipe is not None:
        return pipe.step(x, goal) if world.loss is None else pipe.step(x, target=goal)
    losses = []
    for i, (part, aim) in enumerate(zip(x.chunk(MICROBATCHES), goal.chunk(MICROBATCHES), strict=True)):
        torch.manual_seed(zbcompile.microbatch_seed(step, i))
        loss = world.model(part, aim) if world.loss is None else world.loss(world.model(part), aim)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach() / MICROBATCHES)
    return sum(losses[1:], losses[0])


def _evaluated(world: ModuleType, pipe: zbcompile.Pipeline | None, x: Tensor) -> Tensor:
    if pipe is not None:
        return pipe.eval(x, microbatches=1)
    modes = {module: module.training for module in world.model.modules()}
    world.model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = world.model(x)
    for module, mode in modes.items():
        module.training = mode
    return output


def _trained(world: ModuleType) -> Iterator[tuple[str, nn.Parameter]]:
    yield from world.model.named_parameters(remove_duplicate=False)
    if isinstance(world.loss, nn.Module):
        yield from world.loss.named_parameters("loss")


def _state_of(world: ModuleType) -> Snapshot:
    found: Snapshot = {}
    for name, parameter in _trained(world):
        found[name] = parameter.detach().clone()
        found[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
    return found | {name: buffer.clone() for name, buffer in world.model.named_buffers(remove_duplicate=False)}


def _update(world: ModuleType, keep: bool) -> None:
    """A step of gradient descent, in place."""
    with torch.no_grad():
        for parameter in {id(parameter): parameter for _, parameter in _trained(world)}.values():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad.to(parameter.dtype))
                parameter.grad = parameter.grad if keep else None


def _left_behind(world: ModuleType) -> Iterator[str]:
    """Attributes and globals that hold values of a trace."""
    holders = [("", vars(world)), *((f"{name}.", vars(module)) for name, module in world.model.named_modules())]
    for prefix, values in holders:
        for name, value in list(values.items()):
            inside = (
                value if isinstance(value, (list, tuple)) else [*value.values()] if isinstance(value, dict) else [value]
            )
            if any(type(each).__name__ in TRACED for each in inside[:50]):
                yield f"{prefix}{name}"


@contextlib.contextmanager
def _process_as_before() -> Iterator[None]:
    """What a case changes in the process ends with it."""
    kind, environment, modules = torch.get_default_dtype(), dict(os.environ), set(sys.modules)
    gradients = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(kind)
        torch.set_grad_enabled(gradients)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        for name in set(sys.modules) - modules:
            if name.startswith(("case_", "hostile_settings")):
                del sys.modules[name]


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    def late(_: int, frame: FrameType | None) -> None:
        where = "" if frame is None else inspect.getframeinfo(frame).filename
        raise TimeoutError(f"more than {PATIENCE} s, in {where}")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _compared(case: Case, expected: Run, got: Run) -> Outcome:
    notices = tuple(got.notices)
    for step, (want, have) in enumerate(zip(expected.snapshots, got.snapshots, strict=False)):
        if other := [name for name in sorted(want.keys() | have.keys()) if not _equal(want.get(name), have.get(name))]:
            text = f"step {step}: " + "; ".join(
                f"{n}: {_short(have.get(n))} for {_short(want.get(n))}" for n in other[:3]
            )
            return Outcome("blind" if "blind" in case.flags else "silent", step, text, notices)
    steps = min(len(expected.snapshots), len(got.snapshots))
    if got.error is None and expected.error is None:
        again = not any(case.changes) and any(AGAIN in each for each in notices)
        kind = "left behind" if got.left else "compiled again" if again else "right"
        return Outcome(kind, steps, ", ".join(got.left), notices)
    if expected.error is not None and len(expected.snapshots) <= len(got.snapshots):
        kind = "eager fails" if got.error is not None else "eager alone fails"
        return Outcome(kind, steps, f"{type(expected.error).__name__}: {expected.error}", notices)
    if isinstance(got.error, OURS):
        return Outcome("refused", steps, str(got.error), notices)
    raw = "".join(traceback.format_exception(got.error, limit=-3))
    return Outcome("raw", steps, raw, notices)


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return (
            f"{value.flatten()[0].item():.7g}.. {str(value.dtype).removeprefix('torch.')}" if value.numel() else "empty"
        )
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", help="this family alone")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--every", type=int, default=1, help="one in so many cases")
    parser.add_argument("--count", action="store_true", help="count the cases and run none")
    parser.add_argument("--show", action="store_true", help="show the source of a case and everything that was said")
    options = parser.parse_args()
    cases = [case for case in read_cases() if options.family in (None, case.family) and options.only in case.name]
    cases = cases[:: options.every]
    if options.count:
        print(*(f"{count:5} {family}" for family, count in Counter(case.family for case in cases).items()), sep="\n")
        print(f"{len(cases):5} cases")
        return
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            outcome = run_case(case, Path(folder))
            counts.setdefault(case.family, Counter())[outcome.kind] += 1
            print(
                f"{outcome.kind:12} {case.family}: {case.name} ({case.schedule}, {outcome.steps} right) {outcome.text}",
                flush=True,
            )
            if options.show:
                print(case.source().partition("checkpoint\n")[2], *case.changes, *outcome.notices, sep="\n")
    print()
    for family, kinds in counts.items():
        print(f"{family:14}", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    print(f"{'all':14}", ", ".join(f"{n} {kind}" for kind, n in sorted(sum(counts.values(), Counter()).items())))


if __name__ == "__main__":
    main()
