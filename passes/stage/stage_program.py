"""The compiled form of one stage: its graphs, what they keep and send, and what they cost.

The finished pieces take and make what those of `zbcompile.passes.split.split` do, but W and BW: they add each gradient
into a buffer that they take (an accumulator), and return it only with `exact=True`.

    stage   piece  takes                                              makes
    first   F      input, parameter, buffer                           activation, saved, mutation
            B      parameter, saved, tangent                          saved
            W      input, saved, accumulator                          -
            BW     input, parameter, saved, tangent, accumulator      -
    middle  F      activation, parameter                              activation, saved
            B      activation, parameter, saved, tangent              input_gradient, saved
            W      saved, accumulator                                 -
            BW     activation, parameter, saved, tangent, accumulator input_gradient
    last    F      activation, parameter, input                       loss, saved
            B      parameter, input, saved, tangent                   input_gradient, saved
            W      saved, accumulator                                 -
            BW     parameter, input, saved, tangent, accumulator      input_gradient

What travels between ranks: the activations that F takes (`receives`) and makes (`sends`), the tangents that B or BW
takes (`gradients_in`, the gradients of what was sent) and the input gradients that it makes (`gradients_out`). What is
saved stays on the rank, from F to B and W or from B to W.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.fx.traceback import preserve_node_meta

from zbcompile.passes.capture.opaque_calls import is_call
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.fx import like, output_values
from zbcompile.passes.graph.kernel_layouts import kernels_layouts
from zbcompile.passes.graph.process_groups import exchanged_bytes, group_of, is_under_way, rename_groups, with_groups
from zbcompile.passes.graph.roles import Slot, TensorSpec
from zbcompile.passes.graph.strides import boundary_like
from zbcompile.passes.machine.flops import count_flops
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.split.backward_locations import MarkingInterpreter
from zbcompile.passes.split.in_place import replace_writes_into_fresh
from zbcompile.passes.split.joint_graph import Recomputation
from zbcompile.passes.split.saved_bytes import Crossing
from zbcompile.passes.split.split import Improvement, Split
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.accumulate import accumulate_in_place, own_gradients
from zbcompile.passes.stage.overlap import hide_exchanges
from zbcompile.passes.torch_private import FakeTensorMode, LazyGraphModule, make_fx


@dataclass(frozen=True)
class StageProgram:
    """One compiled stage. `pieces` has F, B, W and BW, or F alone if the stage only runs forward.

    Boundary tensors are listed in the order in which they travel: `receives` and
    `sends` are the activations that arrive and leave in F; `gradients_in` and `gradients_out` the gradients that arrive
    and leave in B, by the name of their activation. `flops` is per pass and microbatch, a multiply-add counts as two.
    `original` is the stage that was compiled: another one where its graphs are used, renamed. `recomputed` says what B
    recomputes, None if nothing; `improvements` what the split did beyond the dependency closure; `deferred` along which
    dimensions of the mesh the gradient of a parameter is still to be summed.
    """

    stage: int
    original: int
    pieces: Mapping[str, Piece]
    receives: Mapping[str, TensorSpec]
    sends: Mapping[str, TensorSpec]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    random: bool
    flops: Mapping[str, int]
    gradients_in: Mapping[str, TensorSpec] = field(default_factory=dict)
    gradients_out: Mapping[str, TensorSpec] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    crossing: Crossing = field(default_factory=lambda: Crossing(0, 0, 0, 0, 0))
    improvements: tuple[Improvement, ...] = ()
    recomputed: Recomputation | None = None
    deferred: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parts: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[str, ...]:
        """The buffers that forward changes."""
        return tuple(slot.name for slot in self.pieces["F"].outputs if slot.kind == "mutation")

    @property
    def receive_bytes(self) -> int:
        """Bytes of activations that arrive per microbatch."""
        return sum(spec.bytes for spec in self.receives.values())

    @property
    def send_bytes(self) -> int:
        """Bytes of activations that leave per microbatch."""
        return sum(spec.bytes for spec in self.sends.values())

    def message_bytes(self, event: str) -> int:
        """Bytes of what F sends to the next stage, or B to the one before."""
        leaving = self.sends if event == "F" else self.gradients_out
        return sum(spec.bytes for spec in leaving.values())


def finish_stage(split: Split, choices: Choices) -> StageProgram:
    """Choose how gradients accumulate (see `zbcompile.passes.stage.accumulate`) and describe the stage."""
    stage = split.joint.stage
    split_pieces = (split.forward, split.backward, split.weight, split.fused)
    raw = {piece.name: hide_exchanges(piece) for piece in split_pieces}
    accumulate = own_gradients if choices.exact else partial(accumulate_in_place, buffers=_buffers(split, choices))
    pieces = {name: accumulate(piece) if name in ("W", "BW") else piece for name, piece in raw.items()}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    gradients = dict(split.joint.gradient_of_input)
    tangents = {slot.name: node for slot, node in split.joint.inputs if slot.kind == "tangent"}
    return StageProgram(
        stage=stage.index,
        original=stage.index,
        pieces=pieces,
        receives=_received(stage, gradients),
        sends=_sent(stage, tangents, choices.exact),
        gradients_in=_travelling({n: node.meta["val"] for n, node in tangents.items() if n != "loss"}),
        gradients_out=_travelling(gradients),
        parameters=stage.named("parameter"),
        buffers=stage.named("buffer"),
        trained=tuple(dict.fromkeys(slot.name for slot, _ in split.joint.outputs if slot.kind == "gradient")),
        random=stage.random,
        crossing=split.crossing,
        improvements=split.improvements,
        flops=_flops(raw, mode),
        recomputed=split.joint.recomputed,
        deferred={name: (dimension,) for name, dimension in split.joint.deferred.items()},
    )


def _flops(raw: Mapping[str, Piece], mode: FakeTensorMode) -> dict[str, int]:
    """The FLOPs of every piece. BW is the union of B and W: what both compute counts once."""
    counts = {name: {n.name: c for n, c in count_flops(raw[name].module, mode).items()} for name in "FBW"}
    return {name: sum(each.values()) for name, each in (counts | {"BW": counts["B"] | counts["W"]}).items()}


def _buffers(split: Split, choices: Choices) -> dict[str, torch.Tensor]:
    """A fake tensor of the gradient buffer of each parameter."""
    parameters = {s.name: n.meta["val"] for s, n in split.joint.inputs if s.kind == "parameter"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        return {name: like(value, dtype=choices.dtype_of_sum(value.dtype)) for name, value in parameters.items()}


def bind_groups(program: StageProgram, names: Mapping[str, str]) -> StageProgram:
    """`program` with this process's names of the groups in its graphs (`zbcompile.passes.graph.process_groups`)."""
    if not names:
        return program
    pieces = {key: replace(piece, module=with_groups(piece.module, names)) for key, piece in program.pieces.items()}
    return replace(program, pieces=pieces)


def forward_programs(stages: Sequence[Stage]) -> tuple[StageProgram, ...]:
    """Stages that run forward alone: nothing is kept, and no gradient travels. Random numbers are drawn from
    the generator as it is."""
    received = [_received(stage, {}) for stage in stages]
    sent = [_sent_as_received(stage, received) for stage in stages[:-1]]
    sent.append(_sent(stages[-1], {}, exact=False))  # the last one serves the shards of an output layer
    return tuple(_forward_program(*each) for each in zip(stages, received, sent, strict=True))


def _forward_program(stage: Stage, receives: Mapping[str, TensorSpec], sends: Mapping[str, TensorSpec]) -> StageProgram:
    counts = count_flops(stage.module, FakeTensorMode(allow_non_fake_inputs=True))
    return StageProgram(
        stage=stage.index,
        original=stage.index,
        pieces={"F": Piece("F", stage.module, stage.inputs, stage.outputs)},
        receives=receives,
        sends=sends,
        parameters=stage.named("parameter"),
        buffers=stage.named("buffer"),
        random=False,
        flops={"F": sum(counts.values()), "B": 0, "W": 0, "BW": 0},
    )


def _received(stage: Stage, gradients: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    nodes = [n for n in stage.module.graph.find_nodes(op="placeholder") if n.meta["slot"].kind == "activation"]
    names = [n.meta["slot"].name for n in nodes]
    return {name: tensor_spec(n.meta["val"], name in gradients) for n, name in zip(nodes, names, strict=True)}


def _sent_as_received(stage: Stage, received: Sequence[Mapping[str, TensorSpec]]) -> dict[str, TensorSpec]:
    names = [slot.name for slot in stage.outputs if slot.kind == "activation"]
    return {name: received[stage.index + 1][name] for name in names}


def _travelling(values: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: tensor_spec(value) for name, value in values.items()}


def _sent(stage: Stage, tangents: Mapping[str, object], exact: bool) -> dict[str, TensorSpec]:
    pairs: list[tuple[Slot, torch.fx.Node]] = list(zip(stage.outputs, output_values(stage.module.graph), strict=True))
    return {
        slot.name: tensor_spec(boundary_like(node.meta["val"], exact), slot.name in tangents)
        for slot, node in pairs
        if slot.kind == "activation"
    }


def tensor_spec(value: torch.Tensor, needs_gradient: bool = False) -> TensorSpec:
    """Shape, strides, dtype and device of a (fake) tensor."""
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorSpec(tuple(value.shape), tuple(value.stride()), dtype, str(value.device), needs_gradient)


@dataclass(frozen=True)
class Collective:
    """An exchange in pass `name` ("F", "B", "W" or "BW"): which `kind`, along which `dimension` of the mesh, with how
    many `bytes` (see `exchanged_bytes`), by which `operation` of the graph. It `hides` unless the operation itself
    waits. A prediction adds its `seconds`, and what runs `behind` it."""

    name: str
    kind: str
    dimension: str
    bytes: int
    operation: str
    hides: bool = True
    seconds: float = 0.0
    behind: str = ""


def collectives_of(program: StageProgram) -> list[Collective]:
    """The collectives of a stage, pass by pass, in the order in which they are issued."""
    found = []
    for name, node in ((name, node) for name, piece in program.pieces.items() for node in piece.module.graph.nodes):
        if (group := group_of(node)) is not None:
            kind = node.target.overloadpacket.__name__
            found.append(Collective(name, kind, group, exchanged_bytes(node), node.name, is_under_way(node)))
    return found


def without_calls(stage: Stage, dimensions: Mapping[str, str]) -> Stage:
    """`stage` without operators that are calls of modules with DTensors: their local operations, and collectives that
    name their groups as `dimensions` does. A graph without such calls stays as it is."""
    graph = stage.module.graph
    if not any(is_call(node) for node in graph.nodes):
        return stage
    mode, holders = FakeTensorMode(allow_non_fake_inputs=True), graph.find_nodes(op="placeholder")
    interpreter = MarkingInterpreter(stage.module)
    with mode:
        values = [like(node.meta["val"]) for node in holders]
    with mode, torch.no_grad(), kernels_layouts(), preserve_node_meta():
        module = make_fx(lambda *flat: interpreter.run(*flat))(*values)
    replace_writes_into_fresh(module)
    rename_groups(module, dimensions)
    for node, holder in zip(module.graph.find_nodes(op="placeholder"), holders, strict=True):
        node.meta |= holder.meta
    return replace(stage, module=LazyGraphModule(module, module.graph, class_name=f"Stage{stage.index}"))
