"""Shards the output layer of an exported step, and an embedding of its words, over all ranks.

The step is cut once; the passes of the shards depend on the number of ranks and of barriers:

    step = export_training_step(model, args, kwargs, target, loss_fn)
    sharded = cut_output_layer(step)  # NotShardableError has the user's line
    compiled = compile_graph(sharded.trunk, ranks_of=(0, 1, 2, 3))
    program = shard_passes(sharded, even_bounds(sharded.words, 4), barriers=1)

`step` does not change. What stages and shards exchange has its names in
`sharded.trunk.vocabulary_values`: F of the last stage returns `hidden` and its B receives
`hidden_gradient`; with a sharded embedding F of the first stage receives `lookup` and its B returns
`lookup_gradient`. The loss of a microbatch is the loss of STATS plus that of the trunk, if the
trunk has one: a router's loss that the model adds. Outputs that are None in the trunk are outputs
of STATS. A step of `export_forward` has no backward; its shards have no barriers (0), and `rows`
of `cut_output_layer` are the parameters that the training step has sharded.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.graph.fx import operator_name
from zbcompile.passes.graph.roles import Role, Slot
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.stage_program import tensor_spec
from zbcompile.passes.torch_private import FakeTensorMode, LazyGraphModule, make_fx
from zbcompile.passes.vocabulary.output_layer import shape_of
from zbcompile.passes.vocabulary.row_loss import Evaluation, Statistics
from zbcompile.passes.vocabulary.shard_passes import (
    Shard,
    coefficients_of,
    combine,
    input_gradient,
    local_rows,
    logit_gradient,
    scan,
)
from zbcompile.passes.vocabulary.shard_program import (
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
from zbcompile.passes.vocabulary.trunk import ShardedStep

SlotValues = Mapping[Slot, Tensor]
Results = dict[Slot, Tensor]
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
    pieces, fakes, lookup = tuple(rank.pieces() for rank in ranks), ranks[0].fakes, None
    if sharded.lookups is not None:
        rows = tensor_spec(fakes[OF_LOOKUP], needs_gradient=barriers > 0)
        lookup = InputLayer(sharded.lookups.weight, rows)
    return VocabularyProgram(
        weight=sharded.weight,
        bias=sharded.bias,
        bounds=bounds,
        barriers=barriers,
        hidden=tensor_spec(fakes[HIDDEN]),
        statistics=tensor_spec(fakes[GATHERED][0]),
        gradient=tensor_spec(fakes[HIDDEN].to(fakes[GATHERED].dtype)),
        pieces=pieces,
        flops=tuple({name: x.flops for name, x in passes.items()} for passes in pieces),
        lookup=lookup,
    )


class _RankPasses:
    """Traces the passes of one rank's shard.

    Attributes:
        fakes: A fake tensor for every value that a pass may read.
        nodes: The placeholders of the step among them, but for parameters.
    """

    def __init__(
        self,
        sharded: ShardedStep,
        bounds: Bounds,
        rank: int,
        barriers: int,
        sum_dtype: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        self.loss, self.lookups, step = sharded.loss, sharded.lookups, sharded.whole
        layer, rows = self.loss.layers[0], self.loss.rows
        dtype, hidden = (node.meta["val"].dtype for node in (layer.product, layer.hidden))
        self.shard = shard = Shard(
            rank, bounds, self.loss.form, dtype, barriers, self.loss.has_total
        )
        names = (sharded.weight, sharded.bias or "")
        self.weight, self.bias = (Slot("parameter", name) for name in names)
        tables: dict[Role, dict[str, Node]] = {
            "batch": step.batch_inputs,
            "buffer": step.buffers,
            "constant": step.constants,
        }
        self.nodes: dict[Slot, Node] = {
            Slot(kind, name): node for kind, table in tables.items() for name, node in table.items()
        }
        if step.tangent is not None:
            self.nodes[TANGENT] = step.tangent
        device = layer.hidden.meta["val"].device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:

            def fake(*shape: int, dtype: torch.dtype = shard.wide) -> Tensor:
                return torch.empty(shape, dtype=dtype, device=device)

            self.fakes = {
                HIDDEN: fake(rows, shape_of(layer.hidden)[1], dtype=hidden),
                GATHERED: fake(len(bounds), 3 + shard.has_total, rows),
                COEFFICIENTS: fake(3, rows),
            }
            for slot, node in self.nodes.items():
                self.fakes[slot] = torch.empty_like(
                    node.meta["val"], device=node.meta["val"].device
                )
            for name in sharded.parameters:
                whole = step.parameters[name].meta["val"]
                local = fake(shard.words, *whole.shape[1:], dtype=whole.dtype)
                self.fakes[Slot("parameter", name)] = local
                self.fakes[Slot("accumulator", name)] = torch.empty_like(
                    local, dtype=sum_dtype(local.dtype)
                )
            if self.lookups is not None:
                table_rows = self.lookups.forward[0].meta["val"]
                self.fakes[OF_LOOKUP] = fake(
                    self.lookups.rows, table_rows.shape[-1], dtype=table_rows.dtype
                )

    def pieces(self) -> dict[str, PassGraph]:
        """Returns the graphs of S, T and of what runs between them, by name."""
        pieces = {"S": self._trace("S", self._scan)}
        saved: Any = pieces["S"].module.graph.output_node().args[0]
        for slot, node in zip(pieces["S"].outputs, saved, strict=True):
            self.fakes[slot] = node.meta["val"]
        pieces["STATS"] = self._trace("STATS", self._combine)
        if self.shard.barriers:
            pieces["T"] = self._trace("T", self._update)
        if self.lookups is not None:
            pieces["LOOKUP"] = self._trace("LOOKUP", self._look_up)
            if self.shard.barriers:
                pieces["SPREAD"] = self._trace("SPREAD", self._spread)
        return pieces

    def _scan(self, values: SlotValues) -> Results:
        labels, bias = self._at(values).labels(), values.get(self.bias)
        scanned = scan(self.shard, values[HIDDEN], values[self.weight], bias, labels)
        statistics = {STATISTICS: scanned.pop(STATISTICS.name)}
        saved = {Slot("saved", name): value for name, value in scanned.items()}
        return statistics | saved if self.shard.barriers else statistics

    def _combine(self, values: SlotValues) -> Results:
        statistics, share = combine(self.shard, values[GATHERED])
        evaluation = self._at(values, statistics)
        outputs = evaluation.outputs()
        results = {Slot("output", str(index)): value for index, value in outputs.items()}
        if not self.shard.barriers:
            return results
        results[Slot("loss", "loss")], derivatives = evaluation.derivatives()
        results[COEFFICIENTS] = coefficients = coefficients_of(statistics, derivatives, share)
        if self.shard.barriers == 1:
            saved = {slot.name: value for slot, value in values.items() if slot.role == "saved"}
            results[GRADIENT] = input_gradient(self.shard, coefficients, saved)
        return results

    def _update(self, values: SlotValues) -> Results:
        """The second half of T adds to the gradients of the shard's rows in place."""
        hidden, shard = values[HIDDEN], self.shard
        if not shard.words:
            zeros = torch.zeros_like(hidden, dtype=shard.wide)
            return {GRADIENT: zeros} if shard.barriers == 2 else {}
        labels = self._at(values).labels()
        wide = logit_gradient(shard, values[PRODUCT], values[COEFFICIENTS], labels)
        gradient, total = wide.to(shard.dtype).t(), values[_sum_of(self.weight)]
        if total.dtype == gradient.dtype:
            total.addmm_(gradient, hidden)
        else:
            total.add_(gradient @ hidden)
        if self.bias in values:
            values[_sum_of(self.bias)].add_(wide.sum(0))
        weight = values[self.weight]
        return {GRADIENT: shard.times_weight(wide, weight)} if shard.barriers == 2 else {}

    def _look_up(self, values: SlotValues) -> Results:
        """The rows of this shard's words; rows of other shards are zeros."""
        assert self.lookups is not None
        table = values[Slot("parameter", self.lookups.weight)]
        if not self.shard.words:
            return {LOOKED_UP: table.new_zeros((self.lookups.rows, table.shape[1]))}
        inside, number = self._local(self.lookups.forward, values)
        return {LOOKED_UP: torch.where(inside, table[number.squeeze(-1)], 0.0)}

    def _spread(self, values: SlotValues) -> Results:
        """Adds the gradient of the rows to that of the table, except for padding."""
        assert self.lookups is not None
        if self.shard.words:
            inside, number = self._local(self.lookups.backward, values)
            total = values[Slot("accumulator", self.lookups.weight)]
            rows = torch.where(inside, values[OF_LOOKUP], 0.0).to(total.dtype)
            total.index_add_(0, number.squeeze(-1), rows)
        return {}

    def _local(self, lookups: Sequence[Node], values: SlotValues) -> tuple[Tensor, Tensor]:
        """Returns which looked up rows are of this shard, and their numbers. The padding of a
        backward is of no shard."""
        evaluation, numbers = self._at(values), []
        for node in lookups:
            rows = evaluation.value(node.args[1]).flatten()
            padding: Any = node.args[3] if operator_name(node) != "embedding" else -1
            numbers.append(torch.where(rows == padding, -1, rows))
        return local_rows(torch.cat(numbers), self.shard.low, self.shard.words)

    def _at(self, values: SlotValues, statistics: Statistics | None = None) -> Evaluation:
        nodes = {node: values[slot] for slot, node in self.nodes.items()}
        return Evaluation(self.loss, nodes, statistics)

    def _trace(self, name: str, function: Callable[[SlotValues], Results]) -> PassGraph:
        outputs: list[Slot] = []

        def run(*values: Tensor) -> list[Tensor]:
            results = function(dict(zip(self.fakes, values, strict=True)))
            outputs[:] = results
            return list(results.values())

        with self.mode, torch.no_grad():
            module = make_fx(run)(*self.fakes.values())
        inputs = dict(zip(module.graph.find_nodes(op="placeholder"), self.fakes, strict=True))
        module.graph.eliminate_dead_code()
        for node in list(inputs):
            node.meta["pass"] = "vocabulary"
            if not node.users:
                module.graph.erase_node(node)
                del inputs[node]
        graph = LazyGraphModule(module, module.graph, class_name=f"{name}{self.shard.rank}")
        return PassGraph(self.shard.rank, name, graph, tuple(inputs.values()), tuple(outputs))


def _sum_of(parameter: Slot) -> Slot:
    return Slot("accumulator", parameter.name)
