"""Faults: the position of a rank, what ended its step, and which rank is to blame."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from zbcompile.errors import FaultError
from zbcompile.schedules.ir.actions import Action


class ReportText:
    """A dataclass that travels to other ranks as text."""

    def text(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def read(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Fault(ReportText):
    """What ended a step: on which rank, in which action, and why; rank None if the store or a
    connection failed."""

    rank: int | None
    where: str
    cause: str

    def error(self) -> FaultError:
        return FaultError(self.rank, self.where, self.cause)


@dataclass
class Position:
    """Where this process is. The running thread writes it, plain assignments only; the watchdog
    reads it.

    `region` counts the calls in which ranks depend on each other, `doing` names the present one,
    `action` is what runs in it, `waits` says whether the action waits for another rank, `waited`
    counts the waits outside of the action loop.
    """

    rank: int = 0
    region: int = 0
    doing: str = ""
    action: Action | str = ""
    waits: bool = False
    waited: int = 0

    def status(self, beat: int = 0, timeout: float = 0.0, ended: str = "") -> "Status":
        return Status(beat, self.region, self.doing, str(self.action), self.waits, timeout, ended)

    def enter(self, doing: str) -> None:
        self.region += 1
        self.doing, self.action, self.waits = doing, "", False

    def leave(self) -> None:
        self.action, self.waits = "the end", False

    @contextmanager
    def turn_to(self, doing: str) -> Iterator[None]:
        """Around a part of a call that some ranks may take by mistake while others do not."""
        before, self.doing = self.doing, doing
        yield
        self.doing = before

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around anything that returns only when other ranks come to the same place."""
        self.action, self.waits = what, True
        self.waited += 1
        yield
        self.waits = False  # after an exception the position stays where that happened

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around work of this process alone inside of such a wait; the time for it does not count
        as waiting."""
        self.waits = False
        try:
            yield
        finally:
            self.waits, self.waited = True, self.waited + 1


@dataclass(frozen=True)
class Status(ReportText):
    """A rank's position as others see it; `beat` grows while its process lives, `timeout` is how
    many seconds it waits for others, `ended` is why it makes no further calls, empty as long as it
    may."""

    beat: int
    region: int
    doing: str
    action: str
    waits: bool
    timeout: float = 0.0
    ended: str = ""

    @property
    def where(self) -> str:
        return f"{self.action} of {self.doing}" if self.action else self.doing


NEVER = Status(beat=-1, region=-1, doing="its first call", action="", waits=False)


@dataclass
class Heartbeats:
    """Since when, on this process's clock, each rank has shown no new sign of life."""

    seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def note(self, statuses: Mapping[int, Status]) -> None:
        now = time.monotonic()
        for rank, status in statuses.items():
            if self.seen.get(rank, (None,))[0] != status.beat:
                self.seen[rank] = status.beat, now

    def silent(self, rank: int, seconds: float) -> bool:
        return rank in self.seen and time.monotonic() - self.seen[rank][1] >= seconds


def find_gone(
    own: int, statuses: Mapping[int, Status], heartbeats: Heartbeats, seconds: float
) -> Fault | None:
    """The first other rank that makes no further calls, or has shown signs of life but none for
    `seconds`."""
    here = statuses[own]
    for rank, status in statuses.items():
        silent = status.beat >= 0 and heartbeats.silent(rank, seconds)
        if rank != own and (status.ended or silent):
            where = status.where if status.region == here.region else here.doing
            cause = status.ended or "its process ended or is frozen, or its machine was lost"
            told = (
                f"{cause}. Its last sign of life came from {status.where}; rank {own} missed it at"
                f" {here.where}"
            )
            return Fault(rank, where, told)
    return None


def find_stray(own: int, statuses: Mapping[int, Status], beats: Mapping[int, int]) -> Fault | None:
    """A rank that waits in another call, while this rank waits here. A status of a beat up to
    `beats` does not count: a busy process may publish late that it has gone on."""
    here = statuses[own]
    for rank, status in statuses.items():
        strays = status.region == here.region and status.waits and status.doing != here.doing
        if strays and status.beat > beats.get(rank, status.beat):
            first, second = sorted([(own, here.where), (rank, status.where)])
            return Fault(
                second[0],
                second[1],
                f"rank {first[0]} is at {first[1]} meanwhile. Every rank must make the same calls"
                " in the same order, with the same batch shapes and keywords",
            )
    return None


def find_late(
    own: int, statuses: Mapping[int, Status], seconds: float, on_device: bool = False
) -> Fault:
    """Identify which rank a timed-out rank was waiting for: one that never came, one that is busy,
    or none. With `on_device` the device waits and not the host: then a host that does not wait
    proves nothing."""
    here = statuses[own]
    waited = f"rank {own} waited {seconds:g} s for it at {here.where}"
    for (
        rank,
        status,
    ) in statuses.items():  # before the first step compares them, ranks compile for different times
        if status.beat >= 0 and status.timeout != here.timeout:
            given = (
                f"timeout= is {here.timeout:g} on rank {own} and {status.timeout:g} on rank {rank}"
            )
            return Fault(
                own, here.where, f"{given}, for which it did not wait. Pass the same on every rank"
            )
    for rank, status in sorted(statuses.items(), key=lambda item: item[1].region):
        if status.beat < 0:
            return Fault(rank, status.where, f"it never arrived; {waited}")
        if status.region < here.region:
            return Fault(rank, status.where, f"it went no further; {waited}")
        if not status.waits and not on_device:
            return Fault(rank, status.where, f"it did not finish; {waited}")
    if on_device:
        return Fault(own, here.where, f"its device did not finish within {seconds:g} s of its host")
    return Fault(
        None,
        here.where,
        f"every rank shows signs of life and has waited for another one for {seconds:g} s. A"
        " connection between two of them is cut, or torch's own collectives were called in"
        " different orders",
    )
