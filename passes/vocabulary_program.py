"""The vocabulary passes of a shard as graphs: S, STATS (what ends the barrier) and T, with slots as any stage's."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from zbcompile.passes.accumulate import accumulate_in_place
from zbcompile.passes.canonical import Canonical
from zbcompile.passes.choices import Choices
from zbcompile.passes.costs import count_flops
from zbcompile.passes.pieces import Piece
from zbcompile.passes.slots import Slot, TensorSpec
from zbcompile.passes.stage_program import tensor_spec
from zbcompile.passes.torch_private import FakeTensorMode, make_fx
from zbcompile.passes.vocabulary_head import VocabularyHead
from zbcompile.passes.vocabulary_shard import Parameters, Shard, combine, scan, update

HIDDEN, GRADIENT = Slot("activation", "hidden"), Slot("input_gradient", "hidden")
STATISTICS, GATHERED = Slot("saved", "statistics"), Slot("saved", "gathered")
COEFFICIENTS, TANGENT = Slot("saved", "coefficients"), Slot("tangent", "loss")
ROWS = 4  # statistics per token that every shard sends

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class VocabularyProgram:
    """How the output layer is sharded: `bounds[rank]` are the words of a rank, `pieces[rank]` its graphs.

    `hidden` is what the last stage broadcasts to all shards, `activation` its name in that stage. `kept` says whether
    logits wait between S and T. `flops[rank]` is per pass and microbatch.
    """

    text: str
    weight: str
    bias: str | None
    bounds: Bounds
    barriers: int
    kept: bool
    activation: str
    hidden: TensorSpec
    statistics: TensorSpec
    gradient: TensorSpec
    loss_dtype: str
    pieces: tuple[Mapping[str, Piece], ...]
    flops: tuple[Mapping[str, int], ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def resident(self) -> tuple[str, ...]:
        """The parameters and buffers that every rank reads."""
        slots = [slot for pieces in self.pieces for piece in pieces.values() for slot in piece.inputs]
        return (*self.parameters, *dict.fromkeys(slot.name for slot in slots if slot.kind == "buffer"))

    def state_bytes(self, rank: int) -> int:
        """What a shard holds of a microbatch between S and T."""
        low, high = self.bounds[rank]
        tokens, width = self.hidden.shape
        item = getattr(torch, self.hidden.dtype).itemsize
        return tokens * (width + (high - low) * self.kept) * item + 5 * tokens * 4


def even_bounds(size: int, shards: int) -> Bounds:
    """Words in equal parts of the size that `torch.chunk` takes; the last shards may be smaller or empty.

    >>> even_bounds(10, 4)
    ((0, 3), (3, 6), (6, 9), (9, 10))
    """
    part = math.ceil(size / shards)
    return tuple((min(i * part, size), min((i + 1) * part, size)) for i in range(shards))


def make_vocabulary(
    canonical: Canonical,
    head: VocabularyHead,
    activation: str,
    bounds: Bounds,
    barriers: int,
    tile: int | None,
    choices: Choices,
) -> VocabularyProgram:
    """The program of every shard. `tile` is how many words S and T work on at a time, keeping no logits; None: all."""
    shards = [
        Shard(head, rank, bounds, barriers, tile is None, tile or max(1, head.size)) for rank in range(len(bounds))
    ]
    made = [_Tracer(canonical, shard).pieces() for shard in shards]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    hidden = _tokens(head, mode)
    statistics = torch.empty(ROWS, hidden.shape[0], dtype=shards[0].statistics_dtype, device=hidden.device)
    return VocabularyProgram(
        text=str(head),
        weight=head.weight,
        bias=head.bias,
        bounds=bounds,
        barriers=barriers,
        kept=tile is None,
        activation=activation,
        hidden=tensor_spec(hidden),
        statistics=tensor_spec(statistics),
        gradient=tensor_spec(hidden.to(statistics.dtype)),
        loss_dtype=str(head.loss.output.meta["val"].dtype).removeprefix("torch."),
        pieces=tuple({**each, "T": _accumulating(each["T"], choices)} for each in made),
        flops=tuple(
            {name: sum(count_flops(piece.module, mode).values()) for name, piece in each.items()} for each in made
        ),
    )


def _tokens(head: VocabularyHead, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor like what the output layer's input becomes: [tokens, width]."""
    value = head.hidden.meta["val"]
    with mode:
        return head.tokens(torch.empty(value.shape, dtype=value.dtype, device=value.device))


def _accumulating(piece: Piece, choices: Choices) -> Piece:
    buffers = {slot.name: _buffer(value, choices) for slot, value in _results(piece) if slot.kind == "gradient"}
    return accumulate_in_place(piece, buffers)


def _buffer(gradient: torch.Tensor, choices: Choices) -> torch.Tensor:
    """A fake tensor of the buffer that a gradient is added into."""
    with gradient.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(gradient.shape, dtype=choices.dtype_of_sum(gradient.dtype), device=gradient.device)


class _Tracer:
    """Traces the passes of one shard on fake tensors."""

    def __init__(self, canonical: Canonical, shard: Shard) -> None:
        self.shard, self.head = shard, shard.head
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        holders = {node.meta["slot"]: node.meta["val"] for node in canonical.graph.find_nodes(op="placeholder")}
        with self.mode:
            self.data = {slot: self._like(holders[slot]) for slot in self.head.loss.data}
            self.parameters = {
                Slot("parameter", name): self._rows(holders[Slot("parameter", name)])
                for name in (self.head.weight, self.head.bias)
                if name is not None
            }
            self.hidden = _tokens(self.head, self.mode)
            device = self.hidden.device
            tokens, kind = self.hidden.shape[0], shard.statistics_dtype
            self.gathered = torch.empty(len(shard.bounds), ROWS, tokens, dtype=kind, device=device)
            self.coefficients = torch.empty(5, tokens, dtype=kind, device=device)
            self.tangent = torch.empty((), dtype=self.head.loss.output.meta["val"].dtype, device=device)

    @staticmethod
    def _like(value: Any) -> Any:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def _rows(self, whole: torch.Tensor) -> torch.Tensor:
        shape = (self.shard.size, *whole.shape[1:])
        return torch.empty(shape, dtype=whole.dtype, device=whole.device)

    def pieces(self) -> dict[str, Piece]:
        scanned = self._trace("S", {HIDDEN: self.hidden} | self.parameters | self.data, self._scan)
        kept = {slot: node_value for slot, node_value in _results(scanned) if slot != STATISTICS}
        raw = {slot: value for slot, value in kept.items() if slot.name == "raw"}
        parts = {slot: value for slot, value in kept.items() if slot.name != "raw"}
        combined = {GATHERED: self.gathered, TANGENT: self.tangent} | parts | self.data
        updated = {HIDDEN: self.hidden, COEFFICIENTS: self.coefficients} | raw | self.parameters | self.data
        stats = self._trace("STATS", combined, self._combine)
        return {"S": scanned, "STATS": stats, "T": self._trace("T", updated, self._update)}

    def _own(self, values: Mapping[Slot, Any]) -> Parameters:
        bias = None if self.head.bias is None else values[Slot("parameter", self.head.bias)]
        return Parameters(values[Slot("parameter", self.head.weight)], bias)

    def _scan(self, values: Mapping[Slot, Any]) -> dict[Slot, Any]:
        found = scan(self.shard, values[HIDDEN], self._own(values), values)
        return {Slot("saved", name): value for name, value in found._asdict().items()}

    def _combine(self, values: Mapping[Slot, Any]) -> dict[Slot, Any]:
        kept = {slot.name: value for slot, value in values.items() if slot.kind == "saved"}
        found = combine(self.shard, values[GATHERED], values[TANGENT], kept, values)
        return {Slot("loss"): found.loss, COEFFICIENTS: found.coefficients, GRADIENT: found.part}

    def _update(self, values: Mapping[Slot, Any]) -> dict[Slot, Any]:
        raw = values.get(Slot("saved", "raw"))
        found = update(self.shard, values[HIDDEN], self._own(values), values[COEFFICIENTS], raw, values)
        bias = {} if self.head.bias is None else {Slot("gradient", self.head.bias): found.bias}
        return {Slot("gradient", self.head.weight): found.weight, **bias, GRADIENT: found.part}

    def _trace(
        self, name: str, given: Mapping[Slot, Any], function: Callable[[Mapping[Slot, Any]], dict[Slot, Any]]
    ) -> Piece:
        slots, outputs = list(given), list[Slot]()

        def run(*flat: Any) -> list[Any]:
            results = function(dict(zip(slots, flat, strict=True)))
            outputs[:] = [slot for slot, value in results.items() if value is not None]
            return [results[slot] for slot in outputs]

        with self.mode, torch.no_grad():
            module = make_fx(run)(*given.values())
        return _piece(f"{name}{self.shard.rank}", name, module, slots, outputs)


def _piece(title: str, name: str, module: GraphModule, slots: Sequence[Slot], outputs: Sequence[Slot]) -> Piece:
    """Name the placeholders, and drop those that nothing reads."""
    used = []
    for node, slot in zip(module.graph.find_nodes(op="placeholder"), slots, strict=True):
        node.meta |= {"slot": slot, "pass": "vocabulary"}
        if node.users:
            used.append(slot)
    module.graph.eliminate_dead_code()
    for node in module.graph.find_nodes(op="placeholder"):
        if not node.users:
            module.graph.erase_node(node)
    kept = tuple(node.meta["slot"] for node in module.graph.find_nodes(op="placeholder"))
    return Piece(name, GraphModule(module, module.graph, class_name=title), kept, tuple(outputs))


def _results(piece: Piece) -> list[tuple[Slot, Any]]:
    (values,) = piece.module.graph.output_node().args
    nodes: Any = values
    return [(slot, node.meta["val"]) for slot, node in zip(piece.outputs, nodes, strict=True)]
