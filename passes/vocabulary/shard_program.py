"""The vocabulary passes of a shard as graphs, with slots as any stage's: S, STATS (what ends the barrier), T, and where
the input layer is sharded too LOOKUP and SPREAD."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.fx import drop_unused_inputs, like, output_values
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.machine.flops import count_flops
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.accumulate import accumulate_in_place
from zbcompile.passes.stage.stage_program import tensor_spec
from zbcompile.passes.torch_private import FakeTensorMode, LazyGraphModule, make_fx
from zbcompile.passes.vocabulary.embedding import VocabularyLookup, look_up, spread
from zbcompile.passes.vocabulary.further_terms import gradient_rows, terms_in
from zbcompile.passes.vocabulary.output_layer import VocabularyHead
from zbcompile.passes.vocabulary.s_pass import scan
from zbcompile.passes.vocabulary.shard import Parameters, Shard
from zbcompile.passes.vocabulary.t_pass import combine, gather_statistics, update
from zbcompile.passes.vocabulary.vocabulary_program import (
    COEFFICIENTS,
    GATHERED,
    GRADIENT,
    HIDDEN,
    LOOKED_UP,
    OF_LOOKUP,
    STATISTICS,
    TANGENT,
    Bounds as Bounds,
    InputLayer as InputLayer,
    Tiling as Tiling,
    VocabularyProgram as VocabularyProgram,
    even_bounds as even_bounds,
)

RAW = "raw"  # the name of the kept tiles
MAXIMUM = Slot("saved", "maximum")


def levelled_bounds(size: int, loads: Sequence[float]) -> Bounds:
    """Bounds that minimise the load of the fullest shard if shard i bears other work worth `loads[i]` words.

    >>> levelled_bounds(10, [0, 4, 0, 20])
    ((0, 5), (5, 5), (5, 10), (10, 10))
    """
    level = 0.0
    for count in range(1, len(loads) + 1):  # the emptiest `count` shards share the words
        level = (size + sum(sorted(loads)[:count])) / count
        if count < len(loads) and level <= sorted(loads)[count]:
            break
    wanted = [max(0.0, level - load) for load in loads]
    ends = [round(sum(wanted[: i + 1])) for i in range(len(loads))]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def make_vocabulary(
    canonical: Canonical,
    head: VocabularyHead,
    activation: str,
    bounds: Bounds,
    barriers: int,
    tiling: Tiling,
    lookup: VocabularyLookup | None,
    choices: Choices,
) -> VocabularyProgram:
    """The program of every shard."""
    shards = [Shard(head, rank, bounds, barriers, tiling.keep, tiling.words) for rank in range(len(bounds))]
    made = [_Tracer(canonical, shard, lookup).pieces() for shard in shards]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    hidden = _tokens(head, mode)
    statistics = torch.empty(head.loss.rows, head.loss.tokens, dtype=shards[0].statistics_dtype, device=hidden.device)
    embedding = None
    if lookup is not None:
        rows = tensor_spec(lookup.node.meta["val"], needs_gradient=True)
        embedding = InputLayer(lookup.weight, lookup.node.name, rows)
    return VocabularyProgram(
        text=str(head),
        weight=head.weight,
        bias=head.bias,
        bounds=bounds,
        barriers=barriers,
        tiling=tiling,
        activation=activation,
        hidden=tensor_spec(hidden),
        statistics=tensor_spec(statistics),
        gradient=tensor_spec(hidden.to(statistics.dtype)),
        loss_dtype=str(head.loss.like.dtype).removeprefix("torch."),
        pieces=tuple({name: _accumulating(piece, choices) for name, piece in each.items()} for each in made),
        flops=tuple({name: sum(count_flops(piece.module, mode).values()) for name, piece in p.items()} for p in made),
        lookup=embedding,
    )


def _tokens(head: VocabularyHead, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor like what the output layer's input becomes: [tokens, width]."""
    with mode:
        values = [node.meta["val"] for node in head.reads]
        return head.tokens(*(torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in values))


def _accumulating(piece: Piece, choices: Choices) -> Piece:
    """The piece with each gradient added into its buffer, of which `accumulate_in_place` takes a fake tensor."""
    gradients = {slot.name: value for slot, value in _results(piece) if slot.kind == "gradient"}
    buffers = {name: g.new_empty(g.shape, dtype=choices.dtype_of_sum(g.dtype)) for name, g in gradients.items()}
    return accumulate_in_place(piece, buffers) if buffers else piece


class _Tracer:
    def __init__(self, canonical: Canonical, shard: Shard, lookup: VocabularyLookup | None) -> None:
        self.shard, self.head, self.lookup = shard, shard.head, lookup
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.holders = {node.meta["slot"]: node.meta["val"] for node in canonical.graph.find_nodes(op="placeholder")}
        with self.mode:
            self.data = self._likes(self.head.loss.data)
            own = [Slot("parameter", name) for name in (self.head.weight, self.head.bias) if name is not None]
            self.parameters = {slot: self._rows(slot) for slot in own}
            self.hidden = _tokens(self.head, self.mode)
            device = self.hidden.device
            tokens, kind = self.head.loss.tokens, shard.statistics_dtype
            self.gathered = torch.empty(len(shard.bounds), self.head.loss.rows, tokens, dtype=kind, device=device)
            self.coefficients = torch.empty(5, tokens + len(self.head.terms), dtype=kind, device=device)
            self.tangent = torch.empty((), dtype=self.head.loss.like.dtype, device=device)

    def _likes(self, slots: Sequence[Slot]) -> dict[Slot, torch.Tensor]:
        return {slot: like(self.holders[slot]) for slot in slots}

    def _rows(self, slot: Slot) -> torch.Tensor:
        whole = self.holders[slot]
        return torch.empty((self.shard.size, *whole.shape[1:]), dtype=whole.dtype, device=whole.device)

    def pieces(self) -> dict[str, Piece]:
        scanned = self._trace("S", {HIDDEN: self.hidden} | self.parameters | self.data, self._scan)
        kept = {slot: node_value for slot, node_value in _results(scanned) if slot != STATISTICS}
        raw = {slot: value for slot, value in kept.items() if slot.name.startswith(RAW) or slot == MAXIMUM}
        parts = {slot: value for slot, value in kept.items() if slot not in raw}
        if not self.shard.barriers:
            read = self._trace("STATS", {GATHERED: self.gathered, HIDDEN: self.hidden} | self.data, self._read)
            return {"S": scanned, "STATS": read} | (self._input_pieces(self.lookup) if self.lookup else {})
        combined = {GATHERED: self.gathered, TANGENT: self.tangent, HIDDEN: self.hidden} | parts | self.data
        updated = {HIDDEN: self.hidden, COEFFICIENTS: self.coefficients} | raw | self.parameters | self.data
        stats = self._trace("STATS", combined, self._combine)
        found = {"S": scanned, "STATS": stats, "T": self._trace("T", updated, self._update)}
        return found if self.lookup is None else found | self._input_pieces(self.lookup)

    def _input_pieces(self, lookup: VocabularyLookup) -> dict[str, Piece]:
        table, value = Slot("parameter", lookup.weight), lookup.node.meta["val"]
        with self.mode:
            rows, data = self._rows(table), self._likes(lookup.data)
            gradient = like(value)

        def look(values: Mapping[Slot, Any]) -> dict[Slot, Any]:
            return {LOOKED_UP: look_up(self.shard, lookup, values[table], values)}

        def scatter(values: Mapping[Slot, Any]) -> dict[Slot, Any]:
            return {Slot("gradient", lookup.weight): spread(self.shard, lookup, values[OF_LOOKUP], values)}

        found = {"LOOKUP": self._trace("LOOKUP", {table: rows} | data, look)}
        if not self.shard.barriers:
            return found
        return found | {"SPREAD": self._trace("SPREAD", {OF_LOOKUP: gradient} | data, scatter)}

    def _own(self, values: Mapping[Slot, Any]) -> Parameters:
        bias = None if self.head.bias is None else values[Slot("parameter", self.head.bias)]
        return Parameters(values[Slot("parameter", self.head.weight)], bias)

    def _scan(self, values: Mapping[Slot, Any]) -> dict[Slot, Any]:
        found = scan(self.shard, self._tokens(values), self._own(values), values)
        tiles = {Slot("saved", f"{RAW}{i}"): tile for i, tile in enumerate(found.raw)}
        others = {name: value for name, value in found._asdict().items() if name not in (RAW, STATISTICS.name)}
        return {STATISTICS: found.statistics} | tiles | {Slot("saved", name): value for name, value in others.items()}

    def _read(self, values: Mapping[Slot, Any]) -> dict[Slot, Any]:
        statistics, _ = gather_statistics(self.shard, values[GATHERED], values)
        return self.head.loss(statistics, values, self._terms(values))

    def _combine(self, values: Mapping[Slot, Any]) -> dict[Slot, Any]:
        kept = {slot.name: value for slot, value in values.items() if slot.kind == "saved"}
        found = combine(self.shard, values[GATHERED], values[TANGENT], kept, values, self._terms(values))
        coefficients = found.coefficients
        if self.head.terms:
            coefficients = torch.cat([coefficients, found.terms.expand(5, -1)], 1)
        part = self._with_terms(found.part, found.terms)
        return {Slot("loss"): found.loss, COEFFICIENTS: coefficients, GRADIENT: part}

    def _update(self, values: Mapping[Slot, Any]) -> dict[Slot, Any]:
        raw = [value for slot, value in values.items() if slot.name.startswith(RAW)]
        kept = raw, values.get(MAXIMUM)
        coefficients, tokens = values[COEFFICIENTS], self.head.loss.tokens
        of_terms = coefficients[0, tokens:] if self.head.terms else coefficients
        coefficients = coefficients[:, :tokens] if self.head.terms else coefficients
        found = update(self.shard, self._tokens(values), self._own(values), coefficients, kept, values)
        part = self._with_terms(found.part, of_terms)
        bias = {} if self.head.bias is None else {Slot("gradient", self.head.bias): found.bias}
        return {Slot("gradient", self.head.weight): found.weight, **bias, GRADIENT: part}

    def _tokens(self, values: Mapping[Slot, Any]) -> torch.Tensor:
        hidden = values[HIDDEN]
        return hidden[: self.head.loss.tokens] if self.head.terms else hidden

    def _terms(self, values: Mapping[Slot, Any]) -> list[torch.Tensor]:
        return terms_in(values[HIDDEN][self.head.loss.tokens :], self.head.terms) if self.head.terms else []

    def _with_terms(self, part: torch.Tensor | None, gradients: torch.Tensor) -> torch.Tensor | None:
        """A shard's part of the input gradient with those of the terms behind it: the parts are summed over the shards,
        so only the first one has them."""
        if part is None or not self.head.terms:
            return part
        rows = gradient_rows(gradients, self.head.terms, self.hidden.dtype, self.head.width).to(part.dtype)
        return torch.cat([part, rows if self.shard.rank == 0 else torch.zeros_like(rows)])

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
    for node, slot in zip(module.graph.find_nodes(op="placeholder"), slots, strict=True):
        node.meta |= {"slot": slot, "pass": "vocabulary"}
    module.graph.eliminate_dead_code()
    drop_unused_inputs(module.graph)
    kept = tuple(node.meta["slot"] for node in module.graph.find_nodes(op="placeholder"))
    return Piece(name, LazyGraphModule(module, module.graph, class_name=title), kept, tuple(outputs))


def _results(piece: Piece) -> list[tuple[Slot, Any]]:
    results = zip(piece.outputs, output_values(piece.module.graph), strict=True)
    return [(slot, node.meta["val"]) for slot, node in results]
