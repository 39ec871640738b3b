"""Times of events on a device, on one clock for all ranks."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zbcompile.passes import gpu

ROUNDS = 10  # of a ping; the fastest one counts


class Clock:
    """`mark` records the current time without waiting for the device; `seconds` returns it later,
    on this host's clock. This one is for devices that work while the host waits."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        return float(mark)


class DeviceClock(Clock):
    """A clock of CUDA events in the stream. The host blocks only when it reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gpu.synchronize(device)
        self._base, self._zero = self.mark(), time.perf_counter()

    def mark(self) -> gpu.Event:
        event = gpu.Event(enable_timing=True)
        event.record(gpu.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        mark.synchronize()
        return self._zero + self._base.elapsed_time(mark) / 1e3


def clock_of(device: torch.device) -> Clock:
    return DeviceClock(device) if gpu.is_gpu(device) else Clock()


def offset_to_first(group: dist.ProcessGroup, device: torch.device) -> float:
    """How far this host's clock is ahead of that of the group's first rank, in seconds; all ranks
    must call it.

    The first rank asks each in turn for its time; half of the fastest round trip is the error that
    can remain.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ahead = torch.zeros(size, dtype=torch.float64, device=device)
    for peer in range(1, size):
        if rank == 0:
            ahead[peer] = ping(group, peer, ROUNDS, time.perf_counter, device)[1]
        elif rank == peer:
            answer_pings(group, 0, ROUNDS, time.perf_counter, device)
    dist.broadcast(ahead, group=group, group_src=0)
    return float(ahead[rank])


def ping(
    group: dist.ProcessGroup,
    other: int,
    rounds: int,
    read: Callable[[], float],
    device: torch.device,
) -> tuple[float, float]:
    """The seconds of the fastest round trip to `other`, and how far the clock that `read` reads is
    ahead there; `other` calls `answer_pings` with as many rounds."""
    trips = []
    answer = torch.zeros((), dtype=torch.float64, device=device)
    for _ in range(rounds):
        start = read()
        dist.send(answer, group=group, group_dst=other)
        dist.recv(answer, group=group, group_src=other)
        its_time, now = float(answer), read()
        trips.append((now - start, its_time - (start + now) / 2))
    return min(trips)


def answer_pings(
    group: dist.ProcessGroup,
    other: int,
    rounds: int,
    read: Callable[[], float],
    device: torch.device,
) -> None:
    """The other end of `ping`."""
    question = torch.zeros((), dtype=torch.float64, device=device)
    for _ in range(rounds):
        dist.recv(question, group=group, group_src=other)
        question.item()  # a GPU receives while its host goes on
        dist.send(torch.full_like(question, read()), group=group, group_dst=other)
