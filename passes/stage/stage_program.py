"""The compiled form of one stage: its graphs, what they keep and send, and what they cost.

The usual roles (`zbcompile.passes.graph.roles`) of what a pass takes and returns:

    stage   pass  takes                                          returns
    first   F     batch, parameter, buffer                       activation, saved, buffer_update
            B     gradient, parameter, saved, accumulator        saved
            W     saved, batch, accumulator                      -
    middle  F     activation, parameter, buffer                  activation, saved, buffer_update
            B     gradient, parameter, saved, accumulator        gradient, saved
            W     saved, accumulator                             -
    last    F     activation, parameter, buffer, batch           loss, saved, buffer_update
            B     tangent, parameter, saved, batch, accumulator  gradient, saved
            W     saved, accumulator                             -

BW takes and returns what B and W do, but for what B saves for W. B, W and BW add the gradient of a
weight into a buffer that they take (an accumulator); with `exact=True` they return it
(weight_gradient).

What travels between ranks: the activations that F takes (`receives`) and returns (`sends`), and the
gradients of these that B or BW takes (`gradients_in`) and returns (`gradients_out`). What is saved
stays on the rank, from F to B and W or from B to W.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from zbcompile.passes.graph.process_groups import (
    exchanged_bytes,
    group_of,
    is_async_collective,
    is_collective,
    with_process_groups,
)
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.stage.pass_graph import PassGraph


@dataclass(frozen=True)
class Crossing:
    """The bytes that wait between the passes of a stage, by storage; parameters and inputs not at
    all.

    `kept` is everything alive between F and B, of which B reads `forward_to_backward`, and
    `residue` everything alive between B and W.
    """

    forward_to_backward: int = 0
    kept: int = 0
    residue: int = 0


@dataclass(frozen=True)
class Recomputation:
    """The recomputation of a stage for one microbatch: the number of operations, their
    FLOPs, and the bytes kept between F and B without and with it."""

    operations: int
    flops: int
    kept_before: int
    kept_after: int


@dataclass(frozen=True)
class StageProgram:
    """One compiled stage. `pieces` has F, B, W and BW, or F alone if the stage only runs forward.

    Boundary tensors are listed in the order in which they travel: `receives` and `sends` are the
    activations that arrive and leave in F; `gradients_in` and `gradients_out` the gradients that
    arrive and leave in B, all by the names of their nodes in the step graph. `flops` is per pass
    and microbatch, a multiply-add counts as two. `original` is the first stage with equal graphs,
    whose costs count for all of them. `recomputed` says what B recomputes, None if nothing;
    `deferred` along which dimensions of the mesh the gradient of a parameter is still to be summed.
    """

    stage: int
    original: int
    pieces: Mapping[str, PassGraph]
    receives: Mapping[str, TensorSpec]
    sends: Mapping[str, TensorSpec]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    random: bool
    flops: Mapping[str, int]
    gradients_in: Mapping[str, TensorSpec] = field(default_factory=dict)
    gradients_out: Mapping[str, TensorSpec] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    crossing: Crossing = Crossing()
    recomputed: Recomputation | None = None
    deferred: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parts: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[str, ...]:
        """The buffers that forward changes."""
        return tuple(slot.name for slot in self.pieces["F"].outputs if slot.role == "buffer_update")

    def message_bytes(self, event: str) -> int:
        """Bytes of what F sends to the next stage, or B to the one before."""
        leaving = self.sends if event == "F" else self.gradients_out
        return sum(spec.bytes for spec in leaving.values())


def bind_groups(program: StageProgram, names: Mapping[str, str]) -> StageProgram:
    """`program` with this process's names of the groups in its graphs
    (`zbcompile.passes.graph.process_groups`)."""
    if not names:
        return program
    pieces = {
        key: replace(piece, module=with_process_groups(piece.module, names))
        for key, piece in program.pieces.items()
    }
    return replace(program, pieces=pieces)


def tensor_spec(value: torch.Tensor, needs_gradient: bool = False) -> TensorSpec:
    """Shape, strides, dtype and device of a (fake) tensor."""
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorSpec(
        tuple(value.shape), tuple(value.stride()), dtype, str(value.device), needs_gradient
    )


@dataclass(frozen=True)
class Collective:
    """An exchange in pass `name` ("F", "B", "W" or "BW"): which `kind`, along which `dimension` of
    the mesh, with how many `bytes` (see `exchanged_bytes`). It `hides` unless the operation itself
    waits."""

    name: str
    kind: str
    dimension: str
    bytes: int
    hides: bool


def collectives_of(program: StageProgram) -> list[Collective]:
    """The collectives of a stage, pass by pass, in the order in which they are issued."""
    return [
        Collective(
            name,
            node.target.overloadpacket.__name__,  # type: ignore[union-attr]
            group_of(node),
            exchanged_bytes(node),
            is_async_collective(node),
        )
        for name, piece in program.pieces.items()
        for node in filter(is_collective, piece.module.graph.nodes)
    ]
