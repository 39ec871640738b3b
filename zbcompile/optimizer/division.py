"""Which slices of a compiled pipeline's parameters an optimizer has, and which replica owns each:
every replica whole parameters, or parts of the parameters of each stage, divided so that the
replicas have about as much to update.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.slice import LATE, Slice
from zbcompile.engine.slices import Slices
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.model.placements import PARTIAL, SHARD, along
from zbcompile.model.tensor_shard import Chunk
from zbcompile.passes.compile_options import HALF
from zbcompile.passes.graph.strides import is_dense
from zbcompile.program.program import Program

Part = tuple[str, int, int, int]  # a parameter's name, the elements from where to where, the owner
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters of a pipeline, by their first names.

    `model` are all of the model as users see them (DTensors as such), the same names on every rank;
    `own` those of this process as plain tensors, of `rows` only its rows; `shown` those of `own` as
    users see them, whose gradients `take_gradients` gives to the plain ones.
    """

    program: Program
    ranks: Ranks
    model: Mapping[str, torch.Tensor]
    own: Mapping[str, nn.Parameter]
    shown: Mapping[str, nn.Parameter]
    rows: frozenset[str]
    take_gradients: Callable[[], None]
    chunk: Callable[[str], Chunk | None]  # where this process's part is in a sharded parameter

    def stage_of(self, name: str) -> int:
        """The stage whose last W completes the gradient of a parameter; `LATE` if only the step's
        end does."""
        homes = self.program.homes[name]
        return LATE if len(homes) > 1 or self._is_read_outside_of_stages(name) else homes[0]

    def _is_read_outside_of_stages(self, name: str) -> bool:
        program = self.program
        return program.copies > 1 or (
            program.vocabulary is not None and name in program.vocabulary.parameters
        )

    def replicas_of(self, name: str) -> tuple[str, ...]:
        """The dimensions of the mesh along which replicas divide a parameter: those that sum its
        gradients, or would if it trained."""
        partial = along(self.program.placement(name), PARTIAL)
        return tuple(each for each in self.ranks.mesh.beside("pp") if each in partial)

    def counts(self, name: str, *dimensions: str) -> bool:
        """Whether this process counts for its part of a parameter: it is the first of all processes
        that hold the part. Along `dimensions` every rank has a part of its own."""
        split = along(self.program.placement(name), SHARD)
        mesh, first = self.ranks.mesh, self.program.holders(name)[0]
        return (name in self.rows or first in self.ranks.local) and (
            mesh.index(*mesh.beside("pp", *dimensions, *split)) == 0
        )

    def require_whole(self, name: str, kind: str, zero: int) -> None:
        """Raise PipelineError for an optimizer that needs a whole parameter, of which this process
        has only a part."""
        if is_distributed(self.model[name]) and not zero:
            return  # the optimizer sees the DTensor
        split = [
            f'"{each}"'
            for each in along(self.program.placement(name), SHARD)
            if self.ranks.mesh.size(each) > 1
        ]
        where = "the pipeline's ranks" if name in self.rows else split and f"{split[0]} of the mesh"
        if where:
            raise PipelineError(
                f"{name} is sharded over {where}, so that {kind}, which does not update element by"
                " element, would see a part of it only. Leave it out (params=) and train it with"
                " AdamW, say."
            )


def whole_slices(trained: TrainedParameters, names: Collection[str], plain: bool) -> Slices:
    """A slice for each parameter called one of `names`, as a whole. Of a DTensor the optimizer gets
    this process's `plain` part, which serves if it updates element by element, or the DTensor."""
    found = []
    for name, own in trained.own.items():
        if name in names:
            given, stage = own if plain else trained.shown[name], trained.stage_of(name)
            sum_in_single_precision(own, trained.shown[name])
            found.append(
                Slice(
                    name,
                    own,
                    given,
                    trained.shown[name],
                    0,
                    own.numel(),
                    stage,
                    trained.counts(name),
                )
            )
    slices = Slices(found, trained.ranks, False, frozenset(names), frozenset(names))
    slices.give_masters(lambda parameter: parameter.requires_grad)
    return slices


def divided_slices(trained: TrainedParameters, names: Collection[str], elementwise: bool) -> Slices:
    """The trained parameters called one of `names`, divided among the replicas that sum their
    gradients: by elements if the optimizer is `elementwise`, otherwise each parameter to one
    replica."""
    program, mesh = trained.program, trained.ranks.mesh
    everywhere = program.trained.intersection(names)
    found: list[Slice] = []
    loads: dict[tuple[str, ...], list[int]] = {}

    def bucket(name: str) -> tuple[int, str, tuple[str, ...]]:
        """What is divided together: several ranks hold what is late, so that each of these is
        divided by itself."""
        stage = trained.stage_of(name)
        return stage, name if stage == LATE else "", trained.replicas_of(name)

    names_here = sorted(everywhere & trained.own.keys(), key=lambda name: (bucket(name), name))
    for (stage, _, summed), together in groupby(names_here, bucket):
        shapes = {name: _dense(name, trained.own[name]).shape for name in together}
        load = loads.setdefault(summed, [0] * mesh.size(*summed))
        parts = by_elements(shapes, len(load)) if elementwise else by_parameters(shapes, load)
        group = mesh.group(*summed)
        here = dist.get_rank(group) if group is not None else 0
        for name, begin, end, owner in parts:
            own, shown, counts = (
                trained.own[name],
                trained.shown[name],
                trained.counts(name, *summed),
            )
            sum_in_single_precision(own, shown)
            place = (stage, counts, True, elementwise, group, owner, owner == here)
            found.append(Slice(name, own, own, shown, begin, end, *place))
    slices = Slices(found, trained.ranks, True, frozenset(names), everywhere)
    slices.give_masters(lambda parameter: True)
    return slices


def by_elements(shapes: Shapes, replicas: int) -> list[Part]:
    """One parameter after the other in a row, which is cut into equal parts.

    >>> by_elements({"a": (2, 3), "b": (1,)}, 2)
    [('a', 0, 4, 0), ('a', 4, 6, 1), ('b', 0, 1, 1)]
    """
    share = -(-sum(map(prod, shapes.values())) // replicas) or 1
    found: list[Part] = []
    at = 0
    for name, shape in shapes.items():
        size = prod(shape)
        cuts = [0, *range(share - at % share, size, share), size]
        found += [
            (name, begin, end, (at + begin) // share)
            for begin, end in pairwise(cuts)
            if begin < end
        ]
        at += size
    return found


def by_parameters(shapes: Shapes, loads: list[int]) -> list[Part]:
    """Each one whole: the costliest first, to the replica that has the least to do so far, as
    `loads` says, which are raised. An update may multiply a matrix by its own square, along its
    shorter side.

    >>> by_parameters({"a": (2, 3), "b": (2, 2), "c": (2, 2)}, [0, 0])
    [('a', 0, 6, 0), ('b', 0, 4, 1), ('c', 0, 4, 1)]
    """
    costs = {name: prod(shape) * min(shape, default=1) for name, shape in shapes.items()}
    found: list[Part] = []
    for name in sorted(costs, key=lambda name: -costs[name]):
        owner = loads.index(min(loads))
        loads[owner] += costs[name]
        found.append((name, 0, prod(shapes[name]), owner))
    return sorted(found, key=lambda part: part[3])


def _dense(name: str, parameter: nn.Parameter) -> nn.Parameter:
    if not is_dense(parameter):
        raise PipelineError(
            f"the memory of {name} has gaps (shape {list(parameter.shape)}, strides"
            f" {list(parameter.stride())}), so that replicas cannot divide it. Make it contiguous,"
            " or pass zero=0 to pipe.optimizer."
        )
    return parameter


def sum_in_single_precision(*parameters: torch.Tensor) -> None:
    """Makes `.grad` of parameters in half precision float32."""
    for parameter in parameters:
        if parameter.dtype in HALF:
            before, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32
            parameter.grad = None if before is None else before.float()
