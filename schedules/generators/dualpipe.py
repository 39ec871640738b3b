"""DualPipe and DualPipeV: two directions at once, in overlapped pairs (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

Both follow the same eight phases. A rank has a *near* side, whose microbatches reach it early, and a *far* side: two
model copies that run in opposite directions (DualPipe), or the two chunks of a V (DualPipeV: DualPipe cut in half,
without the second copy). `depth` is the distance from the near side's entrance, `turn` the number of ranks up to the
turn.

Fused and split backwards stand side by side; a W that runs alone is always the oldest pending one of its rank.
"""

from collections import deque
from dataclasses import dataclass, field

from zbcompile.schedules.generators.order_writer import Writer
from zbcompile.schedules.generators.task import Order, Task, each_rank


@each_rank
def dualpipe(task: Task, rank: int) -> Order:
    """Microbatches from both ends of the pipeline, through two copies of the model.

    Microbatches below m/2 enter at rank 0 (copy 0), the others at rank p-1 (copy 1). Idle time with F = T_B:
    (p/2-1)(F&B + T_B+T_W - 3 T_W), F&B the time of a pair; peak p+1 activations; twice the parameters. The gradients
    of a stage add up copy by copy. On 2 ranks, 4 microbatches (microbatches 2 and 3 run through copy 1, whose stage 0
    lives on rank 1)::

        F0.0  F1.2  F0.1  BW1.2  (F1.3|BW0.0)  BW1.3  B0.1  W0.1
        F0.2  F1.0  F0.3  BW1.0  (F1.1|BW0.2)  BW1.1  B0.3  W0.3
    """
    half, p = task.microbatches // 2, task.ranks
    mirrored = p - 1 - rank
    first_copy, second_copy = rank, mirrored
    near, far = (first_copy, second_copy) if rank < p // 2 else (second_copy, first_copy)
    write = Writer(half, first={second_copy: half})
    return _phases(_Sides(write, near, far), half, turn=p // 2, depth=min(rank, mirrored))


@each_rank
def dualpipe_v(task: Task, rank: int) -> Order:
    """DualPipe on a V placement: one copy of the model, two chunks a rank (DeepSeek's and Sea AI Lab's "cut-in-half").

    Idle time with F = T_B per chunk: (p-1)(F&B + T_B+T_W - 3 T_W) in times of a chunk; peak 2p+1 chunk activations. On
    2 ranks, 4 microbatches::

        F0.0  F0.1  F0.2  F3.0  B3.0  W3.0   F3.1  (F0.3|BW3.1)
              F1.0  F2.0  F1.1  F2.1  F1.2   BW2.0

        (F3.2|BW0.0)  BW3.2         (F3.3|BW0.1)         BW3.3  B0.2  W0.2  B0.3  W0.3
        (F2.2|BW1.0)  (F1.3|BW2.1)  (F2.3|BW1.1)  BW2.2  BW1.2  B2.3  B1.3  W2.3  W1.3
    """
    write = Writer(task.microbatches)
    sides = _Sides(write, rank, 2 * task.ranks - 1 - rank)
    return _phases(sides, task.microbatches, turn=task.ranks, depth=rank)


@dataclass
class _Sides:
    """The pen with DualPipe's notation: side 0 is the near stage, side 1 the far one."""

    write: Writer
    near: int
    far: int
    pending: deque[int] = field(default_factory=deque)

    def f(self, side: int) -> None:
        self.write.f(self._stage(side))

    def b(self, side: int) -> None:
        self.write.b(self._stage(side))
        self.pending.append(self._stage(side))

    def bw(self, side: int) -> None:
        self.write.bw(self._stage(side))

    def w(self) -> None:
        """The oldest pending W of the rank, whichever side it belongs to."""
        self.write.w(self.pending.popleft())

    def pair(self, forward_side: int, backward_side: int) -> None:
        self.write.pair(self._stage(forward_side), self._stage(backward_side))

    def _stage(self, side: int) -> int:
        return self.far if side else self.near


def _phases(sides: _Sides, microbatches: int, turn: int, depth: int) -> Order:
    """`microbatches` per side; phase numbers are DeepSeek's."""
    outer = turn - depth - 1
    for _ in range(2 * outer):  # 1
        sides.f(0)
    for _ in range(depth + 1):  # 2
        sides.f(0)
        sides.f(1)
    for _ in range(outer):  # 3
        sides.b(1)
        sides.w()
        sides.f(1)
    _main(sides, microbatches - 2 * turn + depth + 1, at_turn=outer == 0)  # 4
    for _ in range(outer):  # 5
        sides.bw(1)
        sides.pair(1, 0)
    _cool_down(sides, depth)  # 6
    for _ in range(outer):  # 7
        sides.w()
        sides.b(0)
    while sides.pending:  # 8
        sides.w()
    return tuple(sides.write.order)


def _main(sides: _Sides, count: int, at_turn: bool) -> None:
    """Phase 4. At the turn the first backward needs the very forward it would be paired with."""
    for index in range(count):
        if at_turn and index == 0:
            sides.f(0)
            sides.bw(1)
        else:
            sides.pair(0, 1)
        sides.pair(1, 0)


def _cool_down(sides: _Sides, depth: int) -> None:
    """Phase 6: 2(depth+1) backwards, fused in their first half and split in the second."""
    for index in range(2 * (depth + 1)):
        side = 1 - index % 2
        if index <= depth:
            sides.bw(side)
        else:
            sides.b(side)
