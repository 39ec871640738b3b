"""Compiling for evaluation: only the model's forward, with each parameter used on the stage where it trains."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from zbcompile.compiler.compile_model import make_manager, on_mesh
from zbcompile.model.batch import Microbatch
from zbcompile.passes.capture.export import Captured
from zbcompile.passes.capture.questions import Given
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.process_groups import group_of, with_groups
from zbcompile.passes.partition.liveness import draw_line
from zbcompile.passes.partition.stage_graphs import Stage, assign_by_parameters
from zbcompile.passes.pass_list.canonicalise import canonicalise
from zbcompile.passes.pass_list.passes_in_order import CAPTURE_INFERENCE, CUT
from zbcompile.passes.stage.stage_program import forward_programs
from zbcompile.program.program import Program
from zbcompile.schedules.generators.forward_only import forward_only
from zbcompile.schedules.lowering.lower import lower


@dataclass(frozen=True)
class Inference:
    """A model in eval mode, cut into `stages`; `outputs` are the leaves of its output that are tensors, each with the
    stage that makes it and a fake tensor of its value."""

    captured: Captured
    stages: tuple[Stage, ...]
    outputs: Mapping[str, tuple[int, torch.Tensor]]

    @property
    def exchanges(self) -> set[str]:
        """The dimensions of the mesh along which its graphs exchange tensors."""
        groups = (group_of(node) for stage in self.stages for node in stage.module.graph.nodes)
        return {self.captured.dimensions.get(group, group) for group in groups if group is not None}

    @property
    def changes_buffers(self) -> bool:
        return any(slot.kind == "mutation" for slot in self.captured.outputs)


def forward_program(inference: Inference, like: Program, microbatches: int) -> Program:
    """The program that runs `inference` for a number of microbatches on the ranks of `like`."""
    lowered = lower(forward_only(like.schedule.placement, microbatches))
    return replace(
        like, stages=forward_programs(inference.stages), lowered=lowered, vocabulary=None, groups={}, writer=None
    )


def compile_inference(
    model: nn.Module, microbatch: Microbatch, like: Program, dimensions: Mapping[str, str], given: Given | None = None
) -> Inference:
    """Capture `model` in eval mode and cut it so that each parameter is used on the stage where it trains. `dimensions`
    are those of `Captured`, `given` answers for `capture_inference`."""
    args, kwargs, _ = microbatch.example
    manager = make_manager()
    captured = on_mesh(manager.run(CAPTURE_INFERENCE, model, args, kwargs, given), dimensions)
    canonical = canonicalise(captured, manager)
    line = draw_line(canonical)
    assigned = assign_by_parameters(canonical, line, like.homes)
    stages = manager.run(CUT, canonical, line, assigned, like.schedule.stages)
    groups = canonical.captured.groups
    bound = tuple(replace(stage, module=with_groups(stage.module, groups)) for stage in stages)
    return Inference(captured, bound, {name: found for stage in bound for name, found in _outputs_of(stage)})


def _outputs_of(stage: Stage) -> Iterator[tuple[str, tuple[int, torch.Tensor]]]:
    for slot, node in zip(stage.outputs, output_values(stage.module.graph), strict=True):
        if slot.kind == "output":
            yield slot.name, (stage.index, node.meta["val"])
