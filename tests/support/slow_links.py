"""Training over a link that delays packets and loses some: two machines, whose packets a process of
ours carries.

    python -m tests.support.slow_links [--delays 0 1 10] [--losses 0 5] [--ranks 2 4] [--steps 20]

from the repository's root. The machines are network namespaces with a TUN device each, so no packet
scheduler of the kernel is needed (netem is often missing). All runs must have the losses of one in
a single process, bit for bit. Without the right to make namespaces and TUN devices it says so and
does nothing.
"""

import argparse
import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import signal
import statistics
import struct
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zbcompile
from tests.support.namespaces import Machines

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET = 65536  # bytes, more than any has


@dataclass
class SlowMachines(Machines):
    """Machines whose cable delays every packet by `delay` seconds and loses a share `loss`
    of them."""

    delay: float = 0.0
    loss: float = 0.0
    carrier: int = 0

    def lay_cable(self) -> None:
        ready, made = os.pipe()
        self.carrier = os.fork()
        if not self.carrier:
            try:
                ends = [self._open_end(number) for number in range(2)]
                os.write(made, b"1")
                carry(ends, self.delay, self.loss)
            finally:
                os._exit(1)
        os.close(made)
        if not os.read(ready, 1):
            raise OSError("no TUN device can be made")
        os.close(ready)

    def _open_end(self, number: int) -> int:
        self.enter(number)
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(
            end, TUNSETIFF, struct.pack("16sH22x", f"zb{number}".encode(), IFF_TUN | IFF_NO_PI)
        )
        return end

    def close(self) -> None:
        if self.carrier:
            os.kill(self.carrier, signal.SIGKILL)
            os.waitpid(self.carrier, 0)
            self.carrier = 0
        super().close()


def carry(ends: list[int], delay: float, loss: float) -> None:
    """Carry packets from each end to the other, without end."""
    chance, numbers = random.Random(0), itertools.count()
    underway: list[
        tuple[float, int, int, bytes]
    ] = []  # arrival, a number that breaks ties, end, packet
    while True:
        wait = max(0.0, underway[0][0] - time.monotonic()) if underway else None
        for source in select.select(ends, [], [], wait)[0]:
            packet = os.read(source, PACKET)
            if chance.random() >= loss:
                other = ends[1 - ends.index(source)]
                heapq.heappush(underway, (time.monotonic() + delay, next(numbers), other, packet))
        while underway and underway[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(underway)
            with contextlib.suppress(OSError):  # the interface is down
                os.write(end, packet)


def make(**options: object) -> zbcompile.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    return zbcompile.pipeline(
        model, schedule="zb-h1", microbatches=8, loss=nn.functional.mse_loss, **options
    )


@dataclass(frozen=True)
class Trained:
    """The losses, the median seconds of a step and, in a job, of a message to the last rank and
    back."""

    losses: list[str]
    step: float
    trip: float = 0.0


def train(pipe: zbcompile.Pipeline, steps: int) -> Trained:
    pipe.compile(torch.zeros(32, 64), target=torch.zeros(32, 64))
    optimizer, generator = (
        torch.optim.SGD(pipe.parameters(), lr=0.1),
        torch.Generator().manual_seed(1),
    )
    losses, taken = [], []
    for _ in range(steps):
        batch = torch.randn(32, 64, generator=generator)
        begun = time.monotonic()
        losses.append(float(pipe.step(batch, target=batch)).hex())
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.monotonic() - begun)
    return Trained(losses, statistics.median(taken[1:]))


def trip(peer: int, times: int = 10) -> float:
    """Median seconds that a message takes from rank 0 to `peer` and back."""
    token, taken = torch.zeros(1), []
    for _ in range(times):
        begun = time.monotonic()
        if dist.get_rank() == 0:
            dist.send(token, peer)
            dist.recv(token, peer)
        elif dist.get_rank() == peer:
            dist.recv(token, 0)
            dist.send(token, 0)
        taken.append(time.monotonic() - begun)
    return statistics.median(taken)


def serve(rank: int, ranks: int, steps: int, address: str, out: Path) -> None:
    """One process of a job: train, and write down how that went."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": "29511", "LOCAL_WORLD_SIZE": str(ranks)}
    pipe = make(timeout=120)
    found = train(pipe, steps)
    found = replace(found, trip=trip(ranks - 1))
    dist.barrier()
    if rank == 0:
        out.write_text(json.dumps(asdict(found)))
    pipe.close()


def run(machines: SlowMachines, ranks: int, steps: int, folder: Path) -> Trained:
    """Train on both machines, half of the ranks on each."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    pids = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            status = 1
            try:
                machines.enter(rank * 2 // ranks)
                serve(rank, ranks, steps, machines.address(0), out)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        raise SystemExit(f"the ranks ended with {statuses}")
    return Trained(**json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Training over a link that is slow and loses packets."
    )
    parser.add_argument(
        "--delays", type=float, nargs="+", default=[0.0, 1.0, 10.0], help="milliseconds, one way"
    )
    parser.add_argument(
        "--losses", type=float, nargs="+", default=[0.0, 5.0], help="percent of all packets"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for ranks in options.ranks:
        alone = make(ranks=ranks)
        expected = train(alone, options.steps)
        alone.close()
        for delay, loss in itertools.product(options.delays, options.losses):
            machines = SlowMachines(delay=delay / 1000, loss=loss / 100)
            if machines.reason:
                print(f"skipped: {machines.reason}")
                return
            try:
                with tempfile.TemporaryDirectory() as folder:
                    found = run(machines, ranks, options.steps, Path(folder))
            finally:
                machines.close()
            same = "equal bits" if found.losses == expected.losses else "OTHER BITS"
            print(
                f"{ranks} ranks, {delay:g} ms, {loss:g} % lost: {same}, {found.step * 1e3:.1f} ms a"
                f" step ({expected.step * 1e3:.1f} in one process), {found.trip * 1e3:.1f} ms there"
                " and back",
                flush=True,
            )


if __name__ == "__main__":
    main()
