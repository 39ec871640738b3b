"""ZB-V: two chunks a rank, down the ranks and back up (arXiv 2401.10241, section 6)."""

from zbcompile.schedules.actions import flatten
from zbcompile.schedules.task import Order, Task, each_rank
from zbcompile.schedules.writer import Writer


@each_rank
def zb_v(task: Task, rank: int) -> Order:
    """The handcrafted V schedule: zero bubble at equal times in the memory of 1F1B (section 6, figure 8).

    No bubble on a rank's own clock for m >= 2p-1, peak 2p chunk activations on every rank.
    """
    needed = max(task.microbatches, 2 * task.ranks - 1)
    order = _zb_v_rank(task.ranks, rank, needed)
    if needed == task.microbatches:
        return order
    return tuple(action for action in flatten(order) if action.microbatch < task.microbatches)


def _zb_v_rank(p: int, rank: int, microbatches: int) -> Order:
    down, up = rank, 2 * p - 1 - rank
    write = Writer(microbatches)
    for _ in range(2 * (p - rank) - 1):
        write.f(down)
    for _ in range(rank):
        write.f(up)
        write.f(down)
    for _ in range(p - rank):
        write.f(up)
        write.b(up)
        write.w(up)
    _zb_v_steady(write, down, up)
    for _ in range(rank):
        write.b(down)
        write.b(up)
    for _ in range(p - rank):
        write.b(down)
        write.w(down)
    write.flush(up, down)
    return tuple(write.order)


def _zb_v_steady(write: Writer, down: int, up: int) -> None:
    while write.has_f(up):
        if write.has_f(down):
            write.f(down)
        write.b(down)
        write.w(down)
        write.f(up)
        write.b(up)
        write.w(up)
