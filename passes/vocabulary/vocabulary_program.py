"""A sharded output layer as the runtime takes it: the passes of every rank's shard, and what they exchange."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zbcompile.passes.graph.roles import Slot, TensorSpec
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_names import dtype_named

HIDDEN, GRADIENT = Slot("activation", "hidden"), Slot("input_gradient", "hidden")
STATISTICS, GATHERED = Slot("activation", "statistics"), Slot("tangent", "gathered")
COEFFICIENTS, TANGENT = Slot("saved", "coefficients"), Slot("tangent", "loss")
LOOKED_UP, OF_LOOKUP = Slot("activation", "lookup"), Slot("tangent", "lookup")

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class InputLayer:
    """An embedding by `weight` that is sharded as the output layer is. `activation` is the name of the looked up rows
    in the first stage, `rows` describes them."""

    weight: str
    activation: str
    rows: TensorSpec


@dataclass(frozen=True)
class Tiling:
    """S and T work on `words` words at a time; `keep` says whether the logits wait between them."""

    words: int
    keep: bool


@dataclass(frozen=True)
class VocabularyProgram:
    """How the output layer is sharded: `bounds[rank]` are the words of a rank, `pieces[rank]` its graphs.

    `hidden` is what the last stage broadcasts to all shards, `activation` its name in that stage; `lookup` is the input
    layer if that is sharded too. Without a backward `barriers` is 0, and STATS makes the outputs in place of
    the loss. `tiling.keep` says whether logits wait between S and T. `flops[rank]` is per pass
    and microbatch.
    """

    text: str
    weight: str
    bias: str | None
    bounds: Bounds
    barriers: int
    tiling: Tiling
    activation: str
    hidden: TensorSpec
    statistics: TensorSpec
    gradient: TensorSpec
    loss_dtype: str
    pieces: tuple[Mapping[str, Piece], ...]
    flops: tuple[Mapping[str, int], ...]
    lookup: InputLayer | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """What is sharded by rows, each once."""
        table = None if self.lookup is None else self.lookup.weight
        return tuple(name for name in dict.fromkeys((self.weight, self.bias, table)) if name is not None)

    @property
    def resident(self) -> tuple[str, ...]:
        """The parameters and buffers that every rank reads."""
        slots = [slot for pieces in self.pieces for piece in pieces.values() for slot in piece.inputs]
        return (*self.parameters, *dict.fromkeys(slot.name for slot in slots if slot.kind == "buffer"))

    def stages_of(self, rank: int) -> list[StageProgram]:
        """A rank's shard as a stage: S runs forward and sends statistics, STATS gets those of all shards, T follows.
        Behind it, with a lookup, that of the input layer, with LOOKUP and SPREAD. Both have the number -1."""
        one = self.statistics
        gathered = one._replace(shape=(len(self.bounds), *one.shape), stride=(math.prod(one.shape), *one.stride))
        found = [
            StageProgram(
                **self._common(rank, "S", "STATS", "T"),
                receives={HIDDEN.name: self.hidden},
                sends={STATISTICS.name: self.statistics},
                gradients_in={GATHERED.name: gathered},
                gradients_out={GRADIENT.name: self.gradient},
            )
        ]
        if self.lookup is not None:
            rows = {LOOKED_UP.name: self.lookup.rows}
            found.append(
                StageProgram(**self._common(rank, "LOOKUP", "SPREAD"), receives={}, sends=rows, gradients_in=rows)
            )
        return found

    def _common(self, rank: int, *passes: str) -> dict[str, Any]:
        """The fields of both stages."""
        pieces = {name: piece for name, piece in self.pieces[rank].items() if name in passes}
        fields = {"stage": -1, "original": -1, "pieces": pieces, "flops": self.flops[rank], "random": False}
        return {**fields, "parameters": self.parameters, "buffers": ()}

    def state_bytes(self, rank: int) -> int:
        """What a shard holds of a microbatch between S and T."""
        low, high = self.bounds[rank]
        tokens, width = self.hidden.shape
        item = dtype_named(self.hidden.dtype).itemsize
        return tokens * (width + (high - low) * self.tiling.keep) * item + 5 * tokens * 4


def even_bounds(size: int, shards: int) -> Bounds:
    """Words in equal parts of the size that `torch.chunk` takes; the last shards may be smaller or empty.

    >>> even_bounds(10, 4)
    ((0, 3), (3, 6), (6, 9), (9, 10))
    """
    part = math.ceil(size / shards)
    return tuple((min(i * part, size), min((i + 1) * part, size)) for i in range(shards))
