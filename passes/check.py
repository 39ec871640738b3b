"""Checks of pass graphs: what every later part of the library relies on.

A violation is a bug of the compiler, not of the model.
"""

from collections import Counter
from collections.abc import Mapping

from zbcompile.passes.errors import VerificationError
from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.process_groups import is_running
from zbcompile.passes.graph.roles import BUFFER, SAVED, WEIGHT_GRADIENT
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.step_graph import FORWARD, Label, StepGraph
from zbcompile.passes.torch_private import is_in_place


def check_pass_graphs(step: StepGraph, passes: Mapping[Label, PassGraph]) -> None:
    """Raises VerificationError unless the passes are consistent.

    Every result of the step is returned exactly once, and gradients of parameters not by F. Random
    numbers are drawn once. Buffers that the step writes are read by F alone. Nothing works in
    place. A collective has ended before its result leaves the stage.
    """
    returned = Counter(slot for graph in passes.values() for slot in graph.outputs)
    for slot, count in Counter(slot for slot, _ in step.results()).items():
        if returned[slot] != count:
            raise VerificationError(f"{slot} is returned {returned[slot]} times; expected {count}")
    drawn = sum(is_random(node) for graph in passes.values() for node in graph.calls)
    expected = sum(map(is_random, step.calls()))
    if drawn != expected:
        raise VerificationError(f"{drawn} random operations in passes; expected {expected}")
    for label, graph in passes.items():
        wrong = [f"the operator {node.target}" for node in graph.calls if is_in_place(node.target)]
        running = [slot for slot, node in graph.returns if is_running(node) and slot.role != SAVED]
        wrong += [f"the output {slot}, for which nothing waits" for slot in running]
        if label.kind == FORWARD:
            wrong += [f"the output {s}" for s in graph.outputs if s.role == WEIGHT_GRADIENT]
        else:
            changing = [
                s for s in graph.inputs if s.role == BUFFER and s.name in step.buffer_updates
            ]
            wrong += [f"the input {slot}, which F changes" for slot in changing]
        if wrong:
            raise VerificationError(f"pass {label} has {', '.join(wrong)}")
