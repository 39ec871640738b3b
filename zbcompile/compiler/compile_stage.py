"""One stage through its passes, alone."""

from collections.abc import Hashable, Mapping, MutableMapping
from types import MappingProxyType

import torch

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.pass_list.passes_in_order import STAGE_PASSES, StageTask
from zbcompile.passes.pass_list.run_passes import Observer, PassManager
from zbcompile.passes.stage.stage_program import StageProgram


def make_manager(observe: Observer | None = None) -> PassManager:
    """The manager that runs the passes."""
    return PassManager(observe)


def labels_of(canonical: Canonical) -> dict[str, str]:
    """What the graphs call each process group, by this process's name of it."""
    captured = canonical.captured
    return {**captured.dimensions, **{name: label for label, name in captured.groups.items()}}


def compile_stage(
    trainable: frozenset[str],
    choices: Choices,
    stage: Stage,
    tangents: Mapping[str, torch.Tensor],
    manager: PassManager | None = None,
    labels: Mapping[str, str] = MappingProxyType({}),
    several: frozenset[str] = frozenset(),
    segments: MutableMapping[Hashable, object] | None = None,
) -> tuple[StageProgram, Mapping[str, torch.Tensor]]:
    """The program of one stage, and the fake gradient of each activation that it receives. `labels`: what the graphs
    call each process group of this process; `several`: the parameters of several stages; `segments`: those of other
    stages that were traced."""
    task = StageTask(trainable, choices, tangents, labels, several, {} if segments is None else segments)
    made = (manager or make_manager()).run_all(STAGE_PASSES, stage, task, stage=stage.index)
    *_, pieces, program = made
    return program, pieces.joint.gradient_of_input
