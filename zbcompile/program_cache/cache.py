"""The cache of a pipeline: graphs by what a capture freezes into them, and the plans of the steps
that run these.

An export depends on shapes and modes (the key) and on the state of modules and loss. All ranks of a
pipeline have the whole batch, and so the same key.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from zbcompile.batches.batch import Microbatch
from zbcompile.distributed.mesh import BATCHES, DIMENSIONS
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.executable import BoundGraphs, Executable, plan_step
from zbcompile.engine.gradients import grad_dtype
from zbcompile.passes.module_state import ModuleState
from zbcompile.passes.torch_private import attention_priority, hooks_of
from zbcompile.program.program import Program
from zbcompile.schedules import Schedule

NUMBER = attrgetter("number")
UNKNOWN = ""  # the dimension of a process group that is not of the mesh


class ProgramKey(NamedTuple):
    """What the graphs of a step are specialised for: the form of its inputs, training mode and
    hooks of each module, which parameters train, the modes of torch, and what is returned besides
    the loss."""

    signature: tuple[Any, ...]
    modules: tuple[tuple[bool, tuple[int, ...]], ...]
    trains: tuple[torch.dtype | None, ...]
    modes: tuple[Any, ...]
    kept: str


def key_of(model: nn.Module, microbatch: Microbatch, device: torch.device, kept: str) -> ProgramKey:
    """The key of a step of `model` at present."""
    modules = tuple((module.training, hooks_of(module)) for module in model.modules())
    trains = tuple(grad_dtype(each) if each.requires_grad else None for each in model.parameters())
    return ProgramKey(microbatch.signature, modules, trains, torch_modes(device), kept)


def attention_kernels() -> tuple[frozenset[str], tuple[int, ...]]:
    """Returns the kernels that attention may take at present, and the order in which they are
    tried."""
    cuda = torch.backends.cuda
    enabled = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return frozenset(name for name, on in enabled.items() if on), attention_priority()


def _training(dtype: torch.dtype | None) -> str:
    return (
        "frozen"
        if dtype is None
        else f"train with gradients in {str(dtype).removeprefix('torch.')}"
    )


def torch_modes(device: torch.device) -> tuple[Any, ...]:
    """The torch modes that capture freezes into the graphs: autocast, the kernels that attention
    may take, and what forward may ask: the default dtype, deterministic algorithms, oneDNN, the
    precision of products.
    """
    asked = torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return (
        *autocast,
        attention_kernels(),
        torch.get_default_dtype(),
        (*asked, torch.get_float32_matmul_precision()),
    )


def batches_apart(exchanges: frozenset[str]) -> tuple[str, ...]:
    """The dimensions along which ranks have batches of their own and exchange nothing within a
    microbatch."""
    return tuple(name for name in BATCHES if exchanges.isdisjoint((name, UNKNOWN)))


@dataclass(frozen=True, eq=False)
class Entry:
    """The graphs that were compiled for `key`: those of one microbatch of a step, or, if it
    `evaluates`, those of each microbatch of a batch. They are right while the module state is that
    of `standing`. Entries are numbered alike on all ranks."""

    number: int
    key: Any
    standing: tuple[ModuleState, ...]
    graphs: tuple[BoundGraphs, ...]
    exchanges: frozenset[str]
    evaluates: bool = False

    def holds(self) -> bool:
        """Whether the module state is unchanged."""
        return all(each.hold() for each in self.standing)

    def change(self) -> str:
        """The first Python value that has changed, in words; "" if none has."""
        return next(filter(None, (each.change() for each in self.standing)), "")


class ProgramCache:
    """At most `limit` entries and plans of steps, and as many of evaluations, so that neither
    displaces the other. One more evicts the least recently used, but never the first step, nor the
    entry that is added."""

    def __init__(self, ranks: Ranks, limit: int) -> None:
        self._ranks, self._limit = ranks, limit
        self._numbers = itertools.count()
        self._entries: dict[int, Entry] = {}  # the least recently used first
        self._plans: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], Executable] = {}

    @property
    def steps(self) -> list[Entry]:
        """The entries of steps, in the order in which they were made."""
        return self._of(evaluates=False)

    @property
    def evaluations(self) -> list[Entry]:
        """The entries of evaluations, in the order in which they were made."""
        return self._of(evaluates=True)

    def _of(self, evaluates: bool) -> list[Entry]:
        found = (each for each in self._entries.values() if each.evaluates == evaluates)
        return sorted(found, key=lambda each: each.number)

    @property
    def plans(self) -> list[Executable]:
        """All plans, the least recently used one first."""
        return list(self._plans.values())

    def right(self, key: Any) -> list[Entry]:
        """The entries of `key` that are right for what Python reads now, the most recently used
        first."""
        return [
            each for each in reversed(self._entries.values()) if each.key == key and each.holds()
        ]

    def change(self, key: Any) -> str:
        """What Python reads differently than for the last entry of `key`, in words; "" if
        nothing."""
        return next(
            (each.change() for each in reversed(self._entries.values()) if each.key == key), ""
        )

    def add(
        self,
        key: Any,
        standing: Iterable[ModuleState],
        graphs: Iterable[BoundGraphs],
        exchanges: Iterable[str] = (),
        evaluates: bool = False,
    ) -> Entry:
        """Add an entry; all ranks call it."""
        along = frozenset(name if name in DIMENSIONS else UNKNOWN for name in exchanges)
        entry = Entry(next(self._numbers), key, tuple(standing), tuple(graphs), along, evaluates)
        self._entries[entry.number] = entry
        return entry

    def trim(self) -> bool:
        """Evict the entries that are too many after one was added. Returns whether there
        were any."""
        *others, new = self._entries.values()
        alike = self._of(new.evaluates)
        usable = (each for each in others if each.evaluates == new.evaluates)
        old = [each.number for each in usable if each.evaluates or each is not alike[0]][
            : max(0, len(alike) - self._limit)
        ]
        for number in old:
            del self._entries[number]
        if old:
            kept = {graphs.number for each in self._entries.values() for graphs in each.graphs}
            self._plans = {
                n: each
                for n, each in self._plans.items()
                if kept.issuperset(itertools.chain(*n[1:]))
            }
        return bool(old)

    def plan(
        self,
        graphs: Sequence[BoundGraphs],
        everywhere: Sequence[BoundGraphs],
        order: Callable[[Program, int], Schedule],
    ) -> Executable:
        """The plan of a step or an evaluation. Its microbatches run `graphs`, those of all replicas
        run graphs among `everywhere`, in the order that `order` gives for as many microbatches.
        Plans are kept."""
        first = graphs[0].program
        evaluates = not first.trains
        named = evaluates, tuple(map(NUMBER, graphs)), tuple(map(NUMBER, everywhere))
        found = self._plans.pop(named, None)
        if found is None:
            found = plan_step(graphs, everywhere, order(first, len(graphs)), self._ranks.local)
        self._plans[named] = found
        alike = [each for each in self._plans if each[0] == evaluates]
        for each in alike[: max(0, len(alike) - self._limit)]:
            del self._plans[each]
        return found

    def clear(self) -> None:
        """Drops all entries and plans."""
        self._entries.clear()
        self._plans.clear()

    def forget_plans(self) -> None:
        """Let plans be made again, with new memory: a message of a failed step may still arrive in
        the old one."""
        self._plans.clear()

    def find(self, key: Any) -> Entry | None:
        """Returns the entry that is right for a key, as the most recently used one."""
        entry = next(iter(self.right(key)), None)
        if entry is not None:
            self._entries[entry.number] = self._entries.pop(entry.number)
        return entry


def what_is_new(
    model: nn.Module, microbatch: Microbatch, key: ProgramKey, known: Collection[ProgramKey]
) -> str:
    """How `key` differs from the nearest of the `known` keys, for a notice."""
    near = min(
        known, key=lambda other: sum(a != b for a, b in zip(key, other, strict=True)), default=key
    )
    found = [] if key.signature == near.signature else [f"microbatches of {microbatch.summary()}"]
    found += _of_modules(model, key, near)
    if key.trains != near.trains:
        names = [name for name, _ in model.named_parameters()]
        other = [
            i
            for i, (now, before) in enumerate(zip(key.trains, near.trains, strict=False))
            if now != before
        ]
        found += [f"{names[i]}{_more(len(other))} {_training(key.trains[i])}" for i in other[:1]]
    if key.modes != near.modes:
        on, dtype, kernels, default, asked = key.modes
        was_on, was_dtype, was_kernels, was_default, before = near.modes
        if on != was_on or (on and dtype != was_dtype):
            found.append(
                f"autocast to {str(dtype).removeprefix('torch.')}" if on else "no autocast"
            )
        found += ["other attention kernels"] * (kernels != was_kernels)
        found += [f"the default dtype {str(default).removeprefix('torch.')}"] * (
            default != was_default
        )
        found += [
            "other modes of torch (deterministic algorithms, oneDNN, precision of products)"
        ] * (asked != before)
    if key.kept != near.kept:
        found.append(f"return_{key.kept}=True" if key.kept else f"no {near.kept}")
    return " and ".join(found) or f"microbatches of {microbatch.summary()}"


def _of_modules(model: nn.Module, key: ProgramKey, near: ProgramKey) -> list[str]:
    if len(key.modules) != len(near.modules):
        return [f"{len(key.modules)} modules instead of {len(near.modules)}"]
    changed = [
        (i, now, was)
        for i, (now, was) in enumerate(zip(key.modules, near.modules, strict=False))
        if now != was
    ]
    modes = [i for i, now, was in changed if now[0] != was[0]]
    hooks = [i for i, now, was in changed if now[1] != was[1]]
    names = [name or "the model" for name, _ in model.named_modules()]
    mode = [
        f"{names[i]}{_more(len(modes))} in {'train' if key.modules[i][0] else 'eval'} mode"
        for i in modes[:1]
    ]
    return mode + [f"other hooks of {names[i]}{_more(len(hooks))}" for i in hooks[:1]]


def _more(count: int) -> str:
    return f" and {count - 1} more" * (count > 1)
