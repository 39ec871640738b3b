"""What ranks must have in common in one step: replicas take as many microbatches and compile together, and the ranks of
a pipeline train on the same batch, or they would compute a wrong gradient in silence."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zbcompile.batches.batch import Microbatches
from zbcompile.distributed.agreement import Digests, gathered, unlike
from zbcompile.distributed.equal_tensors import checksum
from zbcompile.distributed.mesh import BATCHES
from zbcompile.distributed.ranks import Ranks
from zbcompile.torch_private import pytree

Passed = tuple[int, Sequence[str], str, str]  # microbatches, their shapes, the keyword, what has changed in Python
EVERY = 100  # steps from one comparison of the batches to the next
SEED = "Seed what is random in the data set and the collator alike on all ranks of a pipeline."


class StepAgreement:
    """One reduction per step, of digests, begun before its first action and read when a rank needs to know.

    Batches are compared in the first step and in each `EVERY`th from then on. An input that differs is
    named once: a rank may pass anything for what its stages do not read.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._steps = 0
        self._named: set[str] = set()
        self._passed: Passed | None = None
        self._batch: Mapping[str, Any] = {}
        self._digests: Digests | None = None

    def begin(
        self,
        step: Microbatches,
        runs: bool,
        passed: Passed | None = None,
        compiles: bool = False,
        apart: Sequence[str] = BATCHES,
    ) -> None:
        """Begin to compare a step that `runs` now, and what replicas have `passed`: shapes, and what has changed in
        Python, only if this rank may have to compile. Along `apart` ranks may have batches of other shapes: along other
        dimensions they exchange tensors within a microbatch."""
        self._passed = passed
        self._batch = self._sums(step) if runs else {}
        self._steps += runs
        if not passed and not self._batch:
            self._digests = None
            return
        alike = (passed if compiles or passed is None else passed[::2]), ()
        batch = self._batch, self._ranks.mesh.beside("pp")
        shapes = None if passed is None or apart == BATCHES else passed[1], apart
        self._digests = Digests(self._ranks, alike, batch, shapes)

    def _sums(self, step: Microbatches) -> dict[str, Any]:
        """The checksums of the batch, if they are due."""
        due = self._steps % EVERY == 0
        if not due or self._ranks.count == 1 or self._ranks.group is None:
            return {}
        paths = sorted({path for part in step.tensors for path in part} - self._named)
        return {path: _checksums([part.get(path) for part in step.tensors]) for path in paths}

    def differs(self) -> bool:
        """Whether replicas are not about to take the same step."""
        return self._digests is not None and (self._digests.differ[0] or self._digests.differ[2])

    def require(self) -> None:
        """Raise PipelineError, on every rank, if they are not."""
        if not self.differs() or self._passed is None:
            return
        ranks, leader = self._ranks, self._ranks.members[0]
        found = gathered(ranks, self._passed)
        for rank, other in zip(ranks.members, found, strict=True):
            if other[:3] != found[0][:3]:
                first, here = (f"{count} microbatches of {of[0]}, {to}" for count, of, to, _ in (found[0], other))
                raise ranks.refusal(
                    f"rank {leader} passes {first}, rank {rank} {here}. Replicas take as many microbatches in every "
                    "step, and compile together: pass batches of one size, and equal keywords."
                )
            if other != found[0]:
                first, here = (each[3] or "nothing has changed" for each in (found[0], other))
                raise ranks.refusal(
                    f"what forward reads in Python differs between ranks: on rank {leader} {first}, on rank {rank} "
                    f"{here}. Change it on every rank."
                )
        raise ranks.refusal(
            "some ranks have to compile for this step and others have not, although they pass equal shapes. Change "
            "what a capture depends on (train, eval, requires_grad, autocast) on every rank alike."
        )

    def finish(self) -> None:
        """The step is over: warn, on the first rank, if another one of the pipeline got another batch."""
        if self._digests is None or not self._batch or not self._digests.differ[1]:
            return
        found = _what_differs(self._ranks, self._batch)
        self._named |= found.keys()
        if found and self._ranks.rank == 0:
            says = "Each stage reads its own rank's, so the loss belongs to no batch"
            warnings.warn(f"{next(iter(found.values()))}. {says}. {SEED}", RuntimeWarning, stacklevel=5)


def require_same_batch(ranks: Ranks, inputs: Mapping[str, Any]) -> None:
    """Raise PipelineError, on every rank, if another rank of this pipeline got another batch.

    For callers that refuse such a batch before anything depends on it: the comparison of a step is read at its end, and
    only warns, as a rank may pass anything for what its stages do not read. Evaluations have none.
    """
    if ranks.group is None:
        return
    own = {name: _checksums(pytree.tree_leaves(inputs[name])) for name in sorted(inputs)}
    with ranks.watch.region("comparing batches"):
        if any(Digests(ranks, (own, ranks.mesh.beside("pp"))).differ):
            for text in _what_differs(ranks, own).values():
                raise ranks.refusal(f"{text}, and every rank must get the same batch. {SEED}")


def _what_differs(ranks: Ranks, sums: Mapping[str, Any]) -> dict[str, str]:
    """What differs between the first rank and another one, in words, by its name; on all ranks in one order."""
    with ranks.watch.position.waiting("the batch of the others"):
        found = ranks.gather_here(sums)
    names = sorted({name for each in found for name in each})
    reports = [{name: each.get(name) for name in names} for each in found]
    differs: dict[str, str] = {}
    for name, first, rank, _, _ in unlike(range(len(found)), reports):
        differs.setdefault(name, f"{name} of this batch differs between rank {first} and rank {rank} of the pipeline")
    return dict(sorted(differs.items()))


def _checksums(leaves: Sequence[Any]) -> list[Any]:
    return [_of_tensor(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Its form and the checksum of its bytes, 0 for a tensor without plain bytes."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return str(tensor.dtype), tuple(tensor.shape), checksum(tensor) if plain else 0
