"""What holds of the shards of an output layer, and of a forward and a backward merged into one graph."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from zbcompile.passes.stage.overlap import Merged, ask, hand_over, pick
from zbcompile.passes.verification.graph_views import graphs_of
from zbcompile.passes.verification.rule import Break, rule
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram


@rule("the shards cover all words, each once, in the order of the ranks")
def words_covered(made: VocabularyProgram, before: Any) -> Iterator[Break]:
    for (_, high), (low, _) in pairwise(made.bounds):
        if high != low:
            yield Break(f"one shard ends before word {high}, and the next begins with word {low}")
    if len(made.pieces) != len(made.bounds):
        yield Break(f"{len(made.bounds)} shards have the graphs of {len(made.pieces)}")


@rule("a pair does what its forward and its backward do, each operation once, and nothing else")
def halves_complete(made: Merged, before: Any) -> Iterator[Break]:
    (view,) = graphs_of(made)
    halves = (made.forward.module.graph, made.backward.module.graph)
    wanted = Counter(n.target for graph in halves for n in graph.nodes if n.op == "call_function")
    found = Counter(node.target for node in view.calls if node.target not in (hand_over, ask, pick))
    for target in wanted.keys() | found.keys():
        if wanted[target] != found[target]:
            node = next((node for node in reversed(view.calls) if node.target == target), None)
            yield Break(f"{target}: {wanted[target]} in the halves, {found[target]} in the pair", node, view.title)
