"""One stage through its passes, alone."""

from collections.abc import Hashable, Mapping, MutableMapping
from types import MappingProxyType

import torch

from zbcompile.compiler.dump_passes import dump_graphs
from zbcompile.env import CHECK, DUMP
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.pass_list.passes_in_order import STAGE_PASSES, StageTask
from zbcompile.passes.pass_list.run_passes import Observer, PassManager, PassRun
from zbcompile.passes.stage.stage_program import StageProgram


def make_manager(observe: Observer | None = None) -> PassManager:
    """The manager that runs the passes; with ZBCOMPILE_CHECK=1 it checks the result of each, with ZBCOMPILE_DUMP=DIR
    it writes the result of each into a file."""
    folder = DUMP.read()

    def observe_and_dump(run: PassRun) -> None:
        if folder is not None:
            dump_graphs(folder, run)
        if observe is not None:
            observe(run)

    return PassManager(observe if folder is None else observe_and_dump, CHECK.read())


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
