"""The program of a sharded output layer: the passes of every rank's shard, with slots like those of
stages. S computes statistics of the shard's logits, STATS combines those of all shards and ends the
barrier, T computes gradients; EMBED and EMBED_GRAD are the passes of a sharded embedding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zbcompile.passes.graph.roles import Slot, TensorSpec
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_names import dtype_named

HIDDEN, GRADIENT = Slot("activation", "hidden"), Slot("gradient", "hidden")
STATISTICS, GATHERED = Slot("activation", "statistics"), Slot("gradient", "gathered")
COEFFICIENTS = Slot("saved", "coefficients")
LOOKED_UP, OF_LOOKUP = Slot("activation", "lookup"), Slot("gradient", "lookup")

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class VocabularyProgram:
    """The passes of a sharded output layer.

    Attributes:
        parameters: What is sharded by rows, each name once; first the output layer's weight.
        bounds: First and last word, plus one, of every rank; `pieces` has the passes of every rank
            and `flops` their FLOPs for one microbatch.
        barriers: Between F and B of the last stage. 0: a forward alone, STATS makes the outputs.
        hidden: The form of what the last stage sends to all shards.
        lookup: The form of the rows that are looked up, if the embedding is sharded too.
    """

    parameters: tuple[str, ...]
    bounds: Bounds
    barriers: int
    hidden: TensorSpec
    statistics: TensorSpec
    gradient: TensorSpec
    pieces: tuple[Mapping[str, PassGraph], ...]
    flops: tuple[Mapping[str, int], ...]
    lookup: TensorSpec | None

    @property
    def resident(self) -> tuple[str, ...]:
        """Returns the parameters and buffers that every rank reads."""
        passes = [piece for pieces in self.pieces for piece in pieces.values()]
        slots = dict.fromkeys(slot for piece in passes for slot in piece.inputs)
        return tuple(slot.name for slot in slots if slot.role in ("parameter", "buffer"))

    def stages_of(self, rank: int) -> list[StageProgram]:
        """Returns a rank's shard as a stage with S, STATS and T, and with a sharded embedding one
        with EMBED and EMBED_GRAD. Both have the number -1."""
        one, ranks = self.statistics, len(self.bounds)
        gathered = one._replace(
            shape=(ranks, *one.shape), stride=(math.prod(one.shape), *one.stride)
        )
        stages = [
            StageProgram(
                **self._common(rank, "S", "STATS", "T"),
                receives={HIDDEN.name: self.hidden},
                sends={STATISTICS.name: self.statistics},
                gradients_in={GATHERED.name: gathered},
                gradients_out={GRADIENT.name: self.gradient},
            )
        ]
        if self.lookup is not None:
            rows = {LOOKED_UP.name: self.lookup}
            stages.append(
                StageProgram(
                    **self._common(rank, "EMBED", "EMBED_GRAD"),
                    receives={},
                    sends=rows,
                    gradients_in=rows,
                )
            )
        return stages

    def _common(self, rank: int, *passes: str) -> dict[str, Any]:
        """Returns the fields of both stages."""
        return {
            "stage": -1,
            "original": -1,
            "pieces": {name: x for name, x in self.pieces[rank].items() if name in passes},
            "flops": self.flops[rank],
            "random": False,
            "parameters": self.parameters,
            "buffers": (),
        }

    def state_bytes(self, rank: int) -> int:
        """Returns the bytes that a shard keeps of a microbatch between S and T."""
        low, high = self.bounds[rank]
        tokens, width = self.hidden.shape
        item = dtype_named(self.hidden.dtype).itemsize
        return tokens * (width + (high - low) * (self.barriers > 0)) * item + 5 * tokens * 4


def even_bounds(size: int, shards: int) -> Bounds:
    """Returns equal parts of the size that `torch.chunk` takes; the last may be smaller or empty.

    >>> even_bounds(10, 4)
    ((0, 3), (3, 6), (6, 9), (9, 10))
    """
    part = math.ceil(size / shards)
    return tuple((min(i * part, size), min((i + 1) * part, size)) for i in range(shards))
