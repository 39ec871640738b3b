"""Times of events on a device, on one clock for all ranks."""

import time
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
    """Returns the seconds by which this host's clock is ahead of that of the group's first rank.
    All ranks must call it.

    The first rank asks each in turn for its time. Half of the fastest round trip is the error that
    can remain.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ahead = torch.zeros(size, dtype=torch.float64, device=device)
    message = torch.zeros((), dtype=torch.float64, device=device)
    for peer in range(1, size):
        trips = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            if rank == 0:
                dist.send(message, group=group, group_dst=peer)
                dist.recv(message, group=group, group_src=peer)
                its_time, now = float(message), time.perf_counter()
                trips.append((now - start, its_time - (start + now) / 2))
            elif rank == peer:
                dist.recv(message, group=group, group_src=0)
                message.item()  # a GPU receives while its host goes on
                dist.send(message.fill_(time.perf_counter()), group=group, group_dst=0)
        if trips:
            ahead[peer] = min(trips)[1]
    dist.broadcast(ahead, group=group, group_src=0)
    return float(ahead[rank])
