"""Running one stage: its graphs over the registers of each microbatch, each value freed after its
last reader."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zbcompile.distributed.packing import laid_out
from zbcompile.engine.gradients import Gradients
from zbcompile.engine.stage_plan import Call, CompiledStage, Tensors
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import seed_generators
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import storage_bytes
from zbcompile.passes.torch_private import storage_key

Frame = list[torch.Tensor | None]


@dataclass
class StageRun:
    """The mutable part of a stage during one step: `frames[microbatch]` holds what waits for B and
    W, `outputs[leaf]` the parts of the model's output that this stage makes, by microbatch, `fits`
    whether tokens fitted where they went. `stages[i]` is the stage as microbatch i runs it. Of the
    parameters of a vocabulary shard it has these `rows` of their sums, None: all.

    Its methods are called without gradient recording (`torch.no_grad`).
    """

    stages: Sequence[CompiledStage]
    gradients: Gradients
    inputs: list[dict[str, torch.Tensor]]
    loss_factor: torch.Tensor
    seeds: list[int]
    rows: slice | None = None
    frames: dict[int, Frame] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    fits: list[torch.Tensor] = field(default_factory=list)
    accumulators: dict[int, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)

    @property
    def index(self) -> int:
        return self.stages[0].index

    def run(self, name: str, microbatch: int, arrived: Tensors) -> Tensors:
        """A pass: `arrived` and the result are the boundary tensors, of F in the order of the
        stage's `receives` and `sends`. B makes the gradients of the stage's inputs from those of
        its outputs, and leaves in the frame what W needs; no message arrives for W. BW makes the
        weight gradients in the same graph, and leaves nothing.
        """
        call = self.call(name, microbatch)
        return self.end(call, microbatch, call.run(self.begin(call, microbatch, arrived)))

    def call(self, name: str, microbatch: int) -> Call:
        return self.stages[microbatch].calls[name]

    def begin(self, call: Call, microbatch: int, arrived: Tensors) -> Tensors:
        """The inputs of a pass, in the order of its graph."""
        if call.opens:
            self._open(microbatch, arrived)
        frame = self.frames.pop(microbatch) if call.closes else self.frames[microbatch]
        if arrived or call.arrives:
            for (place, spec), value in zip(call.arrives, arrived, strict=True):
                frame[place] = laid_out(value, spec)
            arrived.clear()
        return self._take(call, frame)

    def _open(self, microbatch: int, arrived: Tensors) -> None:
        stage = self.stages[microbatch]
        frame = self.frames[microbatch] = list(stage.template)
        if stage.loss_factor is not None:
            frame[stage.loss_factor] = self.loss_factor
        inputs = self.inputs[microbatch]
        for place, path in stage.inputs:
            frame[place] = inputs[path]
        if stage.generator_arrives:
            stage.relay.continue_from(arrived.pop(), self.seeds[microbatch])
        elif stage.program.random or stage.generator_leaves:
            seed_generators(self.seeds[microbatch], stage.device)

    def end(self, call: Call, microbatch: int, results: Sequence[torch.Tensor]) -> Tensors:
        """Store the results of a pass; the tensors to pass on."""
        if call.reports:
            self._report(call, microbatch, results)
        if call.saves:
            frame = self.frames[microbatch]
            for at, place in call.saves:
                frame[place] = results[at]
        for parameter, places in call.gradients:
            self.gradients[parameter].add(self.index, microbatch, [results[at] for at in places])
        for at, name in call.parts:
            self.gradients.parts.setdefault(name, {})[microbatch] = results[at]
        sends = [laid_out(results[at], spec) for at, spec in call.sends] if call.sends else []
        if call.opens and (stage := self.stages[microbatch]).generator_leaves:
            sends.append(stage.relay.leave())
        return sends

    def _report(self, call: Call, microbatch: int, results: Sequence[torch.Tensor]) -> None:
        """Store what the step returns, and what forward writes into buffers."""
        for at, _ in call.fits:
            self.fits.append(results[at])
        for at, buffer in call.mutations:
            self.stages[microbatch].resident[Slot("buffer", buffer)].copy_(results[at])
        if call.loss is not None:
            self.losses[microbatch] = results[call.loss]
        for at, leaf in call.outputs:
            self.outputs.setdefault(leaf, {})[microbatch] = results[at]

    def _take(self, call: Call, frame: Frame) -> Tensors:
        """The inputs of a piece. What no later pass reads leaves the frame: the graph frees it at
        its last use."""
        if call.accumulators:
            self._add_accumulators(call, frame)
        values = [frame[place] for place in call.takes]
        for place in call.frees:
            frame[place] = None
        return values  # type: ignore[return-value]

    def _add_accumulators(self, call: Call, frame: Frame) -> None:
        """Passes add into the same buffers, which exist from the first of them on."""
        wanted = id(call.accumulators)  # hashing all names takes longer than a small pass
        if wanted not in self.accumulators:
            index = self.index
            sums = [(at, self.gradients[name].buffer(index)) for at, name in call.accumulators]
            self.accumulators[wanted] = (
                sums if self.rows is None else [(at, each[self.rows]) for at, each in sums]
            )
        for place, buffer in self.accumulators[wanted]:
            frame[place] = buffer

    def live_bytes(self) -> int:
        """Bytes of the distinct storages that the frames hold, without parameters, inputs and the
        loss factor."""
        held = (
            frame[place] for i, frame in self.frames.items() for place in self.stages[i].passing
        )
        resident = [
            t
            for stage in {id(each): each for each in self.stages}.values()
            for t in stage.resident.values()
        ]
        not_counted = [*resident, self.loss_factor, *(t for mb in self.inputs for t in mb.values())]
        return storage_bytes(
            (value for value in held if value is not None), set(map(storage_key, not_counted))
        )

    def check_empty(self) -> None:
        """Require that no value waits after a step; one that does is a bug of the schedule or of
        this runtime."""
        if self.frames:
            what = f"stage {self.index}" if self.index >= 0 else "a vocabulary shard"
            raise PipelineError(
                f"{what} ended the step with microbatches {sorted(self.frames)} still waiting for"
                " their weight gradients; the schedule must give every F its B and W, and every S"
                " its T."
            )
