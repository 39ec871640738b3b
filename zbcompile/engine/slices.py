"""The parameters of an optimizer as slices, each of which one replica owns and updates, or, if it
is a whole parameter, every replica alike.

What a step does with them are its actions: REDUCE sums gradients to their owners, OPT updates,
GATHER waits for the values of other owners, which arrive in the parameters' own memory.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.parcels import Parcel, send
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.gradients import Gradients, GradientSum, grad_dtype
from zbcompile.engine.slice import LATE, Slice, await_parcels, by_owner, memory_of, spread, wait
from zbcompile.errors import PipelineError
from zbcompile.passes.compile_options import HALF
from zbcompile.passes.torch_private import version_of
from zbcompile.program.program import Program

Observe = Callable[[str, torch.Tensor], None]


@dataclass
class Slices:
    """The slices of one optimizer in this process, those of other owners too, in the order of their
    collectives.

    `divided` says whether replicas divide them: the memory of whole gradients then stays allocated
    from step to step. Of the parameters that are `chosen` every step trains those in `trained`.
    Gradients are summed over replicas in `reduce_dtype`; None: as they are. The ranks that share a
    parameter make all calls in the same order; each returns at once but `arrive` and `finish`.
    """

    slices: Sequence[Slice]
    ranks: Ranks
    divided: bool
    chosen: frozenset[str]
    trained: frozenset[str]
    reduce_dtype: torch.dtype | None = None
    summed: bool = False  # whether the slices have gradients,
    used: bool = False  # and an update has used them
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    reducing: defaultdict[int, list[Parcel[Slice]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    arriving: defaultdict[int, list[Parcel[Slice]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    writes: dict[Slice, int] = field(
        default_factory=dict
    )  # into the parameters, when their values began to arrive

    def __post_init__(self) -> None:
        self.names = frozenset(each.name for each in self.slices)

    def of(self, stage: int | None = None) -> list[Slice]:
        """The slices that are complete with a stage; None: all."""
        return [each for each in self.slices if stage is None or each.stage == stage]

    def mine(self, stage: int | None = None) -> list[Slice]:
        """The slices that this process updates."""
        return [each for each in self.of(stage) if each.mine]

    # For a step of the pipeline

    def begin(self, program: Program) -> None:
        """Before a step. Raises PipelineError if it trains other parameters, or would add to
        gradients of the past."""
        if program.trained & self.chosen != self.trained:
            name = min((program.trained & self.chosen) ^ self.trained)
            now, before = (
                ("trains", "did not") if name in program.trained else ("does not train", "did")
            )
            raise self.ranks.refusal(
                f"this step {now} {name}, and the first one {before}. An optimizer that is divided"
                " among replicas needs steps that train the same parameters; pass zero=0 to"
                " pipe.optimizer."
            )
        if self.used:
            raise self.ranks.refusal(
                "this step would add to gradients that an update has used already. Call"
                " optimizer.zero_grad() after optimizer.step(): replicas hold parts of the"
                " gradients, which model.zero_grad() does not know."
            )
        self.arrive(LATE)
        for name, parameter in (
            {each.name: each.parameter for each in self.slices}.items() if self.divided else ()
        ):
            self._lend(name, parameter)

    def reduce(self, stage: int, gradients: Gradients, observe: Observe) -> None:
        """Begin to sum a stage's gradients to their owners; `.grad` becomes None. `observe` sees
        what this rank adds."""
        sums = {
            name: _taken(gradients[name], partial(observe, name))
            for name in {s.name: s for s in self.of(stage)}
        }
        for group, owner, slices in by_owner(self.of(stage)):
            parts = ((each, memory_of(sums[each.name])[each.begin : each.end]) for each in slices)
            self.reducing[stage] += send(parts, partial(_reduce, group, owner), self.reduce_dtype)

    def finish(self, stage: int | None = None) -> None:
        """Wait for the sums of `stage`, or of all; what belongs to others is freed."""
        for at in list(self.reducing) if stage is None else [stage]:
            parcels = self.reducing.pop(at, [])
            while parcels:
                for each, part in parcels.pop(0).arrived():
                    if each.mine:
                        each.add(part, self.divided)
        self.summed = True

    def sums(self) -> dict[str, torch.Tensor]:
        """This process's parts of the sums, by parameter."""
        return {each.name: each.tensor.grad for each in self.mine() if each.tensor.grad is not None}

    def arrive(self, stage: int | None = None) -> None:
        """Wait for the values that the last update gave to the parameters of `stage`, or to all.
        Raises PipelineError if somebody else has written since the update, which would be lost."""
        for at in sorted(self.arriving) if stage is None else [stage]:
            for each in self.of(at) if at in self.arriving else ():
                if version_of(each.parameter) != self.writes[each]:
                    raise PipelineError(
                        f"{each.name} was written between optimizer.step() and the arrival of its"
                        " updated values, which would replace what was written. Call"
                        " pipe.parameters() or pipe.state_dict() first, which waits for them."
                    )
            with (
                self.ranks.watch.apart(what := "the updated parameters"),
                self.ranks.watch.position.waiting(what),
            ):
                await_parcels(self.arriving.pop(at, ()))

    # For an update

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients that an update uses, and those that are not summed."""
        parts = {f"{each.name} (a part)": each.tensor.grad for each in self.mine() if each.divided}
        return {each.name: each.parameter.grad for each in self.slices} | parts

    def with_gradients(self) -> list[nn.Parameter]:
        """The tensors whose `.grad` an update uses, and the parameters, to which the next step
        lends memory."""
        return list(
            dict.fromkeys(each for own in self.slices for each in (own.parameter, own.tensor))
        )

    def take(self) -> None:
        """Let the masters of whole parameters have their gradients, in the same memory."""
        for each in self.slices:
            if not each.divided:
                each.tensor.grad = each.given.grad

    def give_masters(
        self, wanted: Callable[[nn.Parameter], bool]
    ) -> dict[torch.Tensor, nn.Parameter]:
        """Make the masters of the parameters that are `wanted` and have none yet; by the
        parameters."""
        halves = [
            each for each in self.mine() if each.parameter.dtype in HALF and not each.is_master
        ]
        found = [each for each in halves if wanted(each.given)]
        for each in found:
            each.give_master()
        return {each.given: each.tensor for each in found}

    def counted(self, stage: int | None = None) -> Iterator[torch.Tensor]:
        """The gradients, all or a stage's, that this process counts in the norm of all."""
        found = (each.holder.grad for each in self.mine(stage) if each.counts)
        return (gradient for gradient in found if gradient is not None)

    def clip(self, limit: float, norm: torch.Tensor) -> None:
        """Scale all gradients so that their norm, which is `norm`, stays below `limit`."""
        nn.utils.clip_grads_with_norm_([each.holder for each in self.mine()], limit, norm)

    def begin_update(self, stage: int | None = None) -> None:
        """Before an update, of all or a stage. Raises PipelineError for gradients that are not
        summed over replicas."""
        if stage is None:
            self.arrive()
        left = [
            each.name for each in self.of(stage) if each.divided and each.parameter.grad is not None
        ]
        if left:
            raise PipelineError(
                f"the gradient of {min(left)} is this replica's own: the last step was inside"
                " no_sync, or the gradient was made elsewhere. Run a step outside of no_sync"
                " before optimizer.step()."
            )
        for each in self.mine(stage):
            each.refresh(each.values)

    def end_update(self, stage: int | None = None) -> None:
        """After an update: its values travel to the other replicas, first those that the next step
        needs first."""
        self.used = self.summed
        self.round(stage)
        for at in sorted({each.stage for each in self.of(stage) if each.divided}):
            self.arriving[at] += spread(self.of(at))
            self.writes |= {each: version_of(each.parameter) for each in self.of(at)}

    def round(self, stage: int | None = None) -> None:
        """Let parameters be their masters, rounded."""
        for each in (each for each in self.mine(stage) if each.is_master):
            each.values.copy_(each.tensor.detach())

    def recall(self) -> None:
        """An update is going to be undone: nothing of it is on its way any more."""
        for parcel in (each for at in list(self.arriving) for each in self.arriving.pop(at)):
            wait(parcel)

    def drop(self) -> None:
        """Forget all gradients, and sums under way that failed."""
        self.summed = self.used = False
        self.reducing.clear()
        for each in self.slices:
            each.parameter.grad = each.shown.grad = each.tensor.grad = None

    def _lend(self, name: str, parameter: nn.Parameter) -> None:
        """Let gradients accumulate in the memory that is kept for them, unless there are some
        already."""
        if parameter.grad is None:
            kept = self.kept.get(name)
            parameter.grad = self.kept[name] = _zeros(parameter) if kept is None else kept.zero_()


def _zeros(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=grad_dtype(parameter), requires_grad=False)


def _taken(own: GradientSum, observe: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The own sum of a parameter, which leaves its home; what nothing trained here takes part with
    zeros."""
    total = own.total()
    if total is not None:
        observe(total)
    own.release()
    return _zeros(own.parameter) if total is None else total


def _reduce(group: dist.ProcessGroup | None, owner: int, flat: torch.Tensor) -> dist.Work | None:
    return None if group is None else dist.reduce(flat, group=group, group_dst=owner, async_op=True)
