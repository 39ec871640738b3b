"""Parameters and buffers that several stages or copies use: keep eager's order of sums, or refuse them."""

from collections.abc import Set
from dataclasses import replace

from zbcompile.passes.compile_options import HALF
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import copied, count_uses, with_graph
from zbcompile.passes.partition.stage_graphs import Stage

SEPARATE_USES = "separate_uses"  # marks the placeholder of a parameter with one gradient per use


def separate_uses(stages: tuple[Stage, ...], trainable: frozenset[str]) -> tuple[Stage, ...]:
    """Mark parameters whose uses on one stage must not be summed before those of later stages; return the stages.

    Eager adds the uses one at a time, the last use of the model first: (g3 + g2) + g1. A stage that holds the first two
    and handed over g2 + g1 would make g3 + (g2 + g1), which has other bits. So it gives one gradient per use. So does
    every stage for a parameter in half precision: eager casts each use to the dtype of `.grad` before it adds them.
    """
    last = {name: stage.index for stage in stages for name in stage.named("parameter")}
    return tuple(_marked(stage, trainable, {n for n in trainable if stage.index < last.get(n, -1)}) for stage in stages)


def _marked(stage: Stage, trainable: Set[str], shared: Set[str]) -> Stage:
    parameters = [n for n in stage.module.graph.find_nodes(op="placeholder") if n.meta["slot"].kind == "parameter"]
    half = {n.meta["slot"].name for n in parameters if n.meta["val"].dtype in HALF} & trainable
    found = {node.name for node in parameters if node.meta["slot"].name in shared | half and count_uses(node) > 1}
    if not found:
        return stage
    graph = copied(stage.module.graph)
    for node in graph.find_nodes(op="placeholder"):
        if node.name in found:
            node.meta[SEPARATE_USES] = True
    return replace(stage, module=with_graph(stage.module, graph))


def refuse_shared_mutation(stages: tuple[Stage, ...]) -> None:
    """Raise CompileError for a buffer that one stage changes and another reads: the reader would see stale values."""
    for stage in stages:
        for changed in (slot.name for slot in stage.outputs if slot.kind == "mutation"):
            readers = [other.index for other in stages if changed in other.named("buffer") and other is not stage]
            if readers:
                raise CompileError(
                    f"buffer {changed} is changed on stage {stage.index} and read on stage {readers[0]}, which would "
                    "see stale values. Use fewer stages, so that one has both, or give the readers their own copy."
                )


def refuse_mutation_of_copies(stages: tuple[Stage, ...]) -> None:
    """Raise CompileError for a changed buffer under a schedule of two model copies: each copy would see half of it."""
    changed = [(slot.name, s.index) for s in stages for slot in s.outputs if slot.kind == "mutation"]
    if changed:
        name, stage = changed[0]
        raise CompileError(
            f"buffer {name} is changed by the forward of stage {stage}. This schedule keeps two copies of the model, "
            "each of which would change its own buffer from half of the microbatches. Use dualpipe-v, which has the "
            "same overlap with one copy."
        )
