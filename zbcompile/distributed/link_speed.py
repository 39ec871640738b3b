"""How fast and how far apart the machines of a process group are, measured between every two of its ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

PINGS = 20
LARGE = 8 << 20  # bytes of the message that measures the bandwidth
TRIES = 3


@dataclass(frozen=True)
class Pair:
    """The connection of two ranks: seconds of the shortest way there, bytes per second, and how many seconds the
    second one's wall clock is ahead of the first one's."""

    first: int
    second: int
    latency: float
    bandwidth: float
    ahead: float


def measure_pairs(group: dist.ProcessGroup) -> list[Pair]:
    """The pairs that this rank is the first of; all ranks of `group` must call it. One pair is measured at a time."""
    own, found = dist.get_rank(group), []
    for first, second in combinations(range(dist.get_world_size(group)), 2):
        if own == first:
            found.append(_measure(group, first, second))
        elif own == second:
            _answer(group, first)
        dist.barrier(group)
    return found


def measure_link(group: dist.ProcessGroup) -> tuple[float, float]:
    """Latency and bandwidth between the first two ranks of `group`, on the first; zeros on the others."""
    own = dist.get_rank(group)
    if own == 1:
        _answer(group, 0)
    pair = _measure(group, 0, 1) if own == 0 else None
    return (pair.latency, pair.bandwidth) if pair else (0.0, 0.0)


def _measure(group: dist.ProcessGroup, own: int, other: int) -> Pair:
    trips = []
    for _ in range(PINGS):
        began, asked = time.perf_counter(), time.time()
        answer = torch.zeros((), dtype=torch.float64)
        dist.send(answer, group=group, group_dst=other)
        dist.recv(answer, group=group, group_src=other)
        trip = time.perf_counter() - began
        trips.append((trip, float(answer) - (asked + trip / 2)))
    trip, ahead = min(trips)
    large = torch.zeros(LARGE, dtype=torch.uint8)
    seconds = median(_seconds(lambda: _send_large(group, large, other)) for _ in range(TRIES))
    return Pair(own, other, trip / 2, LARGE / max(seconds - trip / 2, 1e-9), ahead)


def _answer(group: dist.ProcessGroup, other: int) -> None:
    question = torch.zeros((), dtype=torch.float64)
    for _ in range(PINGS):
        dist.recv(question, group=group, group_src=other)
        dist.send(torch.full_like(question, time.time()), group=group, group_dst=other)
    large = torch.empty(LARGE, dtype=torch.uint8)
    for _ in range(TRIES):
        dist.recv(large, group=group, group_src=other)
        dist.send(question, group=group, group_dst=other)


def _send_large(group: dist.ProcessGroup, large: torch.Tensor, other: int) -> None:
    dist.send(large, group=group, group_dst=other)
    dist.recv(torch.zeros((), dtype=torch.float64), group=group, group_src=other)


def _seconds(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
