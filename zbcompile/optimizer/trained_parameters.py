"""The tensors that an optimizer of a compiled pipeline updates in this process: whole parameters,
or with ZeRO-1 this replica's parts of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.optimizer_parameters import LATE, OptimizerParameters, OptimizerTensor
from zbcompile.engine.vocabulary_parameters import VocabularyShards
from zbcompile.engine.zero1 import ShardedBuffer
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import Chunk, Parts, chunk_of, is_distributed
from zbcompile.model.placements import PARTIAL, SHARD, along
from zbcompile.passes.compile_options import HALF
from zbcompile.passes.graph.strides import is_dense
from zbcompile.passes.torch_private import gradient_dtype
from zbcompile.program.program import Program

# stage, name of a late parameter, dimensions of the replicas, dtypes, whether it is counted
Bucket = tuple[int, str, tuple[str, ...], tuple[str, str], bool]


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters of a pipeline, by their first names.

    `model` are all of the model as users see them (DTensors as such), the same names on every rank.
    `local` are those of this process as plain tensors: local tensors of the DTensors in `parts`,
    and rows of the `shards` of an output layer.
    """

    program: Program
    ranks: Ranks
    model: Mapping[str, torch.Tensor]
    local: Mapping[str, nn.Parameter]
    parts: Parts
    shards: VocabularyShards | None

    def user_parameter(self, name: str) -> Any:
        """Returns a parameter of `local` as users see it."""
        part = self.parts.parts.get(name)
        return self.local[name] if part is None else part.whole

    def has_rows(self, name: str) -> bool:
        """Returns True if this process has some rows of a parameter, as a part of an output
        layer."""
        return self.shards is not None and name in self.shards.own

    def chunk(self, name: str) -> Chunk | None:
        """Returns the place of this process's part in a sharded parameter."""
        if self.shards is not None and self.has_rows(name):
            return self.shards.chunk(name)
        return chunk_of(self.user_parameter(name))

    def stage_of(self, name: str) -> int:
        """Returns the stage whose last W completes the gradient of a parameter; `LATE` if only the
        end of the step does."""
        program, homes = self.program, self.program.homes[name]
        vocabulary = program.vocabulary
        is_sharded = vocabulary is not None and name in vocabulary.parameters
        return LATE if len(homes) > 1 or program.copies > 1 or is_sharded else homes[0]

    def is_counted(self, name: str, *dimensions: str) -> bool:
        """Returns whether this process is the first that holds its part of a parameter. Along
        `dimensions` every rank has a different part."""
        split = along(self.program.placement(name), SHARD)
        mesh, first = self.ranks.mesh, self.program.holders(name)[0]
        return (self.has_rows(name) or first in self.ranks.local) and (
            mesh.index(*mesh.beside("pp", *dimensions, *split)) == 0
        )

    def require_whole(self, name: str, kind: str, zero: int) -> None:
        """Raises PipelineError for an optimizer that needs a whole parameter if this process has
        only a part of it."""
        if is_distributed(self.model[name]) and not zero:
            return  # the optimizer sees the DTensor
        split = [
            f'"{dimension}" of the mesh'
            for dimension in along(self.program.placement(name), SHARD)
            if self.ranks.mesh.size(dimension) > 1
        ]
        if self.has_rows(name):
            split = ["the pipeline's ranks"]
        if split:
            raise PipelineError(
                f"{name} is sharded over {split[0]}, so that {kind}, which does not update element"
                " by element, would see a part of it only. Leave it out (params=) and train it with"
                " AdamW, say."
            )


def whole_parameters(
    trained: TrainedParameters, names: Collection[str], plain: bool
) -> OptimizerParameters:
    """Returns the parameters called one of `names`, whole. With `plain` the optimizer gets this
    process's local part of a DTensor, which serves if it updates element by element."""
    tensors = []
    for name, parameter in trained.local.items():
        if name in names:
            user_parameter = trained.user_parameter(name)
            source = parameter if plain else user_parameter
            accumulate_in_float32(parameter, user_parameter)
            stage, counted = trained.stage_of(name), trained.is_counted(name)
            tensors.append(OptimizerTensor(name, parameter, user_parameter, source, stage, counted))
    every = frozenset(names)
    parameters = OptimizerParameters(tensors, trained.ranks, False, every, every)
    parameters.make_masters(lambda parameter: parameter.requires_grad)
    return parameters


def sharded_parameters(
    trained: TrainedParameters,
    names: Collection[str],
    elementwise: bool,
    reduce_dtype: torch.dtype | None,
) -> OptimizerParameters:
    """Returns this replica's parts of the trained parameters called one of `names`.

    The replicas that sum the gradients of a stage divide its parameters: by element if the
    optimizer is `elementwise`, otherwise each whole parameter belongs to one replica.
    """
    mesh, every = trained.ranks.mesh, trained.program.trained.intersection(names)
    buckets: dict[Bucket, list[str]] = {}
    costs_of: dict[tuple[str, ...], list[int]] = {}  # costs of each replica's update so far
    for name in sorted(every & trained.local.keys()):
        parameter, stage = trained.local[name], trained.stage_of(name)
        if not is_dense(parameter):
            raise PipelineError(
                f"the memory of {name} has gaps (shape {list(parameter.shape)}, strides"
                f" {list(parameter.stride())}), so that replicas cannot divide it. Make it"
                " contiguous, or pass zero=0 to pipe.optimizer."
            )
        accumulate_in_float32(parameter, trained.user_parameter(name))
        partial = along(trained.program.placement(name), PARTIAL)
        replicas = tuple(dim for dim in mesh.beside("pp") if dim in partial)
        # Other ranks hold a late parameter too: all of them divide it alike.
        alone = name if stage == LATE else ""
        dtypes = str(parameter.dtype), str(gradient_dtype(parameter))
        counted = trained.is_counted(name, *replicas)
        buckets.setdefault((stage, alone, replicas, dtypes, counted), []).append(name)
    tensors, buffers = [], []
    for (stage, _, replicas, _, counted), members in sorted(buckets.items(), key=repr):
        owners = None
        if not elementwise:
            costs = costs_of.setdefault(replicas, [0] * mesh.size(*replicas))
            owners = assign_owners({name: trained.local[name].shape for name in members}, costs)
        buffer = ShardedBuffer(
            stage,
            {name: trained.local[name] for name in members},
            {name: trained.user_parameter(name) for name in members},
            mesh.group(*replicas),
            owners,
            reduce_dtype,
        )
        buffers.append(buffer)
        segment = buffer.values[slice(*buffer.segment)]
        for name, parameter in buffer.parameters.items():
            part = buffer.local_part(segment, name)
            if part is not None:
                user_parameter = buffer.user_parameters[name]
                tensors.append(
                    OptimizerTensor(name, parameter, user_parameter, part, stage, counted, True)
                )
    parameters = OptimizerParameters(
        tensors, trained.ranks, True, frozenset(names), every, buffers, reduce_dtype
    )
    parameters.make_masters(lambda part: True)
    return parameters


def assign_owners(shapes: Mapping[str, Sequence[int]], costs: list[int]) -> dict[str, int]:
    """Returns the replica that owns each parameter: the costliest first, to the replica with the
    least cost so far, as in `costs`, which are raised.

    An update may multiply a matrix by its own square, along its shorter side (Muon).

    >>> assign_owners({"a": (2, 3), "b": (2, 2), "c": (2, 2)}, [0, 0])
    {'a': 0, 'b': 1, 'c': 1}
    """
    update_costs = {name: prod(shape) * min(shape, default=1) for name, shape in shapes.items()}
    owners = {}
    for name in sorted(update_costs, key=lambda name: -update_costs[name]):
        owners[name] = costs.index(min(costs))
        costs[owners[name]] += update_costs[name]
    return owners


def accumulate_in_float32(*parameters: torch.Tensor) -> None:
    """Makes `.grad` of parameters in half precision float32."""
    for parameter in parameters:
        if parameter.dtype in HALF:
            before, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32
            parameter.grad = None if before is None else before.float()
