"""The position of a rank, and the fault that ended the step of all ranks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from zbcompile.errors import FaultError, PipelineError
from zbcompile.schedules.ir.actions import Action


@dataclass(frozen=True)
class Fault:
    """The reason why a call of all ranks ended: the rank (None if no single one is at fault), its
    action, and the cause."""

    rank: int | None
    where: str
    cause: str

    def error(self) -> FaultError:
        return FaultError(self.rank, self.where, self.cause)


@dataclass
class RankStatus:
    """The position of a rank. The thread that runs the pipeline writes it, with plain assignments
    only; the watch reads it and publishes copies.

    `region` counts the calls in which ranks depend on each other, `doing` names the present one.
    `action` is what runs in it, `waits` says whether the rank is blocked on another one, `waited`
    counts the waits outside of the action loop. `beat` grows while the process lives.
    """

    rank: int = 0
    region: int = 0
    doing: str = ""
    action: Action | str = ""
    waits: bool = False
    waited: int = 0
    beat: int = 0

    @property
    def where(self) -> str:
        return f"{self.action} of {self.doing}" if self.action else self.doing

    @property
    def place(self) -> tuple[object, ...]:
        return self.region, self.doing, self.action, self.waits, self.waited

    def enter(self, doing: str) -> None:
        self.region += 1
        self.doing, self.action, self.waits = doing, "", False

    def leave(self) -> None:
        self.action, self.waits = "the end", False

    @contextmanager
    def turn_to(self, doing: str) -> Iterator[None]:
        """Context for a part of a call that some ranks may take by mistake while others do not."""
        before, self.doing = self.doing, doing
        yield
        self.doing = before

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context for a call that returns only when other ranks make it too."""
        self.action, self.waits = what, True
        self.waited += 1
        yield
        self.waits = False  # after an exception the position stays where that happened

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context for work of this process alone within such a wait; its time does not count as
        waiting."""
        self.waits = False
        try:
            yield
        finally:
            self.waits, self.waited = True, self.waited + 1


@dataclass
class LocalWatch:
    """All ranks are in this process: nothing can be lost; a failure names its rank and action."""

    position: RankStatus
    fault: None = None

    @contextmanager
    def region(self, doing: str) -> Iterator[None]:
        self.position.enter(doing)
        try:
            yield
        except Exception as error:
            if isinstance(error, PipelineError) or not isinstance(self.position.action, Action):
                raise
            raise local_fault(self.position, error).error() from error
        self.position.leave()

    def outside_calls(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def on_all_ranks(self, error: Exception) -> Exception:
        return error

    def close(self) -> None:
        pass


def local_fault(position: RankStatus, error: BaseException) -> Fault:
    return Fault(position.rank, position.where, f"{type(error).__name__}: {error}")


def find_straggler(
    local: RankStatus, statuses: dict[int, RankStatus | None], seconds: float, on_device: bool
) -> Fault:
    """Returns which rank a rank waited for that has waited for `seconds` at one place: one that
    never arrived, one in an earlier or another call, a busy one, or none.

    With `on_device` the device waits and not the host: then a busy host proves nothing.
    """
    waited = f"rank {local.rank} waited {seconds:g} s for it at {local.where}"
    arrived = [status for status in statuses.values() if status is not None]
    for rank, status in statuses.items():
        if status is None:
            return Fault(rank, "its first call", f"it never arrived; {waited}")
    for status in sorted(arrived, key=lambda status: status.region):
        if status.region < local.region:
            return Fault(status.rank, status.where, f"it went no further; {waited}")
        if status.region == local.region and status.doing != local.doing:
            first, second = sorted([local, status], key=lambda status: status.rank)
            return Fault(
                second.rank,
                second.where,
                f"rank {first.rank} is at {first.where} meanwhile. Every rank must make the same"
                " calls in the same order, with the same batch shapes and keywords",
            )
        if not status.waits and not on_device and status.rank != local.rank:
            return Fault(status.rank, status.where, f"it did not finish; {waited}")
    if on_device:
        cause = f"its device did not finish within {seconds:g} s of its host"
        return Fault(local.rank, local.where, cause)
    return Fault(
        None,
        local.where,
        f"every rank shows signs of life and has waited for another one for {seconds:g} s. A"
        " connection between two of them is cut, or torch's own collectives were called in"
        " different orders",
    )
