"""Runs a step whose output layer is sharded: the trunk's pass graphs and the shards of all ranks in
one process, one microbatch after the other, with the collectives written out. The shards run in the
registers of the runtime.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.pass_graph_runner import Batch, Runner, StepResult
from zbcompile.engine.gradients import Gradients
from zbcompile.engine.stage import SHARD, StageRun, prepare_stage
from zbcompile.passes.capture.batch_inputs import leaves_with_paths
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.compile_step import CompiledStep
from zbcompile.passes.graph.roles import ACTIVATION, GRADIENT, Slot
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_names import dtype_named
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram
from zbcompile.passes.vocabulary.trunk import ShardedStep


@dataclass
class ShardedRunner:
    """Runs a compiled trunk and the shards of its output layer."""

    sharded: ShardedStep
    compiled: CompiledStep
    program: VocabularyProgram
    model: nn.Module
    batches: Sequence[Batch]
    waiting_bytes: list[int] = field(
        default_factory=list
    )  # of each shard between S and T, for one microbatch

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.trunk = Runner(self.compiled, self.model, self.batches, seed=0)
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.sums = Gradients(
            self.parameters, frozenset(), CompileOptions(accumulate_dtype=torch.float32)
        )
        self.factor = torch.ones(()) / len(self.batches)
        self.shards = [self._runs_of(rank) for rank in range(len(self.program.bounds))]
        values = self.sharded.trunk.vocabulary_values
        assert values is not None
        self.values = values

    def _runs_of(self, rank: int) -> list[StageRun]:
        low, high = self.program.bounds[rank]
        step = self.sharded.whole
        resident = {Slot("constant", name): value for name, value in step.constant_values.items()}
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        resident |= {Slot("buffer", name): buffers[name] for name in step.buffers}
        for name in self.program.parameters:
            resident[Slot("parameter", name)] = self.parameters[name].detach()[low:high]
        inputs = [
            {path: leaf for path, leaf in leaves_with_paths(batch) if isinstance(leaf, Tensor)}
            for batch in self.batches
        ]
        stages = [
            prepare_stage(stage, resident, torch.device("cpu"), SHARD)
            for stage in self.program.stages_of(rank)
        ]
        count = len(self.batches)
        return [
            StageRun([stage] * count, self.sums, inputs, self.factor, [0] * count, slice(low, high))
            for stage in stages
        ]

    def run(self) -> StepResult:
        with torch.no_grad():
            for microbatch in range(len(self.batches)):
                self._run_microbatch(microbatch)
        for runs in self.shards:
            for run in runs:
                run.check_empty()
        assert not self.trunk.values
        losses = [self._loss(microbatch) for microbatch in range(len(self.batches))]
        gradients = self.trunk._gradients()
        for name in self.program.parameters:
            gradients[name] = self.sums[name].total().to(self.parameters[name].dtype)
        return StepResult(losses, gradients)

    def forward(self) -> Any:
        """Runs a forward alone, and returns what it returns."""
        hidden = self._forward(0)
        gathered = self._scan(0, hidden)
        outputs = dict(self.trunk.outputs.get(0, {}))
        for runs in self.shards:
            runs[0].run("STATS", 0, [gathered])
            outputs |= {int(name): values[0] for name, values in runs[0].outputs.items()}
        assert self.sharded.whole.output_structure is not None
        return self.sharded.whole.output_structure.rebuild(
            [value for _, value in sorted(outputs.items())]
        )

    def _run_microbatch(self, microbatch: int) -> None:
        hidden = self._forward(microbatch)
        gathered = self._scan(microbatch, hidden)
        parts = [runs[0].run("STATS", microbatch, [gathered]) for runs in self.shards]
        self.waiting_bytes = [runs[0].live_bytes() for runs in self.shards]
        later = [runs[0].run("T", microbatch, []) for runs in self.shards]
        parts = parts if self.program.barriers == 1 else later
        total = (
            torch.stack([part for [part] in parts])
            .sum(0)
            .to(dtype_named(self.program.hidden.dtype))
        )
        last = self.compiled.stages - 1
        arriving = self.values.hidden_gradient
        assert arriving is not None
        self.trunk.values[microbatch, last, Slot(GRADIENT, arriving.name)] = total
        self._run_trunk(microbatch, backward=True)
        if self.values.lookup_gradient is not None:
            slot = Slot(GRADIENT, self.values.lookup_gradient.name)
            rows = self.trunk.values.pop((microbatch, -1, slot))
            for runs in self.shards:
                runs[1].run("EMBED_GRAD", microbatch, [rows])

    def _forward(self, microbatch: int) -> Tensor:
        """Runs F of all stages, and returns the input of the output layer."""
        if self.values.lookup is not None:
            rows = torch.stack(
                [runs[1].run("EMBED", microbatch, [])[0] for runs in self.shards]
            ).sum(0)
            self.trunk.values[microbatch, 0, Slot(ACTIVATION, self.values.lookup.name)] = rows
        self._run_trunk(microbatch, backward=False)
        assert self.values.hidden is not None
        slot = Slot(ACTIVATION, self.values.hidden.name)
        return self.trunk.values.pop((microbatch, self.compiled.stages, slot)).contiguous()

    def _scan(self, microbatch: int, hidden: Tensor) -> Tensor:
        return torch.stack([runs[0].run("S", microbatch, [hidden])[0] for runs in self.shards])

    def _run_trunk(self, microbatch: int, backward: bool) -> None:
        passes: Mapping[Any, PassGraph] = self.compiled.passes
        for label, graph in passes.items():
            if (label.kind != "F") == backward:
                self.trunk._run_pass(graph, microbatch)

    def _loss(self, microbatch: int) -> Tensor:
        losses = [runs[0].losses[microbatch] for runs in self.shards]
        assert all(loss.isnan() or torch.equal(loss, losses[0]) for loss in losses)
        further = self.trunk.losses.get(microbatch)
        return losses[0] if further is None else losses[0] + further


def errors(result: StepResult, expected: StepResult) -> dict[str, float]:
    """Returns the largest difference of each loss and gradient, relative to the largest entry."""
    pairs = {
        f"loss {i}": pair for i, pair in enumerate(zip(result.losses, expected.losses, strict=True))
    }
    assert result.gradients.keys() == expected.gradients.keys()
    pairs |= {name: (value, expected.gradients[name]) for name, value in result.gradients.items()}
    return {name: _error(*pair) for name, pair in pairs.items()}


def _error(one: Tensor, other: Tensor) -> float:
    scale = other.double().abs().max().item() or 1.0
    return (one.double() - other.double()).abs().max().item() / scale
