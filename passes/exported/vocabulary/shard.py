"""Shards the output layer of an exported step, and an embedding of its words, over all ranks.

The step is cut once; the passes of the shards depend on the number of ranks and of barriers:

    step = export_training_step(model, args, kwargs, target, loss_fn)
    sharded = cut_output_layer(step)  # NotShardableError has the user's line
    compiled = compile_graph(sharded.trunk, ranks_of=(0, 1, 2, 3))
    program = shard_passes(sharded, even_bounds(sharded.words, 4), barriers=1)

`step` stays as it is. What stages and shards exchange has its names in
`sharded.trunk.vocabulary_values`: F of the last stage returns `hidden` and its B receives
`hidden_gradient`; with a sharded embedding F of the first stage receives `lookup` and its B returns
`lookup_gradient`. The loss of a microbatch is the loss of STATS plus that of the trunk, if the
trunk has one: a router's loss that the model adds. Outputs that are None in the trunk are outputs
of STATS. A step of `export_forward` has no backward; its shards have no barriers (0), and `rows`
of `cut_output_layer` are the parameters that the training step has sharded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.exported.flops import node_flops
from zbcompile.passes.exported.torch_private import FakeTensorMode, LazyGraphModule, make_fx
from zbcompile.passes.exported.vocabulary.row_loss import Values
from zbcompile.passes.exported.vocabulary.shard_passes import (
    Shard,
    coefficients_of,
    combine,
    input_gradient,
    local_rows,
    logit_gradient,
    scan,
)
from zbcompile.passes.exported.vocabulary.shard_program import (
    COEFFICIENTS,
    GATHERED,
    GRADIENT,
    HIDDEN,
    LOOKED_UP,
    OF_LOOKUP,
    STATISTICS,
    TANGENT,
    Bounds,
    InputLayer,
    VocabularyProgram,
)
from zbcompile.passes.exported.vocabulary.trunk import Lookups, ShardedStep
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.stage.piece import Piece
from zbcompile.passes.stage.stage_program import tensor_spec

SlotValues = Mapping[Slot, Tensor]
Function = Callable[[SlotValues], dict[Slot, Tensor]]
PRODUCT = Slot("saved", "product")


def shard_passes(
    sharded: ShardedStep,
    bounds: Bounds,
    barriers: int,
    sum_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> VocabularyProgram:
    """Returns the passes of every rank's shard.

    Args:
        bounds: First and last word, plus one, of every rank; ranks may have none.
        barriers: 1 or 2 between F and B of the last stage; 0 for a forward alone.
        sum_dtype: The dtype in which gradients of a parameter are accumulated, by its dtype.
    """
    ranks = [_RankPasses(sharded, bounds, rank, barriers, sum_dtype) for rank in range(len(bounds))]
    pieces = [dict(rank.pieces()) for rank in ranks]
    values, lookup = sharded.trunk.vocabulary_values, None
    assert values is not None
    assert values.hidden is not None
    if sharded.lookups is not None and values.lookup is not None:
        rows = tensor_spec(values.lookup.meta["val"], needs_gradient=barriers > 0)
        lookup = InputLayer(sharded.lookups.weight, values.lookup.name, rows)
    first = ranks[0]
    step = sharded.whole
    result = step.loss if step.loss is not None else next(iter(step.outputs))
    return VocabularyProgram(
        text=str(sharded),
        weight=sharded.weight,
        bias=sharded.bias,
        bounds=bounds,
        barriers=barriers,
        activation=values.hidden.name,
        hidden=tensor_spec(first.hidden),
        statistics=tensor_spec(first.gathered[0]),
        gradient=tensor_spec(first.hidden.to(first.shard.wide)),
        loss_dtype=str(result.meta["val"].dtype).removeprefix("torch."),  # type: ignore[union-attr]
        pieces=tuple(pieces),
        flops=tuple({name: _flops(piece) for name, piece in each.items()} for each in pieces),
        lookup=lookup,
    )


class _RankPasses:
    """Traces the passes of one rank's shard."""

    def __init__(
        self,
        sharded: ShardedStep,
        bounds: Bounds,
        rank: int,
        barriers: int,
        sum_dtype: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        loss, step = sharded.loss, sharded.whole
        layer = loss.layers[0]
        dtype = layer.product.meta["val"].dtype
        self.loss, self.step, self.lookups, self.sum_dtype = loss, step, sharded.lookups, sum_dtype
        self.shard = Shard(rank, bounds, loss.form, dtype, barriers, loss.needs_total)
        self.weight = Slot("parameter", sharded.weight)
        self.bias = None if sharded.bias is None else Slot("parameter", sharded.bias)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.nodes = dict(_data_slots(sharded))
        with self.mode:
            hidden = layer.hidden.meta["val"]
            options = {"dtype": self.shard.wide, "device": hidden.device}
            self.hidden = torch.empty(
                (loss.rows, hidden.shape[1]), dtype=hidden.dtype, device=hidden.device
            )
            rows = 3 + loss.needs_total
            self.gathered = torch.empty((len(bounds), rows, loss.rows), **options)
            self.coefficients = torch.empty((5, loss.rows), **options)
            self.data = {slot: _like(node.meta["val"]) for slot, node in self.nodes.items()}
            own = (slot for slot in (self.weight, self.bias) if slot is not None)
            self.parameters = {slot: self._rows_of(slot.name) for slot in own}

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Yields the passes by name."""
        inputs = {HIDDEN: self.hidden, **self.parameters, **self.data}
        scanned = self._trace("S", inputs, self._scan)
        yield "S", scanned
        kept = {slot: value for slot, value in _results(scanned) if slot.kind == "saved"}
        product = {slot: value for slot, value in kept.items() if slot == PRODUCT}
        inputs = {GATHERED: self.gathered, **kept, **self.data}
        if self.shard.barriers:
            inputs[TANGENT] = _fake(self.step.tangent, self.mode)
        yield "STATS", self._trace("STATS", inputs, self._combine)
        if self.shard.barriers:
            sums = self._sums(slot.name for slot in self.parameters)
            inputs = {HIDDEN: self.hidden, COEFFICIENTS: self.coefficients, **product}
            inputs |= {**self.parameters, **self.data, **sums}
            yield "T", self._trace("T", inputs, self._update)
        if self.lookups is not None:
            yield from self._lookup_pieces(self.lookups)

    def _scan(self, values: SlotValues) -> dict[Slot, Tensor]:
        bias = None if self.bias is None else values[self.bias]
        labels = self._labels(values)
        found = scan(self.shard, values[HIDDEN], values[self.weight], bias, labels)
        saved = found._asdict()
        results = {STATISTICS: saved.pop(STATISTICS.name)}
        if not self.shard.barriers:
            return results
        return results | {
            Slot("saved", n): value for n, value in saved.items() if value is not None
        }

    def _combine(self, values: SlotValues) -> dict[Slot, Tensor]:
        statistics, shares = combine(self.shard, values[GATHERED])
        found = self.loss.evaluate(statistics, self._by_node(values))
        results = {Slot("output", str(index)): value for index, value in found.outputs.items()}
        if found.loss is not None:
            results[Slot("loss")] = found.loss
        if found.gradient is not None and self.shard.barriers:
            coefficients = coefficients_of(statistics, found.gradient)
            results[COEFFICIENTS] = coefficients
            if self.shard.barriers == 1:
                kept = {slot.name: value for slot, value in values.items() if slot.kind == "saved"}
                results[GRADIENT] = input_gradient(self.shard, coefficients, shares, kept)
        return results

    def _update(self, values: SlotValues) -> dict[Slot, Tensor]:
        """The second half of T adds to the gradients of the shard's rows in place."""
        hidden, weight = values[HIDDEN], values[self.weight]
        shard = self.shard
        if not shard.words:
            zeros = torch.zeros_like(hidden, dtype=shard.wide)
            return {GRADIENT: zeros} if shard.barriers == 2 else {}
        labels = self._labels(values)
        wide = logit_gradient(shard, values[PRODUCT], values[COEFFICIENTS], labels)
        gradient, total = wide.to(shard.dtype), values[_sum_of(self.weight)]
        if total.dtype == gradient.dtype:
            total.addmm_(gradient.t(), hidden)
        else:
            total.add_(gradient.t() @ hidden)
        if self.bias is not None:
            values[_sum_of(self.bias)].add_(wide.sum(0))
        return {GRADIENT: shard.times_weight(wide, weight)} if shard.barriers == 2 else {}

    def _lookup_pieces(self, lookups: Lookups) -> Iterator[tuple[str, Piece]]:
        table = Slot("parameter", lookups.weight)
        with self.mode:
            rows = self._rows_of(lookups.weight)
            gradient = torch.empty(
                (lookups.rows, rows.shape[1]),
                dtype=lookups.forward[0].meta["val"].dtype,
                device=rows.device,
            )
        function = partial(self._look_up, lookups, table)
        yield "LOOKUP", self._trace("LOOKUP", {table: rows, **self.data}, function)
        if self.shard.barriers:
            inputs = {OF_LOOKUP: gradient, **self.data, **self._sums([lookups.weight])}
            yield "SPREAD", self._trace("SPREAD", inputs, partial(self._spread, lookups, table))

    def _look_up(self, lookups: Lookups, table: Slot, values: SlotValues) -> dict[Slot, Tensor]:
        """The rows of this shard's words; rows of other shards are zeros."""
        rows, numbers = values[table], self._numbers(lookups.forward, values)
        if not self.shard.words:
            return {LOOKED_UP: rows.new_zeros((lookups.rows, rows.shape[1]))}
        inside, number = local_rows(numbers, self.shard.low, self.shard.words)
        return {LOOKED_UP: torch.where(inside, rows[number.squeeze(-1)], 0.0)}

    def _spread(self, lookups: Lookups, table: Slot, values: SlotValues) -> dict[Slot, Tensor]:
        """Adds the gradient of the rows to that of the table, except for padding."""
        if not self.shard.words:
            return {}
        numbers = self._numbers(lookups.backward, values)
        paddings = [
            torch.full((node.args[1].meta["val"].numel(),), node.args[3], device=numbers.device)  # type: ignore
            for node in lookups.backward
        ]
        inside, number = local_rows(numbers, self.shard.low, self.shard.words)
        inside = inside & (numbers != torch.cat(paddings))[:, None]
        total = values[_sum_of(table)]
        rows = torch.where(inside, values[OF_LOOKUP], 0.0).to(total.dtype)
        total.index_add_(0, number.squeeze(-1), rows)
        return {}

    def _numbers(self, lookups: Sequence[Node], values: SlotValues) -> Tensor:
        known = self._by_node(values)
        return torch.cat(
            [self.loss.evaluate_data(node.args[1], known).flatten() for node in lookups]
        )

    def _labels(self, values: SlotValues) -> Tensor:
        return self.loss.labels(self._by_node(values))

    def _by_node(self, values: SlotValues) -> Values:
        nodes = {node: values[slot] for slot, node in self.nodes.items() if slot in values}
        if TANGENT in values and self.step.tangent is not None:
            nodes[self.step.tangent] = values[TANGENT]
        return nodes

    def _rows_of(self, name: str) -> Tensor:
        whole = self.step.parameters[name].meta["val"]
        return torch.empty(
            (self.shard.words, *whole.shape[1:]), dtype=whole.dtype, device=whole.device
        )

    def _sums(self, names: "Iterator[str] | Sequence[str]") -> dict[Slot, Tensor]:
        """Returns the buffers that gradients are added to; a shard without words has none."""
        if not self.shard.words:
            return {}
        with self.mode:
            rows = {name: self._rows_of(name) for name in names}
            return {
                Slot("accumulator", name): value.to(self.sum_dtype(value.dtype))
                for name, value in rows.items()
            }

    def _trace(self, name: str, inputs: SlotValues, function: Function) -> Piece:
        outputs: list[Slot] = []

        def run(*values: Tensor) -> list[Tensor]:
            results = function(dict(zip(inputs, values, strict=True)))
            outputs[:] = results
            return list(results.values())

        with self.mode, torch.no_grad():
            module = make_fx(run)(*inputs.values())
        holders = module.graph.find_nodes(op="placeholder")
        for node, slot in zip(holders, inputs, strict=True):
            node.meta |= {"slot": slot, "pass": "vocabulary"}
        module.graph.eliminate_dead_code()
        kept = []
        for node in holders:
            if node.users:
                kept.append(node.meta["slot"])
            else:
                module.graph.erase_node(node)
        title = f"{name}{self.shard.rank}"
        graph = LazyGraphModule(module, module.graph, class_name=title)
        return Piece(name, graph, tuple(kept), tuple(outputs))


def _data_slots(sharded: ShardedStep) -> Iterator[tuple[Slot, Node]]:
    """Yields what a loss may read besides parameters."""
    step = sharded.whole
    for kind, table in (
        ("input", step.batch_inputs),
        ("buffer", step.buffers),
        ("constant", step.constants),
    ):
        for name, node in table.items():
            yield Slot(kind, name), node  # type: ignore[arg-type]


def _sum_of(parameter: Slot) -> Slot:
    return Slot("accumulator", parameter.name)


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _fake(node: Node | None, mode: FakeTensorMode) -> Tensor:
    assert node is not None
    with mode:
        return _like(node.meta["val"])


def _results(piece: Piece) -> Iterator[tuple[Slot, Tensor]]:
    nodes = piece.module.graph.output_node().args[0]
    for slot, node in zip(piece.outputs, nodes, strict=True):  # type: ignore[arg-type]
        yield slot, node.meta["val"]  # type: ignore[union-attr]


def _flops(piece: Piece) -> int:
    return sum(node_flops(node) for node in piece.module.graph.nodes if node.op == "call_function")
