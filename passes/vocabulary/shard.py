"""The passes of vocabulary shards: the output layer of an exported step, and an embedding of its
words, over all ranks.

The step is cut once; the passes of the shards depend on the number of ranks and of barriers:

    step = export_training_step(model, args, kwargs, target, loss_fn)
    sharded = cut_output_layer(step)  # NotShardableError has the user's line
    compiled = compile_graph(sharded.trunk, ranks_of=(0, 1, 2, 3))
    program = shard_passes(sharded, even_bounds(sharded.loss.words, 4), barriers=1)

`step` does not change. What stages and shards exchange has its names in
`sharded.trunk.vocabulary_values`: F of the last stage returns `hidden` and its B receives
`hidden_gradient`; with a sharded embedding F of the first stage receives `lookup` and its B returns
`lookup_gradient`. The loss of a microbatch is the loss of STATS plus that of the trunk, if the
trunk has one: a router's loss that the model adds. Outputs that are None in the trunk are outputs
of STATS. A step of `export_forward` has no backward; its shards have no barriers (0), and `rows`
of `cut_output_layer` are the parameters that the training step has sharded.

S computes the logits of the shard's words and their statistics. STATS combines the statistics of
all shards into the loss and its gradient by row. T computes the gradients of the shard's rows of
the weight. The input gradient is summed over shards behind STATS (one barrier) or T (two), as in
algorithms 2 and 1 of arXiv:2411.05288. The softmax of all words is that of the shard's words times
one number per row, the shard's share.

With one barrier S multiplies softmax and weight before it knows the shares. It leaves the label's
word out, and STATS adds (P_t - 1) W_t with P_t - 1 = expm1(log P_t): for a confident token the two
products differ by all the digits of bfloat16.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.gpu import is_gpu
from zbcompile.passes.graph.fx import like, operator_name
from zbcompile.passes.graph.roles import ACCUMULATOR, LOSS, OUTPUT, PARAMETER, SAVED, Slot
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.stage_program import tensor_spec
from zbcompile.passes.torch_private import FakeTensorMode, LazyGraphModule, make_fx
from zbcompile.passes.vocabulary.row_loss import Evaluation, Statistics
from zbcompile.passes.vocabulary.shard_program import (
    COEFFICIENTS,
    GATHERED,
    GRADIENT,
    HIDDEN,
    LOOKED_UP,
    OF_LOOKUP,
    STATISTICS,
    Bounds,
    VocabularyProgram,
)
from zbcompile.passes.vocabulary.trunk import ShardedStep

SlotValues = Mapping[Slot, Tensor]
Results = dict[Slot, Tensor]
# [rows, words]
PRODUCT = Slot(SAVED, "product")
# Parts of the input gradient, [rows, width] each, that S computes with one barrier: the sum of
# softmax times weight over all words but the label, the weight of a label of this shard, and the
# gradient of the sum of logits.
OTHERS, LABEL_ROWS, TOTAL_ROWS = (Slot(SAVED, x) for x in ("others", "label_rows", "total_rows"))


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
    shards = [_Shard(sharded, bounds, rank, barriers, sum_dtype) for rank in range(len(bounds))]
    pieces, fakes = tuple(shard.pieces() for shard in shards), shards[0].fakes
    rows = fakes.get(OF_LOOKUP)
    return VocabularyProgram(
        parameters=tuple(sharded.parameters),
        bounds=bounds,
        barriers=barriers,
        hidden=tensor_spec(fakes[HIDDEN]),
        statistics=tensor_spec(fakes[GATHERED][0]),
        gradient=tensor_spec(fakes[HIDDEN].to(fakes[GATHERED].dtype)),
        pieces=pieces,
        flops=tuple({name: x.flops for name, x in passes.items()} for passes in pieces),
        lookup=None if rows is None else tensor_spec(rows, needs_gradient=barriers > 0),
    )


class _Shard:
    """Traces the passes of one rank's shard.

    Attributes:
        words: How many the rank has; the first one is `low`.
        dtype: Of the product. Statistics have the `wide` one: float32, or float64 if the model has.
        parts: The parts of the input gradient that S computes.
        nodes: The placeholders of the step that a pass may read, but for parameters.
        fakes: A fake tensor for every value that a pass may read.
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
        self.rank, self.barriers = rank, barriers
        self.low, high = bounds[rank]
        self.words = high - self.low
        self.weight, self.bias = sharded.weight, sharded.bias
        parts = (OTHERS, LABEL_ROWS, TOTAL_ROWS)[: 2 + self.loss.has_total]
        self.parts = parts if barriers == 1 else ()
        hidden = self.loss.layer.hidden[0].meta["val"]
        self.dtype = self.loss.layer.products[0].meta["val"].dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        inputs = step.inputs().items()
        self.nodes = {slot: node for node, slot in inputs if slot.role != PARAMETER}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            fake = partial(torch.empty, dtype=self.wide, device=hidden.device)
            self.fakes = {
                HIDDEN: fake(self.loss.rows, hidden.shape[1], dtype=hidden.dtype),
                GATHERED: fake(len(bounds), 3 + self.loss.has_total, self.loss.rows),
            }
            self.fakes |= {slot: like(node.meta["val"]) for slot, node in self.nodes.items()}
            for name in sharded.parameters:
                whole = step.parameters[name].meta["val"]
                size = (self.words, *whole.shape[1:])
                self.fakes[Slot(PARAMETER, name)] = fake(size, dtype=whole.dtype)
                self.fakes[Slot(ACCUMULATOR, name)] = fake(size, dtype=sum_dtype(whole.dtype))
            if self.lookups is not None:
                one = self.lookups.forward[0].meta["val"]
                self.fakes[OF_LOOKUP] = fake(self.lookups.rows, one.shape[-1], dtype=one.dtype)

    def pieces(self) -> dict[str, PassGraph]:
        """Returns the graphs of S, T and of what runs between them, by name."""
        passes: dict[str, Callable[[SlotValues], Results]] = {"S": self._scan}
        passes["STATS"] = self._combine
        if self.barriers:
            passes["T"] = self._update
        if self.lookups is not None:
            passes["EMBED"] = self._look_up
            if self.barriers:
                passes["EMBED_GRAD"] = self._spread
        return {name: self._trace(name, function) for name, function in passes.items()}

    def _scan(self, values: SlotValues) -> Results:
        """Returns what STATS or T needs: the product of a shard with words, the parts of the input
        gradient, and the statistics of this shard's words, [3 or 4, rows]: the maximum, the sum of
        exponentials relative to it, the label's logit and perhaps the sum of logits."""
        hidden, weight = values[HIDDEN], values[Slot(PARAMETER, self.weight)]
        lowest = torch.finfo(self.dtype).min  # no maximum is -inf, so no softmax is NaN
        if not self.words:
            zeros = hidden.new_zeros(values[GATHERED].shape[1:], dtype=self.wide)
            statistics = torch.cat([zeros[:1] + lowest, zeros[1:]])
            parts = dict.fromkeys(self.parts, torch.zeros_like(hidden, dtype=self.wide))
            return {STATISTICS: statistics, **parts}
        bias = None
        if self.bias is not None:
            bias = values[Slot(PARAMETER, self.bias)].to(self.dtype).clamp(min=lowest)
        product = F.linear(hidden, weight.to(self.dtype), bias)
        logits = self._logits(product).to(self.wide)
        is_local, number = self._local(self._at(values).labels())
        probabilities = logits.softmax(1)  # of the largest logit: one over the sum
        label = torch.where(is_local, logits.gather(1, number), 0.0).squeeze(1)
        total = [logits.sum(1)] if self.loss.has_total else []
        rows = [logits.amax(1), 1 / probabilities.amax(1), label, *total]
        results = {STATISTICS: torch.stack(rows)}
        if self.barriers:
            results[PRODUCT] = product
        if OTHERS in self.parts:
            at_label = torch.where(is_local, 0.0, probabilities.gather(1, number))
            pulled = self._pull_back(product, probabilities.scatter_(1, number, at_label))
            results[OTHERS] = self._times_weight(pulled, weight)
            slope = self._pull_back(product.gather(1, number), is_local.to(self.wide))
            label_rows = weight[number.squeeze(1)].to(self.dtype)
            results[LABEL_ROWS] = slope.to(self.wide) * label_rows.to(self.wide)
        if TOTAL_ROWS in self.parts:
            ones = self._pull_back(product, torch.ones_like(logits))
            results[TOTAL_ROWS] = self._times_weight(ones, weight)
        return results

    def _combine(self, values: SlotValues) -> Results:
        """Returns the outputs of a forward alone; else the loss, what T needs of every row, [3,
        rows]: the factor of the shard's softmax, the gradient at the label, and the gradient at
        every word, and with one barrier this shard's part of the input gradient."""
        maxima, sums, labels, *totals = values[GATHERED].unbind(1)
        maximum = maxima.amax(0)
        parts = sums * (maxima - maximum).exp()
        summed = parts.sum(0)
        total = reduce(torch.add, totals, torch.zeros_like(maxima)).sum(0)
        relative = summed.log(), labels.sum(0) - maximum, total - self.loss.words * maximum
        leaves = [statistic.detach().requires_grad_() for statistic in relative]
        statistics = Statistics(maximum, *leaves)
        evaluation = self._at(values, statistics)
        if not self.barriers:
            outputs = enumerate(self.loss.step.outputs)
            return {
                Slot(OUTPUT, str(index)): evaluation.value(node)
                for index, node in outputs
                if node in self.loss.derived
            }
        loss, (softmax, label, words) = evaluation.gradients(leaves)
        at_label = softmax * torch.expm1(statistics.label - statistics.log_sum) + (softmax + label)
        coefficients = torch.stack([softmax * (parts[self.rank] / summed), at_label, words])
        results = {Slot(LOSS, "loss"): loss, COEFFICIENTS: coefficients}
        if self.barriers == 1:
            pairs = zip(coefficients.unbind(0), self.parts, strict=False)
            terms = [rows[:, None] * values[slot] for rows, slot in pairs]
            results[GRADIENT] = reduce(torch.add, terms)
        return results

    def _update(self, values: SlotValues) -> Results:
        """The second half of T adds to the gradients of the shard's rows in place. Returns this
        shard's part of the input gradient with two barriers."""
        hidden, product = values[HIDDEN], values.get(PRODUCT)
        if product is None:
            zeros = torch.zeros_like(hidden, dtype=self.wide)
            return {GRADIENT: zeros} if self.barriers == 2 else {}
        softmax, at_label, words = values[COEFFICIENTS][:, :, None].unbind(0)
        wide = self._logits(product).to(self.wide).softmax(1).mul_(softmax)
        is_local, number = self._local(self._at(values).labels())
        wide.scatter_(1, number, torch.where(is_local, at_label, wide.gather(1, number)))
        wide = self._pull_back(product, wide.add_(words) if self.loss.has_total else wide)
        gradient, total = wide.to(self.dtype).t(), values[Slot(ACCUMULATOR, self.weight)]
        if total.dtype == gradient.dtype:
            total.addmm_(gradient, hidden)
        else:
            total.add_(gradient @ hidden)
        if self.bias is not None:
            values[Slot(ACCUMULATOR, self.bias)].add_(wide.sum(0))
        weight = values[Slot(PARAMETER, self.weight)]
        return {GRADIENT: self._times_weight(wide, weight)} if self.barriers == 2 else {}

    def _logits(self, product: Tensor) -> Tensor:
        """Returns what the softmax normalizes, in the dtypes of the model."""
        for node in self.loss.form:
            product = node.target(product, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        return product

    def _pull_back(self, product: Tensor, gradient: Tensor) -> Tensor:
        """Returns the gradient by the product from the gradient by the logits."""
        if not self.loss.form:
            return gradient
        with torch.enable_grad():
            leaf = product.detach().requires_grad_()
            logits = self._logits(leaf)
            return torch.autograd.grad(logits, leaf, gradient.to(logits.dtype))[0]

    def _times_weight(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Returns gradient [rows, words] times weight, a part of the input gradient.

        The factors have the model's dtype. Parts of several shards may cancel, so they are wide.
        """
        factor, rows = gradient.to(self.dtype), weight.to(self.dtype)
        if self.dtype != self.wide and is_gpu(rows.device):
            return torch.mm(factor, rows, out_dtype=self.wide)
        return factor.to(self.wide) @ rows.to(self.wide)

    def _look_up(self, values: SlotValues) -> Results:
        """The rows of this shard's words; rows of other shards are zeros."""
        assert self.lookups is not None
        table = values[Slot(PARAMETER, self.lookups.weight)]
        if not self.words:
            return {LOOKED_UP: table.new_zeros((self.lookups.rows, table.shape[1]))}
        inside, number = self._numbers(self.lookups.forward, values)
        return {LOOKED_UP: torch.where(inside, table[number.squeeze(-1)], 0.0)}

    def _spread(self, values: SlotValues) -> Results:
        """Adds the gradient of the rows to that of the table, except for padding."""
        assert self.lookups is not None
        if self.words:
            inside, number = self._numbers(self.lookups.backward, values)
            total = values[Slot(ACCUMULATOR, self.lookups.weight)]
            rows = torch.where(inside, values[OF_LOOKUP], 0.0).to(total.dtype)
            total.index_add_(0, number.squeeze(-1), rows)
        return {}

    def _numbers(self, lookups: Sequence[Node], values: SlotValues) -> tuple[Tensor, Tensor]:
        """Returns which looked up rows are of this shard, and their numbers. The padding of a
        backward is of no shard."""
        evaluation, numbers = self._at(values), []
        for node in lookups:
            rows = evaluation.value(node.args[1]).flatten()
            padding: Any = node.args[3] if operator_name(node) != "embedding" else -1
            numbers.append(torch.where(rows == padding, -1, rows))
        return self._local(torch.cat(numbers))

    def _local(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Returns whether words belong to this shard, and their numbers there, with a last
        dimension of 1.

        Words of other shards get different numbers, so that they do not all write to one row.
        """
        local = numbers.unsqueeze(-1) - self.low
        inside = (local >= 0) & (local < self.words)
        return inside, torch.where(inside, local, numbers.unsqueeze(-1).remainder(self.words))

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
            if not node.users:
                module.graph.erase_node(node)
                del inputs[node]
        graph = LazyGraphModule(module, module.graph, class_name=f"{name}{self.rank}")
        piece = PassGraph(self.rank, name, graph, tuple(inputs.values()), tuple(outputs))
        self.fakes |= {slot: node.meta["val"] for slot, node in piece.returns}  # of later passes
        return piece
