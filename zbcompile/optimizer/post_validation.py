"""Updates inside of a step that do not wait for the norm of all gradients, and the means to correct
them."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zbcompile.distributed.ranks import Ranks
from zbcompile.distributed.under_way import complete, outlives_its_step
from zbcompile.engine.slice import LATE
from zbcompile.optimizer.early_update import EarlyUpdate, Options
from zbcompile.optimizer.gradient_norm import begin_sum, squares_of


@dataclass
class Speculation:
    """Which updates of a rank wait for all gradients; `held` says that some stage has to."""

    held: bool = False

    def may_update(self, clips: bool) -> bool:
        """Returns whether a stage updates now; `clips` says whether the gradients known so far need
        clipping."""
        self.held |= clips
        return not clips

    def stands(self, clips: bool, held_anywhere: bool) -> bool:
        """Returns whether the updates are those of all gradients, which `clips` says need clipping;
        if not, they are undone. `held_anywhere` says whether some stage of any rank waits: replicas
        exchange their updates, so that all of them must agree.

        >>> rank = Speculation()
        >>> rank.may_update(clips=False), rank.stands(clips=True, held_anywhere=False)
        (True, False)
        """
        return not clips and not held_anywhere


TAG = 1 << 30  # above those of the pipeline's messages
State = dict[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of the optimizer, and its state, as they were before an update."""

    tensor: torch.Tensor
    value: torch.Tensor
    state: Mapping[str, Any] | None

    @classmethod
    def of(cls, tensor: torch.Tensor, state: State) -> "KeptTensor":
        """A copy of `tensor` and its state, as they are now."""
        own = state.get(tensor)
        return cls(
            tensor,
            _copied(tensor),
            None if own is None else {key: _copied(v) for key, v in own.items()},
        )

    def restore(self, state: State) -> None:
        """Give the tensor its old values and state."""
        self.tensor.detach().copy_(self.value)
        if self.state is None:
            state.pop(self.tensor, None)
        else:
            state[self.tensor] = dict(self.state)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


@dataclass
class PostValidation:
    """One update of an optimizer on this process, from its first stage to the verdict on all
    gradients.

    `stages` is how many stages update before the end of the step, `late` says whether some rank
    updates more at its end. `squares` are those of the gradients that this process counts, `before`
    the sum over the ranks before this one. `gradients` are those that the update has used, `made`
    says with which options.
    """

    ranks: Ranks
    clip: float | None
    stages: int
    late: bool
    speculation: Speculation = field(default_factory=Speculation)
    squares: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    kept: list[KeptTensor] = field(default_factory=list)
    gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = ()
    made: EarlyUpdate | None = None
    sending: dist.Work | None = None
    works: list[dist.Work] = field(default_factory=list)
    weighed: int = 0

    def __post_init__(self) -> None:
        self.before = torch.zeros((), dtype=torch.float64, device=self.ranks.device)

    def may_update(self, counted: Iterable[torch.Tensor]) -> bool:
        """Returns whether the stage whose gradients `counted` this process counts updates now."""
        self.squares |= {gradient: squares_of(gradient) for gradient in counted}
        self.weighed += 1
        if self.weighed == self.stages:
            self._receive()
        known = sum(self.squares.values(), self.before)
        if self.weighed == self.stages:
            self._pass_on(known)
        return self.speculation.may_update(self._clips(known.sqrt().float()))

    def _receive(self) -> None:
        """The last stage of a rank waits for the ranks before it: those that update earlier would
        hold up the chain."""
        if self.ranks.rank:
            with self.ranks.watch.position.waiting("the norm of the ranks before"):
                dist.recv(
                    self.before, group=self.ranks.group, group_src=self.ranks.rank - 1, tag=TAG
                )

    def _pass_on(self, known: torch.Tensor) -> None:
        if self.ranks.rank is not None and self.ranks.rank + 1 < self.ranks.count:
            self.sent = known  # until it has arrived
            self.sending = dist.isend(
                known, group=self.ranks.group, group_dst=self.ranks.rank + 1, tag=TAG
            )

    def keep(self, tensors: Sequence[torch.Tensor], state: State) -> None:
        """Keep what an update of `tensors` will change."""
        self.kept += [KeptTensor.of(tensor, state) for tensor in tensors]

    def _clips(self, norm: torch.Tensor) -> bool:
        """Returns whether gradients of this norm are clipped; those that are not finite are."""
        return self.clip is not None and not self.clip / (norm + 1e-6) >= 1.0

    def is_last(self, stage: int) -> bool:
        """Whether all gradients of this rank are weighed with this stage; the same kind of place on
        every rank."""
        return stage == LATE if self.late else self.weighed == self.stages

    def begin_total(self, counted: Iterable[torch.Tensor]) -> None:
        """All stages are weighed: begin to add up what all processes count, in the order of
        `counted`."""
        self.total, work = begin_sum([self.squares[gradient] for gradient in counted], self.ranks)
        self.held = torch.tensor(float(self.speculation.held), device=self.ranks.device)
        if self.ranks.everyone is not None:
            held = dist.all_reduce(
                self.held, dist.ReduceOp.MAX, group=self.ranks.everyone, async_op=True
            )
            self.works = [each for each in (work, held, self.sending) if each is not None]
            for each in self.works:
                outlives_its_step(each)

    def settle(self) -> bool:
        """Waits for the norm of all gradients. Returns whether the updates stand."""
        watch, what = self.ranks.watch, "the norm of all gradients"
        with watch.apart(what), watch.position.waiting(what):
            while self.works:
                complete(self.works[-1])
                self.works.pop()
        self.norm = self.total.sqrt().float()
        return self.speculation.stands(self._clips(self.norm), bool(self.held))

    def undo(self, state: State) -> None:
        """Restore what was kept."""
        for each in self.kept:
            each.restore(state)

    @contextmanager
    def as_then(self, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Inside, the groups have the options, and the parameters the gradients, that the updates
        have used."""
        assert self.made is not None
        self.made.require_gradients()
        options = [
            {key: group[key] for key in used}
            for group, used in zip(groups, self.made.options, strict=True)
        ]
        gradients = [(tensor, tensor.grad) for tensor, _ in self.gradients]
        _put(groups, self.made.options, self.gradients)
        try:
            yield
        finally:
            _put(groups, options, gradients)


def _put(
    groups: Sequence[dict[str, Any]],
    options: Options,
    gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
) -> None:
    for group, values in zip(groups, options, strict=True):
        group.update(values)
    for tensor, gradient in gradients:
        tensor.grad = gradient
