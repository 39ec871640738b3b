"""The cache of a pipeline: graphs by what a capture freezes into them, and the plans of the steps that run these.

A capture freezes the shapes and modes (the key), the answers to what forward asks about its inputs, and the state
of modules and loss. A step asks all of its microbatches before its first action, and finds for each the graphs that
are right. The ranks tell each other which these are: a rank that met a new answer cannot compile alone.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn

from zbcompile.batches.batch import Microbatch
from zbcompile.distributed.agreement import gathered, together, unlike
from zbcompile.distributed.mesh import BATCHES, DIMENSIONS
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.passes.capture.attention_kernels import attention_kernels
from zbcompile.passes.capture.guards import Guards, read_answers
from zbcompile.passes.capture.questions import ForeignAnswers
from zbcompile.passes.capture.training_step import Kept
from zbcompile.passes.module_state import ModuleState
from zbcompile.passes.torch_private import hooks_of
from zbcompile.program.program import Program
from zbcompile.runtime.executable import BoundGraphs, Executable, plan_step
from zbcompile.schedules import Schedule

Capture = TypeVar("Capture")
Tensors = Mapping[str, torch.Tensor]
NUMBER = attrgetter("number")
UNKNOWN = ""  # the dimension of a process group that is not of the mesh


class ProgramKey(NamedTuple):
    """What the graphs of a step are specialised for: the form of its inputs, training mode and hooks of each
    module, which parameters train, the modes of torch, and what is returned besides the loss."""

    signature: tuple[Any, ...]
    modules: tuple[tuple[bool, tuple[int, ...]], ...]
    trains: tuple[bool, ...]
    modes: tuple[Any, ...]
    kept: Kept


def key_of(model: nn.Module, microbatch: Microbatch, device: torch.device, kept: Kept) -> ProgramKey:
    """The key of a step of `model` at present."""
    modules = tuple((module.training, hooks_of(module)) for module in model.modules())
    trains = tuple(parameter.requires_grad for parameter in model.parameters())
    return ProgramKey(microbatch.signature, modules, trains, torch_modes(device), kept)


def torch_modes(device: torch.device) -> tuple[Any, ...]:
    """The torch modes that capture freezes into the graphs: autocast, the kernels that attention may take, and what
    forward may ask: the default dtype, deterministic algorithms, oneDNN, the precision of products."""
    asked = torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return *autocast, attention_kernels(), torch.get_default_dtype(), (*asked, torch.get_float32_matmul_precision())


def batches_apart(exchanges: frozenset[str]) -> tuple[str, ...]:
    """The dimensions along which ranks have batches of their own and exchange nothing within a microbatch."""
    return tuple(name for name in BATCHES if exchanges.isdisjoint((name, UNKNOWN)))


@dataclass(frozen=True, eq=False)
class Entry:
    """The graphs that were compiled for `key`: those of one microbatch of a step, or, if it `evaluates`, those of each
    microbatch of a batch. They are right for microbatches that give the answers of `guards`, while the module state is
    that of `standing`. Entries are numbered alike on all ranks."""

    number: int
    key: Any
    guards: Guards | None
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


class Lookup(NamedTuple):
    """What the cache has for some microbatches of one key.

    `known` are the entries of that key, `own` those of this process's microbatches, None for one whose answers no entry
    has; `everywhere` those that any rank needs. `complete`: whether every rank has one for each of its microbatches.
    All but `own` is alike on all ranks.
    """

    known: list[Entry]
    own: list[Entry | None]
    everywhere: list[Entry]
    complete: bool

    @property
    def missing(self) -> int | None:
        """The first of this process's microbatches without an entry."""
        return self.own.index(None) if None in self.own else None

    @property
    def graphs(self) -> list[tuple[BoundGraphs, ...]]:
        """The graphs of each of this process's microbatches, if it is `complete`."""
        return [each.graphs for each in self.own if each is not None]


class ProgramCache:
    """At most `limit` entries and plans of steps, and as many of evaluations, so that neither displaces the other. One
    more evicts the least recently used, but never the first step, nor the entry that is added."""

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
        """The entries of `key` that are right for what Python reads now, the most recently used first."""
        return [each for each in reversed(self._entries.values()) if each.key == key and each.holds()]

    def change(self, key: Any) -> str:
        """What Python reads differently than for the last entry of `key`, in words; "" if nothing."""
        return next((each.change() for each in reversed(self._entries.values()) if each.key == key), "")

    def add(
        self,
        key: Any,
        guards: Guards | None,
        standing: Iterable[ModuleState],
        graphs: Iterable[BoundGraphs],
        exchanges: Iterable[str] = (),
        evaluates: bool = False,
    ) -> Entry:
        """Add an entry; all ranks call it."""
        along = frozenset(name if name in DIMENSIONS else UNKNOWN for name in exchanges)
        entry = Entry(next(self._numbers), key, guards, tuple(standing), tuple(graphs), along, evaluates)
        self._entries[entry.number] = entry
        return entry

    def trim(self) -> bool:
        """Evict the entries that are too many after one was added. Returns whether there were any."""
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
            self._plans = {n: each for n, each in self._plans.items() if kept.issuperset(itertools.chain(*n[1:]))}
        return bool(old)

    def plan(
        self,
        graphs: Sequence[BoundGraphs],
        everywhere: Sequence[BoundGraphs],
        order: Callable[[Program, int], Schedule],
    ) -> Executable:
        """The plan of a step or an evaluation. Its microbatches run `graphs`, those of all replicas run graphs among
        `everywhere`, in the order that `order` gives for as many microbatches. Plans are kept."""
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
        """Let plans be made again, with new memory: a message of a failed step may still arrive in the old one."""
        self._plans.clear()

    def look_up(self, key: Any, microbatches: Sequence[Tensors]) -> Lookup:
        """The entries of `key` that this process's microbatches run. All ranks call it, and exchange which they need.

        Raises PipelineError if ranks that must run the same graphs answer differently what forward asks.
        """
        known = self.right(key)
        own = [each.number if each else None for each in _matching(known, microbatches)]
        found = self._exchanged(known, own)
        needed = sorted({number for _, numbers in found for number in numbers if number is not None})
        for number in needed:  # not by what is needed here alone: all ranks must evict alike
            self._entries[number] = self._entries.pop(number)
        return Lookup(
            known,
            own=[None if number is None else self._entries[number] for number in own],
            everywhere=[self._entries[number] for number in needed],
            complete=not any(None in numbers for _, numbers in found),
        )

    def never_complete(self, last: Lookup) -> PipelineError:
        """The error for a step that has more answers than entries are kept: each that is added evicts another one."""
        if not any(each.guards for each in last.known):
            return PipelineError(
                "no program that was compiled for this step fits it: the state of its modules was different "
                "in every capture. Keep it the same from step to step, or pass it as an argument of step."
            )
        return PipelineError(
            f"the answers of this batch to {_first_line(last.known)} take more programs than the {self._limit} that "
            "max_shapes keeps. Raise it, or decide by a tensor operation (torch.where)."
        )

    def capture(
        self,
        what: str,
        capture: Callable[[ForeignAnswers | None], Capture],
        guards_of: Callable[[Capture], Guards | None],
        leads: bool,
    ) -> Capture:
        """What `capture` makes on every rank, with the answers of the first rank that `leads`. A rank leads if it has a
        microbatch with new answers; the others capture with the answers of that rank."""
        made = together(self._ranks, what, lambda: capture(None) if leads else None)
        own = guards_of(made) if made is not None else None
        mine = (leads, own.given if own else None)
        found = gathered(self._ranks, mine)
        first = next(each for each in found if each[0])
        if any(each != first for each in found):
            made = together(self._ranks, what, lambda: made if mine == first else capture(first[1]))
        return made  # type: ignore[return-value]

    def _exchanged(self, known: Sequence[Entry], own: list[int | None]) -> list[tuple[int, list[int | None]]]:
        """What every rank needs. Ranks with batches of their own may differ, unless their graphs exchange tensors."""
        if not any(each.guards for each in known):
            return [(0, own)]
        ranks, exchanges = self._ranks, frozenset[str]().union(*(each.exchanges for each in known))
        apart = batches_apart(exchanges)
        found = gathered(ranks, (ranks.mesh.index(*apart), own))
        for _, other, rank, _, _ in unlike(ranks.members, [dict([each]) for each in found]):
            raise ranks.refusal(
                f"ranks {other} and {rank} answer {_first_line(known)} differently, but work on the same "
                "microbatches, or exchange tensors in each. Pass batches that answer alike; every rank of a "
                "pipeline must pass the same one."
            )
        return found


def _first_line(known: Sequence[Entry]) -> str:
    return next(each.guards.lines[0] for each in known if each.guards)


def _matching(known: Sequence[Entry], microbatches: Sequence[Tensors]) -> list[Entry | None]:
    """The entry that is right for each microbatch, None if there is none."""
    if not known or known[0].guards is None:
        return [known[0] if known else None] * len(microbatches)
    begun = [_begin(known, tensors) for tensors in microbatches]  # a device computes them all before one is read
    return [_match(known, tensors) for tensors in begun]


def _begin(known: Sequence[Entry], microbatch: Tensors) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for guards in (each.guards for each in known if each.guards):
        if guards.text not in found:
            with suppress(RuntimeError, IndexError):  # asked only after another answer, it may not fit this one
                found[guards.text] = guards.begin(microbatch)
    return found


def _match(known: Sequence[Entry], begun: Mapping[str, list[torch.Tensor]]) -> Entry | None:
    answers = {text: read_answers(tensors) for text, tensors in begun.items()}
    for each in known:
        if each.guards is None:
            return each
        if each.guards.text in answers and not each.guards.first_difference(answers[each.guards.text]):
            return each
    return None


def refuse_answers(found: Lookup, microbatches: Sequence[Tensors]) -> NoReturn:
    """Raise PipelineError for a microbatch whose answers a loaded program does not hold."""
    index = found.missing or 0
    guards = next(each.guards for each in found.known if each.guards)
    raise PipelineError(
        f"microbatch {index} gives another answer than the program was compiled for: "
        f"{guards.different(microbatches[index])}. "
        "Pass batches that answer alike, or step with such a batch before saving the program."
    )


def what_is_new(model: nn.Module, microbatch: Microbatch, key: ProgramKey, known: Collection[ProgramKey]) -> str:
    """How `key` differs from the nearest of the `known` keys, for a notice."""
    near = min(known, key=lambda other: sum(a != b for a, b in zip(key, other, strict=True)), default=key)
    found = [] if key.signature == near.signature else [f"microbatches of {microbatch.summary()}"]
    found += _of_modules(model, key, near)
    if key.trains != near.trains:
        names = [name for name, _ in model.named_parameters()]
        other = [i for i, (now, before) in enumerate(zip(key.trains, near.trains, strict=False)) if now != before]
        found += [f"{names[i]}{_more(len(other))} {'train' if key.trains[i] else 'frozen'}" for i in other[:1]]
    if key.modes != near.modes:
        on, dtype, kernels, default, asked = key.modes
        was_on, was_dtype, was_kernels, was_default, before = near.modes
        if on != was_on or (on and dtype != was_dtype):
            found.append(f"autocast to {str(dtype).removeprefix('torch.')}" if on else "no autocast")
        found += ["other attention kernels"] * (kernels != was_kernels)
        found += [f"the default dtype {str(default).removeprefix('torch.')}"] * (default != was_default)
        found += ["other modes of torch (deterministic algorithms, oneDNN, precision of products)"] * (asked != before)
    if key.kept != near.kept:
        found.append(f"return_{key.kept}=True" if key.kept else f"no {near.kept}")
    return " and ".join(found) or f"microbatches of {microbatch.summary()}"


def _of_modules(model: nn.Module, key: ProgramKey, near: ProgramKey) -> list[str]:
    if len(key.modules) != len(near.modules):
        return [f"{len(key.modules)} modules instead of {len(near.modules)}"]
    changed = [(i, now, was) for i, (now, was) in enumerate(zip(key.modules, near.modules, strict=False)) if now != was]
    modes = [i for i, now, was in changed if now[0] != was[0]]
    hooks = [i for i, now, was in changed if now[1] != was[1]]
    names = [name or "the model" for name, _ in model.named_modules()]
    mode = [f"{names[i]}{_more(len(modes))} in {'train' if key.modules[i][0] else 'eval'} mode" for i in modes[:1]]
    return mode + [f"other hooks of {names[i]}{_more(len(hooks))}" for i in hooks[:1]]


def _more(count: int) -> str:
    return f" and {count - 1} more" * (count > 1)
