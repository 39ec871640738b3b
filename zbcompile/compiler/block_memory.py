"""What is alive while a pass runs over a part of a block: a stage may begin and end inside of blocks.

The operations of the part are those that a stage with these cuts has, in the order of the block's own graphs. What they
read and none of them makes crosses the cut: it is counted for the whole pass, not here.
"""

from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

Use = tuple[int, Hashable, int]  # of a storage: the operation that reads it, which storage, its bytes


class Step(NamedTuple):
    """An operation of a pass: its place in the block, the storages that it `touches` and those that it makes, whether B
    repeats it, whether any stage that reads its result computes it for itself (`own`), and the seconds to repeat it."""

    place: int
    touches: frozenset[Hashable]
    makes: frozenset[Hashable]
    again: bool
    own: bool = False
    seconds: float = 0.0


class Part(NamedTuple):
    """The operations of a block from place `begin` to `end`, and whether they are the first and the last ones of their
    stage. Those that others of the stage have left what they receive (`kept`) have it as the first ones have, but B
    frees it after its last use."""

    begin: int
    end: int
    first: bool = True
    last: bool = True
    kept: bool = False


@dataclass(eq=False)
class BlockMemory:
    """The storages of a block's F and B, by pass: the `steps`, what arrives before them (`waiting` from F, `received`
    from the block before and `tangents` from the one behind it), and what it returns (`staying`). Of what is received,
    B frees what it reads only through views that F took.

    `kept` are the storages that wait for B, and those that B holds once all is remade that it remakes (`held`),
    `residue` those that wait for W, by the operations that read them.
    """

    length: int
    sizes: dict[Hashable, int]
    steps: dict[str, list[Step]]
    waiting: frozenset[Hashable]
    received: dict[str, frozenset[Hashable]]
    tangents: frozenset[Hashable]
    staying: dict[str, frozenset[Hashable]]
    kept: Sequence[Use]
    residue: Sequence[Use]
    held: Sequence[Use] = ()

    _found: dict[tuple[str, Part], list[int | None]] = field(init=False, default_factory=dict)
    _again: dict[tuple[int, int], list[tuple[int, float]]] = field(init=False, default_factory=dict)

    def again(self, begin: int, end: int) -> list[tuple[int, float]]:
        """What the B of a part repeats for its own operations: their places and seconds."""
        if (begin, end) not in self._again:
            needed = self._needed("B", begin, end)
            self._again[begin, end] = [(step.place, step.seconds) for step in needed if step.seconds]
        return self._again[begin, end]

    def beside(self, op: str, part: Part) -> list[int | None]:
        """For each place of a part, the most bytes that are alive while F or B runs there; None where nothing runs. Not
        counted are what waits for the operations up to that place, what the operations behind it have left for W, and
        what crosses the cuts of the stage."""
        key = op, part
        if key not in self._found:
            self._found[key] = self._beside(op, part)
        return self._found[key]

    def _beside(self, op: str, part: Part) -> list[int | None]:
        begin, end, *_ = part
        inside = self._needed(op, begin, end)
        outside = [step for step in self.steps[op] if not begin <= step.place < end]
        before = self._made_before(begin)
        arriving, staying = self._arriving(op, part) - before, self._staying(op, part, outside)
        made = {key for step in inside for key in step.makes}
        apart = {key for step in inside for key in step.touches} - made - arriving  # it crosses a cut

        def counted(uses: Iterable[Use], first: int, last: int, free: Set[Hashable]) -> int:
            found = {which: size for place, which, size in uses if first <= place < last}
            return sum(size for which, size in found.items() if which not in free)

        held = self.kept if op == "F" else self.held
        only_later = {which: size for place, which, size in self.kept if begin <= place < end}
        aside = sum(size for w, size in only_later.items() if op == "B" and w not in arriving | before)
        found: list[int | None] = [None] * (end - begin)
        for step, alive in self._alive(inside, arriving, staying, apart):
            most = alive + aside - counted(held, begin, step.place + 1, before | apart)
            if op == "B":
                most -= counted(self.residue, step.place + 1, end, before)  # also gradients that crossed a cut
            now = found[step.place - begin]
            found[step.place - begin] = most if now is None else max(now, most)
        return found

    def _needed(self, op: str, begin: int, end: int) -> list[Step]:
        """The steps from place `begin` to `end`, without what is repeated for operations that are not among them, and
        what they read of what every stage computes for itself."""
        read = {which for place, which, _ in self.residue if op == "B" and begin <= place < end}
        found = []
        for step in reversed(self.steps[op]):
            inside = begin <= step.place < end
            if step.makes & read if step.own else inside and (not step.again or (step.makes or step.touches) & read):
                read |= step.touches
                found.append(step._replace(place=max(begin, step.place)))
        return found[::-1]

    def arrived_for_weights(self, part: Part) -> int:
        """Bytes of the gradients that cross the end of a part and wait for its W."""
        crossing = self.tangents.union(*(step.makes for step in self.steps["B"] if step.place >= part.end))
        waiting = {which: size for place, which, size in self.residue if part.begin <= place < part.end}
        return sum(size for which, size in waiting.items() if which in crossing)

    def _made_before(self, begin: int) -> Set[Hashable]:
        """What a part that does not begin with the block receives of it."""
        if begin == 0:
            return frozenset()
        before = (step.makes for step in self.steps["F"] if step.place < begin and not step.own)
        return self.received["F"].union(*before)

    def _arriving(self, op: str, part: Part) -> Set[Hashable]:
        if op == "F":
            return self.received["F"] if part.begin == 0 else frozenset()
        found = {which for place, which, _ in self.kept if part.begin <= place < part.end}
        if (part.first or part.kept) and part.begin == 0:
            found |= self.received["F"]
        found &= self.waiting
        return found | self.tangents if part.end == self.length else found

    def _staying(self, op: str, part: Part, outside: Sequence[Step]) -> Set[Hashable]:
        """What is not freed after its last use: what arrives or leaves in a message, and what later passes read."""
        uses = self.kept if op == "F" else self.residue
        found = self.staying[op] | {which for place, which, _ in uses if part.begin <= place < part.end}
        if (part.first or (part.kept and op == "F")) and part.begin == 0:
            found |= self.received[op]
        if op == "B" and part.last and part.end == self.length:
            found |= self.tangents
        own = frozenset[Hashable]().union(*(step.makes for step in self.steps[op] if step.own))
        return found.union(*(step.touches - own for step in outside if (step.place >= part.end) == (op == "F")))

    def _alive(
        self, steps: Sequence[Step], arriving: Set[Hashable], staying: Set[Hashable], apart: Set[Hashable]
    ) -> list[tuple[Step, int]]:
        last = {key: number for number, step in enumerate(steps) for key in step.touches}
        alive = set(arriving)
        now = sum(self.sizes[key] for key in alive)
        found = []
        for number, step in enumerate(steps):
            made = step.makes - alive - apart
            alive |= made
            now += sum(self.sizes[key] for key in made)
            found.append((step, now))
            dead = {key for key in step.touches & alive if last[key] == number} - staying
            alive -= dead
            now -= sum(self.sizes[key] for key in dead)
        return found
