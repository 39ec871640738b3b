"""How fast messages between the first two ranks of a process group are."""

import time
from statistics import median

import torch
import torch.distributed as dist

from zbcompile.distributed.clocks import answer_pings, ping

PINGS = 20
LARGE = 8 << 20  # bytes of the message that measures the bandwidth
TRIES = 3


def measure_link(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Latency and bandwidth between the first two ranks of `group`, on the first; zeros on the others."""
    own = dist.get_rank(group)
    if own == 1:
        _answer(group, device, 0)
    return _measure(group, device, 1) if own == 0 else (0.0, 0.0)


def _measure(group: dist.ProcessGroup, device: torch.device, other: int) -> tuple[float, float]:
    trip, _ = ping(group, other, PINGS, time.time, device)
    large, received = _messages(device)
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        dist.send(large, group=group, group_dst=other)
        dist.recv(received, group=group, group_src=other)
        received.item()  # waits for a GPU
        times.append(time.perf_counter() - began)
    return trip / 2, LARGE / max(median(times) - trip / 2, 1e-9)


def _answer(group: dist.ProcessGroup, device: torch.device, other: int) -> None:
    answer_pings(group, other, PINGS, time.time, device)
    large, received = _messages(device)
    for _ in range(TRIES):
        dist.recv(large, group=group, group_src=other)
        dist.send(received, group=group, group_dst=other)


def _messages(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A large one, and what answers it."""
    return torch.zeros(LARGE, dtype=torch.uint8, device=device), torch.zeros((), dtype=torch.float64, device=device)
