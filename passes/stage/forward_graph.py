"""The graph of a stage that runs forward alone: what was kept as one operator becomes the operations that it makes.

In a step, tracing the joint graph does that.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx.traceback import preserve_node_meta

from zbcompile.passes.capture.custom_functions import is_call
from zbcompile.passes.graph.fx import like
from zbcompile.passes.graph.kernel_layouts import kernels_layouts
from zbcompile.passes.graph.process_groups import rename_groups
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.split.backward_locations import MarkingInterpreter
from zbcompile.passes.split.in_place import replace_writes_into_fresh
from zbcompile.passes.torch_private import FakeTensorMode, LazyGraphModule, make_fx


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
