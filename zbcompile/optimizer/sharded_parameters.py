"""An optimizer that is divided among replicas: each holds, and updates, a part of every bucket (ZeRO 1 and 2)."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.mesh import Mesh
from zbcompile.errors import PipelineError
from zbcompile.model.placements import PARTIAL, REPLICATE, along
from zbcompile.optimizer.sharded_bucket import Bucket, Piece, by_blocks, by_matrices
from zbcompile.optimizer.wanted import ELEMENTS, MATRICES, Rule
from zbcompile.optimizer.whole_parameters import TrainedParameters, sum_in_single_precision
from zbcompile.passes.compile_options import HALF
from zbcompile.passes.graph.strides import is_dense
from zbcompile.program.program import Program
from zbcompile.runtime.data_parallel import LATE, Observe
from zbcompile.runtime.gradient_sums import Gradients


@dataclass(frozen=True)
class Kind:
    """What the parameters of a bucket have in common: the stage whose last W completes their gradients, the group of
    the optimizer, dtype, and the dimensions of the mesh along which they are summed and along which they are equal.
    What several ranks hold is `alone`: they must add in the same order, or they would drift apart."""

    stage: int
    number: int
    dtype: torch.dtype
    summed: tuple[str, ...]
    equal: tuple[str, ...]
    alone: str = ""


@dataclass(frozen=True)
class Part:
    """What a tensor of the optimizer has of a parameter: `size` elements from `begin` on, in the order of its memory.
    They are at `at` of the tensor; None if it has the parameter's own shape and strides. `writes` says whether this
    process speaks for them."""

    name: str
    parameter: nn.Parameter
    shown: nn.Parameter
    begin: int
    size: int
    at: int | None
    writes: bool


class ShardedParameters:
    """What an optimizer updates of the parameters that `numbers` gives a group: a part of each bucket, as `tensors`.

    `rule` says how they are divided, `keep` whether the memory of whole gradients is kept.
    """

    def __init__(self, trained: TrainedParameters, numbers: Mapping[str, int], rule: Rule, keep: bool) -> None:
        self.trained = trained
        self.everywhere = frozenset(trained.program.trained & numbers.keys())
        self.chosen = frozenset(numbers)
        self.summed = self.used = False  # whether the parts have gradients, and an update has used them
        self.loads: dict[tuple[str, ...], list[int]] = {}
        self.buckets = {kind: self._bucket(kind, names, rule, keep) for kind, names in self._kinds(numbers).items()}

    @property
    def names(self) -> Collection[str]:
        return frozenset(name for bucket in self.buckets.values() for name in bucket.parameters)

    def _kinds(self, numbers: Mapping[str, int]) -> dict[Kind, list[str]]:
        """The parameters of every bucket, in the same order on all ranks that hold them."""
        program, mesh = self.trained.program, self.trained.ranks.mesh
        (rank,) = self.trained.ranks.local
        stages = {name: s for s in program.stages_of(rank) for name in program.stages[s].trained}
        found: defaultdict[Kind, list[str]] = defaultdict(list)
        for name in sorted(self.everywhere & self.trained.own.keys()):
            placement, parameter = program.placement(name), self.trained.own[name]
            stage, alone = (LATE, name) if name in program.late else (stages[name], "")
            summed, equal = (_beside(mesh, along(placement, word)) for word in (PARTIAL, REPLICATE))
            found[Kind(stage, numbers[name], parameter.dtype, summed, equal, alone)].append(name)
        return {kind: found[kind] for kind in sorted(found, key=lambda kind: (kind.stage, kind.alone, str(kind)))}

    def _bucket(self, kind: Kind, names: Sequence[str], rule: Rule, keep: bool) -> Bucket:
        parameters = {name: self.trained.own[name] for name in names}
        for name, parameter in parameters.items():
            _require_dense(name, parameter)
            if kind.dtype in HALF:
                sum_in_single_precision(parameter, self.trained.shown[name])
        mesh = self.trained.ranks.mesh
        loads = self.loads.setdefault(kind.summed, [0] * mesh.size(*kind.summed))
        shapes = {name: p.shape for name, p in parameters.items()}
        division = by_blocks(shapes, len(loads), rule.block) if rule.block else by_matrices(shapes, loads)
        group = mesh.group(*kind.summed)
        index = dist.get_rank(group) if group is not None else 0
        return Bucket(parameters, division, group, index, rule, keep)

    def groups(self, numbers: Mapping[str, int], count: int) -> list[list[nn.Parameter]]:
        """The tensors of each group."""
        return [[t for kind, b in self.buckets.items() if kind.number == i for t in b.tensors] for i in range(count)]

    def parts(self) -> Iterator[tuple[nn.Parameter, tuple[Part, ...]]]:
        """The tensors that the optimizer updates, in the order of its groups, and what each of them has."""
        for kind, bucket in sorted(self.buckets.items(), key=lambda each: each[0].number):
            parts = tuple(self._part(kind, bucket, piece) for piece in bucket.own)
            if bucket.rule == ELEMENTS:
                yield bucket.tensors[0], parts
                continue
            for tensor, part in zip(bucket.tensors, parts, strict=True):
                yield tensor, (replace(part, at=None if bucket.rule == MATRICES else 0),)

    def _part(self, kind: Kind, bucket: Bucket, piece: Piece) -> Part:
        own, shown = self.trained.own[piece.name], self.trained.shown[piece.name]
        writes = self.trained.counts(piece.name, *kind.summed)
        return Part(piece.name, own, shown, piece.begin, piece.end - piece.begin, piece.at - bucket.begin, writes)

    def is_master(self, tensor: torch.Tensor) -> bool:
        """Whether this is a part of the masters of parameters in half precision."""
        return any(tensor is t for kind, b in self.buckets.items() if kind.dtype in HALF for t in b.tensors)

    # For a step of the pipeline

    def begin(self, program: Program) -> None:
        if program.trained & self.chosen != self.everywhere:
            name = min((program.trained & self.chosen) ^ self.everywhere)
            problem = "trains" if name in program.trained else "does not train"
            raise self.trained.ranks.refusal(
                f"this step {problem} {name}, other than the first one. An optimizer that is divided among replicas "
                "needs steps that train the same parameters; pass zero=0 to pipe.optimizer."
            )
        if self.used:
            raise self.trained.ranks.refusal(
                "this step would add to gradients that an update has used already. Call optimizer.zero_grad() after "
                "optimizer.step(): replicas hold parts of the gradients, which model.zero_grad() does not know."
            )
        self.arrive(LATE)
        for bucket in self.buckets.values():
            bucket.lend()

    def arrive(self, stage: int) -> None:
        for bucket in self._of(stage):
            with self.trained.ranks.watch.position.waiting("the updated parameters"):
                bucket.arrive()

    def scatter(self, stage: int, gradients: Gradients, observe: Observe) -> None:
        for bucket in self._of(stage):
            bucket.scatter(gradients, observe)

    def finish(self, stage: int | None = None) -> None:
        for bucket in self._of(stage):
            bucket.finish()
        self.summed = True

    def sums(self) -> Mapping[str, torch.Tensor]:
        return {name: part for bucket in self.buckets.values() for name, part in bucket.sums().items()}

    def _of(self, stage: int | None) -> Iterator[Bucket]:
        return (bucket for kind, bucket in self.buckets.items() if stage is None or kind.stage == stage)

    # For an update

    def tensors_of(self, stage: int) -> list[nn.Parameter]:
        """What the optimizer updates once a stage is complete."""
        return [tensor for bucket in self._of(stage) for tensor in bucket.tensors]

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients that an update uses, and those that are not summed."""
        parts = {f"{', '.join(each.name for each in own)} (a part)": tensor.grad for tensor, own in self.parts()}
        return parts | {name: self.trained.own[name].grad for name in self.names}

    def with_gradients(self) -> list[torch.Tensor]:
        """The tensors whose `.grad` an update uses, and the parameters, to which the next step lends memory."""
        own = [self.trained.own[name] for name in self.names]
        return [*own, *(tensor for bucket in self._of(None) for tensor in bucket.tensors)]

    def recall(self) -> None:
        """An update was undone: forget its parts, which are on their way."""
        for bucket in self._of(None):
            bucket.recall()

    def begin_update(self, stage: int | None = None) -> None:
        """Before an update, of all or a stage. Raises PipelineError for gradients that are not summed over replicas."""
        if stage is None:
            self.arrive_all()
        own = self.trained.own
        names = (name for bucket in self._of(stage) for name in bucket.parameters)
        left = min((name for name in names if own[name].grad is not None), default=None)
        if left is not None:
            raise PipelineError(
                f"the gradient of {left} is this replica's own: the last step was inside no_sync, or the gradient was "
                "made elsewhere. Run a step outside of no_sync before optimizer.step()."
            )
        for bucket in self._of(stage):
            bucket.refresh()

    def counted(self, stage: int | None = None) -> Iterator[torch.Tensor]:
        """The gradients, all or a stage's, that this process counts in the norm of all: those of its parts."""
        for kind, bucket in self.buckets.items():
            if stage in (None, kind.stage) and self.trained.counts(min(bucket.parameters), *kind.summed):
                yield from (tensor.grad for tensor in bucket.tensors if tensor.grad is not None)

    def clip(self, limit: float, norm: torch.Tensor) -> None:
        """Scale all gradients so that their norm, which is `norm`, stays below `limit`."""
        tensors = [tensor for bucket in self.buckets.values() for tensor in bucket.tensors]
        nn.utils.clip_grads_with_norm_(tensors, limit, norm)

    def end_update(self, stage: int | None = None) -> None:
        """After an update: the parts travel, those first that the next step needs first."""
        self.used = self.summed
        for bucket in self._of(stage):
            bucket.gather()

    def arrive_all(self) -> None:
        """Wait until all parameters have the values of the last update."""
        for stage in sorted({kind.stage for kind in self.buckets}):
            self.arrive(stage)

    def drop(self) -> None:
        """Forget all gradients."""
        self.summed = self.used = False
        for bucket in self.buckets.values():
            bucket.drop()
            for name in bucket.parameters:
                self.trained.shown[name].grad = None


def _beside(mesh: Mesh, dimensions: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in mesh.beside("pp") if name in dimensions)


def _require_dense(name: str, parameter: nn.Parameter) -> None:
    if not is_dense(parameter):
        raise PipelineError(
            f"the memory of {name} has gaps (shape {list(parameter.shape)}, strides {list(parameter.stride())}), so "
            "that replicas cannot divide it. Make it contiguous, or pass zero=0 to pipe.optimizer."
        )
