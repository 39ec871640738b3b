"""The norm by which an optimizer clips, and updates inside of a step that do not wait for it.

The norm adds the squares of each gradient, then of all, in float64 and rounds once, so that it does
not depend on which rank holds what. (That of `pipe.clip_grad_norm_` has the bits of torch's.)

A stage updates if the gradients known so far need no clipping: those of its rank, and for the last
stage of a rank those of the ranks before it, whose sum of squares arrives as a message. The total
follows behind. If it says otherwise, all ranks restore copies and update as if they had waited.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbcompile.distributed.in_flight import complete, keep_in_flight
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.optimizer_parameters import OptimizerTensor
from zbcompile.errors import PipelineError
from zbcompile.passes.torch_private import version_of

TAG = 1 << 30  # above those of the pipeline's messages
State = dict[Tensor, dict[str, Any]]
Group = dict[str, Any]
# a tensor of the optimizer, its values and its state before an update
Snapshot = tuple[Tensor, Tensor, dict[str, Any] | None]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@dataclass
class PostValidation:
    """One update of an optimizer on this process, from its first stage to the norm of all
    gradients.

    Attributes:
        stages: How many stages update before the end of the step.
        options: The options of every group that the update uses.
        held: Whether an update of this rank waits for all gradients.
        squares: Those of the gradients that this process counts.
        before: The sum of squares over the ranks before this one.
        gradients: Those that the update has used.
        writes: How often each parameter had been written when the step ended.
    """

    ranks: Ranks
    clip: float | None
    stages: int
    options: list[Group]
    held: bool = False
    squares: dict[Tensor, Tensor] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    gradients: Sequence[tuple[Tensor, Tensor | None]] = ()
    writes: Mapping[OptimizerTensor, int] = field(default_factory=dict)
    sending: dist.Work | None = None
    works: list[dist.Work] = field(default_factory=list)
    stages_done: int = 0

    def __post_init__(self) -> None:
        self.before = torch.zeros((), dtype=torch.float64, device=self.ranks.device)

    def may_update(self, counted: Iterable[Tensor]) -> bool:
        """Returns whether the stage whose gradients `counted` this process counts updates now."""
        self.squares |= {gradient: squares_of(gradient) for gradient in counted}
        self.stages_done += 1
        is_last, ranks = self.stages_done == self.stages, self.ranks
        if is_last and ranks.rank:  # the ranks before it have updated earlier stages meanwhile
            with ranks.waiting("the norm of the ranks before"):
                dist.recv(self.before, group=ranks.group, group_src=ranks.rank - 1, tag=TAG)
        partial_sum = sum(self.squares.values(), self.before)
        if is_last and ranks.rank is not None and ranks.rank + 1 < ranks.count:
            self.sent = partial_sum  # until it has arrived
            self.sending = dist.isend(
                partial_sum, group=ranks.group, group_dst=ranks.rank + 1, tag=TAG
            )
        clips = self._clips(partial_sum.sqrt().float())
        self.held |= clips
        return not clips

    def keep(self, tensors: Sequence[OptimizerTensor], states: State) -> None:
        """Copies what an update of `tensors` will change."""
        for entry in tensors:
            state = states.get(entry.tensor)
            copied = None if state is None else {key: _copied(v) for key, v in state.items()}
            self.snapshots.append((entry.tensor, _copied(entry.tensor), copied))

    def _clips(self, norm: Tensor) -> bool:
        """Returns whether gradients of this norm are clipped. Those that are not finite are."""
        return self.clip is not None and not self.clip / (norm + 1e-6) >= 1.0

    def begin_total(self, counted: Iterable[Tensor]) -> None:
        """Starts to add up the squares of all processes, in the order of `counted`, and how many
        processes have an update that waits."""
        squares = [self.squares[gradient] for gradient in counted]
        self.total, work = begin_sum(squares, self.ranks, float(self.held))
        self.works += [keep_in_flight(pending) for pending in (work, self.sending) if pending]

    def end_step(self, tensors: Sequence[OptimizerTensor]) -> None:
        """Keeps what a correction needs of all `tensors` once the step has ended."""
        holders = dict.fromkeys(t for entry in tensors for t in (entry.parameter, entry.tensor))
        self.gradients = [(tensor, tensor.grad) for tensor in holders]
        self.writes = {entry: version_of(entry.parameter) for entry in tensors}

    def settle(self) -> bool:
        """Blocks until the norm of all gradients is known. Returns whether the updates are
        valid: no gradients need clipping, and no stage of any rank waits. Replicas exchange their
        updates, so all of them must take the same decision."""
        watch, what = self.ranks.watch, "the norm of all gradients"
        with watch.outside_calls(what), watch.position.waiting(what):
            while self.works:
                complete(self.works[-1])
                self.works.pop()
        total, held = self.total
        self.norm = total.sqrt().float()
        return not self._clips(self.norm) and not bool(held)

    def undo(self, states: State) -> None:
        """Restores the snapshots. Raises PipelineError if a parameter was written since the step
        ended."""
        for entry, writes in self.writes.items():
            if version_of(entry.parameter) != writes:
                raise PipelineError(
                    f"{entry.name} was written before its update was validated, and the update has"
                    " to be made again. Call pipe.parameters() first, which waits for the"
                    " validation."
                )
        for tensor, value, state in self.snapshots:
            tensor.detach().copy_(value)
            if state is None:
                states.pop(tensor, None)
            else:
                states[tensor] = dict(state)

    @contextmanager
    def as_in_step(self, groups: Sequence[Group]) -> Iterator[None]:
        """Context in which the groups have the options, and the parameters the gradients, that the
        updates have used."""
        options = [
            {key: group[key] for key in used}
            for group, used in zip(groups, self.options, strict=True)
        ]
        gradients = [(tensor, tensor.grad) for tensor, _ in self.gradients]
        _assign(groups, self.options, self.gradients)
        try:
            yield
        finally:
            _assign(groups, options, gradients)


def _assign(
    groups: Sequence[Group],
    options: Sequence[Group],
    gradients: Iterable[tuple[Tensor, Tensor | None]],
) -> None:
    for group, values in zip(groups, options, strict=True):
        group.update(values)
    for tensor, gradient in gradients:
        tensor.grad = gradient


CHUNK = 1 << 20  # elements that are squared at once


def squares_of(gradient: Tensor) -> Tensor:
    """The sum of the squares of a gradient, as float64."""
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for part in gradient.detach().reshape(-1).split(CHUNK):
        wide = part.double()
        total += wide.dot(wide)
    return total


def begin_sum(
    squares: Iterable[Tensor], ranks: Ranks, more: float = 0.0
) -> tuple[Tensor, dist.Work | None]:
    """Returns two sums over all processes, of `squares` and of `more`, and the reduction in flight.
    A process passes the squares of the gradients that it counts."""
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    total[1].fill_(more)  # without a copy from the host, for which a GPU would wait
    for square in squares:
        total[0] += square
    if ranks.everyone is None:
        return total, None
    return total, dist.all_reduce(total, group=ranks.everyone, async_op=True)


def norm_of_all(gradients: Iterable[Tensor], ranks: Ranks) -> Tensor:
    """The norm of the gradients of all processes, as float32."""
    total, work = begin_sum(map(squares_of, gradients), ranks)
    if work is not None:
        with ranks.waiting("the norm of all gradients"):
            work.wait()
    return total[0].sqrt().float()
