"""What an optimizer is told of a pipeline once that is compiled; and one that is not divided: every process updates all
that it holds.

Parameters in half precision that train have a master in float32, which is updated and rounded once; their gradients are
float32 too (`Parameter.grad_dtype`, torch 2.10 has it).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.model.placements import SHARD, along
from zbcompile.passes.compile_options import HALF
from zbcompile.program.program import Program
from zbcompile.runtime.data_parallel import LATE, Sum


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters of a pipeline, by their first names.

    `model` are all of the model as users see them (DTensors as such), the same names on every rank; `own` those of this
    process as plain tensors, of `rows` only its rows; `shown` those of `own` as users see them, whose gradients
    `take_gradients` gives to the plain ones. `sums` says over whom gradients are summed.
    """

    program: Program
    ranks: Ranks
    sums: Mapping[str, Sum]
    model: Mapping[str, torch.Tensor]
    own: Mapping[str, nn.Parameter]
    shown: Mapping[str, nn.Parameter]
    rows: frozenset[str]
    take_gradients: Callable[[], None]

    def stage_of(self, name: str) -> int:
        """The stage whose last W completes the gradient of a parameter; `LATE` if only the step's end does."""
        program, homes = self.program, self.program.homes[name]
        rows = () if program.vocabulary is None else program.vocabulary.parameters
        return LATE if program.copies > 1 or len(homes) > 1 or name in rows else homes[0]

    def counts(self, name: str, *dimensions: str) -> bool:
        """Whether this process speaks for its part of a parameter: the first of all that hold it. Along `dimensions`
        every rank speaks for a part of its own."""
        split = along(self.program.placement(name), SHARD)
        mesh, first = self.ranks.mesh, self.program.holders(name)[0]
        return (name in self.rows or first in self.ranks.local) and (
            mesh.index(*mesh.beside("pp", *dimensions, *split)) == 0
        )

    def require_whole(self, name: str, kind: str, zero: int) -> None:
        """Refuse a parameter of which this process has only a part, for an optimizer that needs all of it."""
        if is_distributed(self.model[name]) and not zero:
            return  # the optimizer sees the DTensor
        split = [f'"{each}"' for each in along(self.program.placement(name), SHARD) if self.ranks.mesh.size(each) > 1]
        where = "the pipeline's ranks" if name in self.rows else split and f"{split[0]} of the mesh"
        if where:
            raise PipelineError(
                f"{name} is sharded over {where}, so that {kind}, which does not update element by element, would see "
                "a part of it only. Leave it out (params=) and train it with AdamW, say."
            )


class WholeParameters:
    """What an optimizer updates of the parameters called `names`: `tensors` has the parameter, or its master, by name.

    If it updates element by element, parts of DTensors serve; otherwise it is given the DTensors.
    """

    def __init__(self, trained: TrainedParameters, names: Collection[str], plain: bool) -> None:
        self.trained = trained
        self.own = {name: p for name, p in trained.own.items() if name in names}
        self.given = {name: p if plain else trained.shown[name] for name, p in self.own.items()}
        for name in self.own:
            if self.own[name].dtype in HALF:
                sum_in_single_precision(self.own[name], trained.shown[name])
        self.masters: dict[str, nn.Parameter] = {}
        self.tensors = dict(self.given)
        self.give_masters(lambda parameter: parameter.requires_grad)

    def _of(self, stage: int | None) -> list[str]:
        """The parameters that are complete with a stage; None: all."""
        return [name for name in self.own if stage is None or self.trained.stage_of(name) == stage]

    def tensors_of(self, stage: int) -> list[nn.Parameter]:
        """What the optimizer updates once a stage is complete."""
        return [self.tensors[name] for name in self._of(stage)]

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients that an update uses."""
        return {name: p.grad for name, p in self.own.items()}

    def groups(self, numbers: Mapping[str, int], count: int) -> list[list[nn.Parameter]]:
        """The tensors of each group."""
        return [[tensor for name, tensor in self.tensors.items() if numbers[name] == i] for i in range(count)]

    def shown(self, tensor: torch.Tensor) -> nn.Parameter:
        """The parameter, as users see it, of a tensor that the optimizer updates."""
        return next(self.trained.shown[name] for name, each in self.tensors.items() if each is tensor)

    def is_master(self, tensor: torch.Tensor) -> bool:
        """Whether this is the master of a parameter."""
        return any(tensor is master for master in self.masters.values())

    def give_masters(self, wanted: Callable[[nn.Parameter], bool]) -> dict[torch.Tensor, nn.Parameter]:
        """Make the masters of the parameters that are `wanted` and have none yet; by the parameters."""
        halves = {name: p for name, p in self.given.items() if p.dtype in HALF and name not in self.masters}
        found = {name: nn.Parameter(p.detach().float()) for name, p in halves.items() if wanted(p)}
        self.masters |= found
        self.tensors |= found
        return {self.given[name]: master for name, master in found.items()}

    def counted(self, stage: int | None = None) -> Iterator[torch.Tensor]:
        """The gradients, all or those of a stage, that this process counts in the norm of all."""
        found = (self.own[name].grad for name in self._of(stage) if self.trained.counts(name))
        return (gradient for gradient in found if gradient is not None)

    def with_gradients(self) -> list[torch.Tensor]:
        """The tensors whose `.grad` an update uses."""
        return [*self.own.values(), *self.masters.values()]

    def recall(self) -> None:
        """An update was undone: the parameters round their masters again."""
        self.end_update()

    def clip(self, limit: float, norm: torch.Tensor) -> None:
        """Scale all gradients so that their norm, which is `norm`, stays below `limit`."""
        nn.utils.clip_grads_with_norm_(list(self.own.values()), limit, norm)

    def take(self) -> None:
        """Let masters have the gradients of their parameters, in the same memory."""
        for name, master in self.masters.items():
            master.grad = self.given[name].grad

    def begin_update(self, stage: int | None = None) -> None:
        """Before an update, of all or of a stage."""
        for name in self.masters.keys() & self._of(stage):
            refresh(self.masters[name].detach(), self.given[name].detach())

    def end_update(self, stage: int | None = None) -> None:
        """After an update: round the masters."""
        for name in self.masters.keys() & self._of(stage):
            self.given[name].detach().copy_(self.masters[name].detach())

    def arrive_all(self) -> None:
        """The parameters have their values already."""

    def drop(self) -> None:
        """Forget all gradients."""
        for name, own in self.own.items():
            own.grad = self.trained.shown[name].grad = self.tensors[name].grad = None


def sum_in_single_precision(*parameters: torch.Tensor) -> None:
    """Make `.grad` of parameters float32."""
    for parameter in parameters:
        before, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.float32
        parameter.grad = None if before is None else before.float()


def refresh(master: torch.Tensor, values: torch.Tensor) -> None:
    """Let `master` begin with `values` wherever it does not round to them: there somebody else has written since."""
    if master.dtype == values.dtype:
        master.copy_(values)
        return
    master.copy_(torch.where(master.to(values.dtype) == values, master, values.to(master.dtype)))
