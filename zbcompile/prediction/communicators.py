"""What NCCL takes of a GPU for a rank: communicators, their buffers, thread blocks that wait for messages.

Sizes are those of NCCL's sources (src/init.cc: `computeBuffSizes`; src/transport/p2p.cc: the receiver has them, for
each thread block); they were never measured.
"""

from dataclasses import dataclass

from zbcompile.passes.gpu import KIND
from zbcompile.program.program import Program
from zbcompile.schedules.lowering.routes import channels_of

MOST_CTAS = 32  # what NCCL takes over NVLink; over PCIe it takes 2
BUFFERS = (4 << 20) + (512 << 10) + 640 * 120 * 8 * 8  # bytes per thread block, by protocol: Simple, LL, LL128


@dataclass(frozen=True)
class Communicators:
    """The communicators of one rank. A link carries what a rank sends to another, or receives from it; `groups` are
    those of all ranks of the pipeline, of its replicas, and of a sharded vocabulary. `ctas` is the limit of a link's
    thread blocks, `receives` that of receives that are posted ahead."""

    received: int = 0
    sent: int = 0
    groups: int = 0
    ctas: int = MOST_CTAS
    receives: int | None = None

    @property
    def links(self) -> int:
        return self.received + self.sent

    @property
    def waiting(self) -> int:
        """Thread blocks that wait at a time, at most, however early receives are posted: a link has one stream, on
        which they come one after the other."""
        received = self.received if self.receives is None else min(self.received, self.receives + 1)
        return (received + self.sent) * self.ctas

    @property
    def bytes(self) -> int:
        return (self.received * self.ctas + self.groups * MOST_CTAS) * BUFFERS


def communicators_of(program: Program, rank: int, replicas: int = 1) -> Communicators:
    """The communicators of a rank; None for a program of the CPU, whose messages all go through one group."""
    schedule = program.schedule
    if program.device_type != KIND or schedule.ranks * replicas == 1:
        return Communicators()
    channels = channels_of(schedule)
    return Communicators(
        received=sum(destination == rank for _, destination in channels),
        sent=sum(source == rank for source, _ in channels),
        groups=(schedule.ranks > 1) + (replicas > 1) + (program.vocabulary is not None),
        ctas=program.step.max_ctas or MOST_CTAS,
        receives=program.step.max_receives,
    )
