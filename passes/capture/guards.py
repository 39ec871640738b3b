"""Guards: the questions of a captured graph as a small graph of their own, from inputs to answers."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.capture.questions import ForeignAnswers, Questions
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.graph.fx import call_text, node_numbers, nodes_behind, output_values
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import content_of
from zbcompile.passes.torch_private import LazyGraphModule, storage_key

Answers = tuple[Any, ...]


@dataclass(frozen=True)
class Guards:
    """What forward asked about its inputs: `module` computes one tensor per question from `inputs`. The graph that was
    captured is right for microbatches with exactly the answers of `given`. `lines` are those of the model that ask,
    `constants` the tensors of the model that take part, by name."""

    module: GraphModule
    inputs: tuple[Slot, ...]
    given: ForeignAnswers
    lines: tuple[str, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """Equal for questions of the same kind, with the same constants, however they are answered."""
        numbers = node_numbers(self.module.graph)
        calls = [call_text(node, numbers) for node in self.module.graph.nodes]
        held = [(name, t, hashlib.sha256(content_of(t)).hexdigest()) for name, t in self.constants.items()]
        values = [f"{name} = {t.dtype} {list(t.shape)} {content}" for name, t, content in held]
        return "; ".join((*map(str, self.inputs), *values, *calls))

    def begin(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors with the answers for a microbatch, given by input path. A device may still be computing them."""
        given = [tensors[s.name] if s.kind == "input" else self.constants[s.name] for s in self.inputs]
        with torch.no_grad(), torch.autocast(given[0].device.type, enabled=False):  # the casts are in the graph
            return list(self.module(*given))

    def different(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """The first question that a microbatch, by input path, answers otherwise, with both answers; "" if none."""
        return self.first_difference(read_answers(self.begin(tensors)))

    def first_difference(self, answers: Answers) -> str:
        """As `different`, for answers to these questions."""
        for line, own, other in zip(self.lines, self.given.answers, answers, strict=True):
            if repr(own) != repr(other):  # a NaN is the same answer
                return f"{line} ({other}, not {own})"
        return ""

    def unlike(self, others: Sequence["Guards"]) -> str:
        """The first question whose answer none of `others` has after the same answers before it, for messages."""
        own = list(zip(self.lines, self.given.answers, strict=True))
        known = [list(zip(each.lines, each.given.answers, strict=True)) for each in others]
        at = next((i for i in range(len(own)) if own[: i + 1] not in [each[: i + 1] for each in known]), -1)
        return f"the answer {own[at][1]} to {own[at][0]}"


def read_answers(tensors: Iterable[torch.Tensor]) -> Answers:
    return tuple(tensor.tolist() for tensor in tensors)


def separate_guards(
    module: GraphModule,
    inputs: Sequence[Slot],
    questions: Questions,
    constants: Mapping[str, torch.Tensor],
    memories: Collection[int],
) -> Guards | None:
    """Take the last results of `module`, one per question, out of it. None if no answer depends on an input, or on a
    tensor over one of the `memories`, which may change."""
    answers, lines = tuple(questions.answers), tuple(questions.lines)
    if not answers:
        return None
    results = output_values(module.graph)
    kept, asked = results[: -len(answers)], results[-len(answers) :]
    slots = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    graph, copies = Graph(), dict[Node, Node]()
    needed = nodes_behind(asked)
    for node in (node for node in module.graph.nodes if node in needed):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in asked))
    taken = tuple(slots[node] for node in copies if node.op == "placeholder")
    if any(slot.kind not in ("input", "constant") for slot in taken):
        raise Refusal.OTHER_QUESTION.error(line=lines[0])
    module.graph.output_node().args = (tuple(kept),)
    module.recompile()
    held = {slot.name: constants[slot.name] for slot in taken if slot.kind == "constant"}
    if len(held) == len(taken) and not any(storage_key(tensor) in memories for tensor in held.values()):
        return None
    return Guards(LazyGraphModule(module, graph), taken, ForeignAnswers(questions.gives_numbers, answers), lines, held)
