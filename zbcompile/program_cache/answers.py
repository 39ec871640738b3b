"""What was compiled for one shape, by the answers of its microbatches to what forward asks about them.

Every step asks all of its microbatches, before its first action. The ranks tell each other what they found: a rank that
met a new answer cannot compile alone, and one that only hears of it captures with the answers of that rank.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch

from zbcompile.distributed.agreement import gathered, together
from zbcompile.distributed.mesh import BATCHES, DIMENSIONS
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.passes.capture.guards import Guards, read_answers
from zbcompile.passes.capture.questions import Given
from zbcompile.passes.values.premises import Standing
from zbcompile.program.directories import save_program
from zbcompile.program.program import ANSWERS, Program
from zbcompile.runtime.engine import Executable

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """At most `limit` entries. One more evicts the least recently used, but never the first if that is `kept`."""

    def __init__(self, limit: int, kept: bool = True) -> None:
        self.limit = limit
        self.kept = kept
        self._entries: dict[Key, Value] = {}
        self._first: Key | None = None

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Value]:
        return iter(self._entries.values())

    def __getitem__(self, key: Key) -> Value:
        self._entries[key] = value = self._entries.pop(key)
        return value

    @property
    def keys(self) -> list[Key]:
        """The least recently used one first."""
        return list(self._entries)

    def peek(self, key: Key) -> Value:
        """The entry, without a use of it."""
        return self._entries[key]

    def first(self) -> Value:
        """The entry that was added first; if it is not kept, the least recently used one."""
        return self._entries[self._first] if self._first is not None else next(iter(self))

    def add(self, key: Key, value: Value) -> bool:
        """Add an entry; return whether another one was evicted for it."""
        if self.kept and not self._entries:
            self._first = key
        self._entries[key] = value
        return len(self._entries) > self.limit and self.evict(value)

    def evict(self, kept: Value | None = None) -> bool:
        """Evict the least recently used entry, but not the first or the value `kept`; whether there was one."""
        old = [key for key, value in self._entries.items() if key != self._first and value is not kept]
        if old:
            del self._entries[old[0]]
        return bool(old)


Tensors = Mapping[str, torch.Tensor]
UNKNOWN = ""  # the dimension of a process group that is not of the mesh
ALWAYS = ""  # the key of what asks nothing


class ByAnswers(Generic[Value]):
    """At most `limit` values, each with its guards; the first one is evicted only if it is not `kept`.

    `exchanges` are the dimensions of the mesh along which any of them exchanges tensors in the middle of a microbatch:
    ranks along these answer alike. `standing` is what their captures have read in Python: none of them is right while
    any of it is another one."""

    def __init__(self, limit: int, kept: bool = True) -> None:
        self._kept: Recent[str, tuple[Guards | None, Value]] = Recent(limit, kept)
        self.exchanges: frozenset[str] = frozenset()
        self.standing: list[Standing] = []

    def holds(self) -> bool:
        """Whether what was read in Python is what it was."""
        return all(each.hold() for each in self.standing)

    def change(self) -> str:
        """What of it is another one, in words; "" if nothing is."""
        return next(filter(None, (each.change() for each in self.standing)), "")

    def __iter__(self) -> Iterator[Value]:
        return (value for _, value in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, key: str) -> Value:
        """Not a use of it: all ranks must evict alike, so only `find` notes what any of them uses."""
        return self._kept.peek(key)[1]

    @property
    def asks(self) -> bool:
        """Whether the values depend on answers."""
        return any(guards is not None for guards, _ in self._kept)

    @property
    def guards(self) -> list[Guards]:
        return [guards for guards, _ in self._kept if guards is not None]

    def first(self) -> Value:
        """The value that was added first."""
        return self._kept.first()[1]

    def others(self) -> list[tuple[Guards | None, Value]]:
        """All values with their guards, but the one that was added first."""
        first = self._kept.first()
        return [each for each in self._kept if each is not first]

    def add(self, guards: Guards | None, value: Value, exchanges: Iterable[str] = ()) -> bool:
        """Add a value; return whether another one was evicted for it."""
        self.exchanges |= {name if name in DIMENSIONS else UNKNOWN for name in exchanges}
        return self._kept.add(ALWAYS if guards is None else repr(guards.given), (guards, value))

    def evict(self) -> bool:
        """Evict the least recently used value but the first; return whether there was one."""
        return self._kept.evict()

    def matching(self, microbatches: Sequence[Tensors]) -> list[str | None]:
        """The key of the value that is right for each microbatch, None if there is none."""
        if not len(self):
            return [None] * len(microbatches)
        if not self.asks:
            return [ALWAYS] * len(microbatches)
        begun = [self._begin(tensors) for tensors in microbatches]  # a device computes them all before one is read
        return [self._match(tensors) for tensors in begun]

    def _begin(self, microbatch: Tensors) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        for guards in self.guards:
            if guards.text not in found:
                with suppress(RuntimeError, IndexError):  # asked only after another answer, it may not fit this one
                    found[guards.text] = guards.begin(microbatch)
        return found

    def _match(self, begun: Mapping[str, list[torch.Tensor]]) -> str | None:
        answers = {text: read_answers(tensors) for text, tensors in begun.items()}
        for guards in self.guards:
            if guards.text in answers and not guards.first_difference(answers[guards.text]):
                return repr(guards.given)
        return None

    def find(
        self, ranks: Ranks, microbatches: Sequence[Tensors], add: Callable[[int | None], None]
    ) -> tuple[list[str], list[str]]:
        """The keys for this process's microbatches, and all keys that any rank needs, alike on all ranks.

        `add(i)` adds the value for microbatch i together with all ranks; those without a new answer pass None. Raises
        PipelineError if ranks of one pipeline answer differently, or if one step needs more values than are kept.
        """
        for _ in range(self._kept.limit + 1):
            own = self.matching(microbatches)
            apart = [name for name in BATCHES if self.exchanges.isdisjoint((name, UNKNOWN))]
            found = gathered(ranks, (ranks.mesh.index(*apart), own)) if self.asks else [(0, own)]
            _require_equal_answers(ranks, found, self.guards)
            needed = sorted({key for _, keys in found for key in keys if key is not None})
            if not any(None in keys for _, keys in found):
                for key in needed:
                    self._kept[key]
                return [key for key in own if key is not None], needed
            add(own.index(None) if None in own else None)
        raise PipelineError(
            f"the answers of this batch to {self.guards[0].lines[0]} take more programs than the {self._kept.limit} "
            "that max_shapes keeps for one shape. Raise it, or decide by a tensor operation (torch.where)."
        )


class ByShape(Generic[Key, Value]):
    """What was compiled, by shape, Python values and answers: at most `limit` values of all shapes together, and always
    the very first and one of the shape in use."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers = itertools.count()
        self._shapes: Recent[tuple[Key, int], ByAnswers[Value]] = Recent(limit)

    def find(self, key: Key) -> ByAnswers[Value] | None:
        """The values of a shape that are right for what Python reads now."""
        for each in reversed(self._shapes.keys):
            if each[0] == key and self._shapes.peek(each).holds():
                return self._shapes[each]
        return None

    def change(self, key: Key) -> str:
        """In what all Python values of this shape differ from the last ones known, in words; "" if none are known."""
        known = (self._shapes.peek(each) for each in reversed(self._shapes.keys) if each[0] == key)
        return next((found.change() for found in known), "")

    def __iter__(self) -> Iterator[Value]:
        return (value for found in self._shapes for value in found)

    def __len__(self) -> int:
        return sum(map(len, self._shapes))

    @property
    def keys(self) -> list[Key]:
        """The keys of the shapes, but that of what was not compiled here."""
        return [key for key, _ in self._shapes.keys if key]

    def first(self) -> ByAnswers[Value]:
        """The values of the shape that was added first."""
        return self._shapes.first()

    def new(self) -> ByAnswers[Value]:
        """What one shape begins with."""
        is_first = not len(self)
        return ByAnswers(self._limit if is_first else max(1, self._limit - 1), kept=is_first)

    def add(self, key: Key, found: ByAnswers[Value]) -> bool:
        """Add a shape; return whether another value was evicted for it."""
        return any([self._shapes.add((key, next(self._numbers)), found), self.trim(found)])

    def trim(self, used: ByAnswers[Value]) -> bool:
        """After a value was added to `used`, which is the shape in use: whether another shape's was evicted for it."""
        evicted = False
        while len(self) > self._limit and self._evict(used):
            evicted = True
        return evicted

    def _evict(self, used: ByAnswers[Value]) -> bool:
        others = (found for found in self._shapes if found is not used)
        return any(found.evict() for found in others) or self._shapes.evict(used)


def _require_equal_answers(ranks: Ranks, found: Sequence[tuple[int, list[str | None]]], guards: list[Guards]) -> None:
    """Ranks with batches of their own may differ, unless their graphs exchange tensors, as those of all others do."""
    first: dict[int, tuple[int, list[str | None]]] = {}
    for rank, (replica, keys) in zip(ranks.members, found, strict=False):
        other, expected = first.setdefault(replica, (rank, keys))
        if keys != expected:
            raise ranks.refusal(
                f"ranks {other} and {rank} answer {guards[0].lines[0]} differently, but work on the same microbatches, "
                "or exchange tensors in each. Pass batches that answer alike; every rank of a pipeline must pass the "
                "same one."
            )


def captured_alike(
    ranks: Ranks,
    what: str,
    capture: Callable[[Given | None], Value],
    guards_of: Callable[[Value], Guards | None],
    leads: bool,
) -> Value:
    """What `capture` makes on every rank with the answers of the first rank that `leads`: it has a microbatch with
    answers of its own, the others capture with those."""
    made = together(ranks, what, lambda: capture(None) if leads else None)
    own = guards_of(made) if made is not None else None
    mine = (leads, own.given if own else None)
    found = gathered(ranks, mine)
    first = next(each for each in found if each[0])
    if any(each != first for each in found):
        made = together(ranks, what, lambda: made if mine == first else capture(first[1]))
    return made  # type: ignore[return-value]


def save_with_answers(kept: ByShape[Any, Executable], ranks: Ranks, program: Program, directory: Path) -> None:
    """Write a program; beside the first one, those of its shape for the other answers that were met."""
    found = kept.first() if len(kept) else None
    if found is not None and found.first().program is program:
        others = [replace(each.program, guards=guards) for guards, each in found.others()]
        beside = {f"{ANSWERS}{number}": each for number, each in enumerate(others, 1)}
        program = replace(program, also={**program.also, **beside})
    save_program(program, directory, ranks)


def refuse_answers(guards: Guards, index: int, microbatch: Mapping[str, torch.Tensor]) -> NoReturn:
    """Raise PipelineError for a microbatch whose answers a loaded program does not hold."""
    raise PipelineError(
        f"microbatch {index} gives another answer than the program was compiled for: {guards.different(microbatch)}. "
        "Pass batches that answer alike, or step with such a batch before saving the program."
    )
