"""Compares in the first step what must be equal on several ranks: losses, gradients, buffers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.distributed.agreement import unlike
from zbcompile.distributed.equal_tensors import if_meant, places_apart
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.executable import Executable
from zbcompile.model.placements import PARTIAL, REPLICATE, SHARD, along
from zbcompile.passes.graph.roles import BUFFER, Slot

NORM = 1  # the place of a norm in projections
FEW = 8  # elements: so few may be equal by chance
# What sums in another order differ by at most, by bytes of an element
TOLERANCE = {1: 0.2, 2: 0.05, 4: 1e-3, 8: 1e-6}


@dataclass
class FirstStepCheck:
    """Compares each trained parameter's gradient, and each buffer that forward writes, in the first
    step that has it.

    Attributes:
        compared: The names that earlier steps have compared.
        names: Those that the present step compares, equal on all ranks (programs are not: replicas
            may have other shapes).
        parts: Projections of what this rank adds to the sums of gradients.
    """

    ranks: Ranks
    compared: set[str] = field(default_factory=set)
    names: frozenset[str] = frozenset()
    parts: dict[str, list[float]] = field(default_factory=dict)

    def begin(self, executable: Executable) -> None:
        """Chooses what the step compares."""
        stages = [stage for bound in executable.distinct for stage in bound.program.stages]
        written = {name for stage in stages for name in stage.changed}
        self.names = (executable.program.trained | written) - self.compared
        self.parts.clear()

    def note(self, name: str, part: Tensor) -> None:
        """Records what this rank adds to the sum of a gradient."""
        if name in self.names:
            self.parts[name] = projections(part)

    def compare(
        self, executable: Executable, parameters: Mapping[str, nn.Parameter], losses: Tensor
    ) -> None:
        """Raises PipelineError on every rank if a gradient or a buffer of which all should have
        computed the whole differs by more than rounding, or if what ranks contribute to a sum is
        equal bit by bit: each has the whole sum already.

        Ranks with equal losses may well train on equal batches.
        """
        program, ranks, mesh = executable.program, self.ranks, self.ranks.mesh
        _require_equal_losses(ranks, losses)
        results = dict(self.parts)
        for name in sorted(program.trained & self.names):
            if name not in results and ranks.rank in program.holders(name):
                gradient = parameters[name].grad
                results[name] = projections(torch.zeros(1) if gradient is None else gradient)
        for name, buffer in written_buffers(executable).items():
            if name in self.names:
                results[name] = projections(buffer)

        def place(*dimensions: str) -> tuple[int, ...]:
            return tuple(mesh.index(dimension) for dimension in mesh.beside(*dimensions))

        whole = {
            (name, place(*along(program.placement(name), REPLICATE))): value
            for name, value in results.items()
        }
        # Replicas have batches of their own, which may be equal.
        summed = {
            (name, dimension, place(dimension)): part
            for name, part in self.parts.items()
            if parameters[name].numel() >= FEW
            for dimension in along(program.placement(name), PARTIAL)
            if dimension in mesh.beside("pp", "dp")
        }
        first = ranks.replicas.rank * program.schedule.microbatches
        local = losses[first : first + program.schedule.microbatches, mesh.index("tp")].tolist()
        reports = ranks.gather((whole, summed, local))
        _require_parts(ranks, [(parts, tuple(theirs)) for _, parts, theirs in reports])
        for (name, _), source, rank, *_ in unlike(ranks.members, [r for r, *_ in reports], _near):
            raise ranks.refusal(_differs(ranks, name, source, rank, name in program.trained))
        self.compared |= self.names
        self.names = frozenset()


def written_buffers(executable: Executable) -> dict[str, Tensor]:
    """Returns the buffers that forwards write on this rank, by name."""
    buffers = {
        name: stage.resident[Slot(BUFFER, name)]
        for graphs in executable.distinct
        for stage in graphs.stages.values()
        for name in stage.program.changed
    }
    return dict(sorted(buffers.items()))


def _require_equal_losses(ranks: Ranks, losses: Tensor) -> None:
    """Raise PipelineError on every rank unless the ranks along "tp", the columns, computed the same
    losses."""
    values = losses.double()
    bound = TOLERANCE[losses.element_size()] * values.abs().amax(dim=1, keepdim=True)
    far = ((values - values[:, :1]).abs() > bound).nonzero()
    if len(far):
        microbatch, column = far[0].tolist()
        raise ranks.refusal(
            f'the loss of microbatch {microbatch} is {values[microbatch, 0]:g} on rank 0 along "tp"'
            f" and {values[microbatch, column]:g} on rank {column}; these ranks train on one batch"
            ' and must compute one loss. Pass the same batch along "tp"; if every rank has a part'
            " of the loss, add the parts up in the model."
        )


def _require_parts(
    ranks: Ranks, reports: Sequence[tuple[Mapping[Any, list[float]], Sequence[float]]]
) -> None:
    entries: dict[Any, list[tuple[list[float], Sequence[float]]]] = {}
    for report, theirs in reports:
        for key, value in report.items():
            entries.setdefault(key, []).append((value, theirs))
    for (name, dimension, _), pairs in entries.items():
        (value, _), batches = pairs[0], {theirs for _, theirs in pairs}
        is_equal = 0 < value[NORM] < torch.inf and all(part == value for part, _ in pairs)
        if is_equal and (dimension == "tp" or len(batches) > 1):
            raise ranks.refusal(
                f'the gradient of {name} is equal on all {len(pairs)} ranks along "{dimension}",'
                " although each has a part of the data: it is a whole sum already, and would be"
                " summed once more. If every rank computes all of it, say so:"
                f' placements={{"{name}": {{"{dimension}": "replicate"}}}}.'
            )


def _differs(ranks: Ranks, name: str, first: int, second: int, trained: bool) -> str:
    pair = f"{name} differs between ranks {first} and {second}{places_apart(ranks, first, second)}"
    if not trained:
        meant = if_meant(ranks, name, first, second, SHARD)
        remedy = "Let all of them write the same: sum it over the ranks first."
        return f"what forward writes into buffer {pair}. {remedy}{meant}"
    meant = if_meant(ranks, name, first, second, PARTIAL)
    return (
        f"the gradient of {pair}, although each should compute the whole of it.{meant} (each"
        " computes a part, to be summed once per step)."
    )


def projections(tensor: Tensor) -> list[float]:
    """Returns the tolerance for a tensor, its norm, and sums of its elements under fixed random
    signs. Two tensors whose distance is a fraction of their norm differ by about as much in one of
    these numbers."""
    flat = tensor.detach().reshape(-1).double()
    generator = torch.Generator(flat.device).manual_seed(0)
    signs = (torch.rand(flat.numel(), generator=generator, device=flat.device) < 0.5) * 2.0 - 1
    sums = [float((flat * signs.roll(shift)).sum()) for shift in (0, 1, 7, 31)]
    return [TOLERANCE[tensor.element_size()], float(flat.norm()), *sums]


def _near(values: list[float], expected: list[float]) -> bool:
    tolerance, norm, *_ = expected
    return all(
        a == b or abs(a - b) <= tolerance * norm or a != a
        for a, b in zip(values, expected, strict=True)
    )
