"""How fast and how far apart the machines of a process group are, measured between every two of its ranks."""

import time
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from zbcompile.distributed.agreement import gathered
from zbcompile.distributed.clocks import answer_pings, ping
from zbcompile.distributed.ranks import Ranks

PINGS = 20
LARGE = 8 << 20  # bytes of the message that measures the bandwidth
TRIES = 3


@dataclass(frozen=True)
class MeasuredLink:
    """The connection of two ranks: seconds of the shortest way there, bytes per second, and how many seconds the
    second one's wall clock is ahead of the first one's."""

    first: int
    second: int
    latency: float
    bandwidth: float
    ahead: float


def measure_pairs(ranks: Ranks) -> list[MeasuredLink]:
    """Every two ranks, one pair at a time, on every rank, by messages between their devices; nothing in one process."""
    group, found = ranks.everyone, []
    if group is None:
        return []
    with ranks.watch.position.waiting("measuring the connections"):
        for first, second in combinations(range(len(ranks.members)), 2):
            if ranks.number == first:
                found.append(_measure(group, ranks.device, first, second))
            elif ranks.number == second:
                _answer(group, ranks.device, first)
            dist.barrier(group)
    return [pair for each in gathered(ranks, found) for pair in each]


def measure_link(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Latency and bandwidth between the first two ranks of `group`, on the first; zeros on the others."""
    own = dist.get_rank(group)
    if own == 1:
        _answer(group, device, 0)
    pair = _measure(group, device, 0, 1) if own == 0 else None
    return (pair.latency, pair.bandwidth) if pair else (0.0, 0.0)


def _measure(group: dist.ProcessGroup, device: torch.device, own: int, other: int) -> MeasuredLink:
    trip, ahead = ping(group, other, PINGS, time.time, device)
    large, received = _messages(device)
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        dist.send(large, group=group, group_dst=other)
        dist.recv(received, group=group, group_src=other)
        received.item()  # waits for a GPU
        times.append(time.perf_counter() - began)
    return MeasuredLink(own, other, trip / 2, LARGE / max(median(times) - trip / 2, 1e-9), ahead)


def _answer(group: dist.ProcessGroup, device: torch.device, other: int) -> None:
    answer_pings(group, other, PINGS, time.time, device)
    large, received = _messages(device)
    for _ in range(TRIES):
        dist.recv(large, group=group, group_src=other)
        dist.send(received, group=group, group_dst=other)


def _messages(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A large one, and what answers it."""
    return torch.zeros(LARGE, dtype=torch.uint8, device=device), torch.zeros((), dtype=torch.float64, device=device)
