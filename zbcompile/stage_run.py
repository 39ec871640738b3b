"""Running one stage: its graphs over values found by slot, each freed after the last pass that reads it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zbcompile.errors import PipelineError
from zbcompile.gradients import Gradients
from zbcompile.passes.cutting import is_dense
from zbcompile.passes.slots import Slot, TensorSpec
from zbcompile.passes.split import Piece
from zbcompile.passes.stage_program import StageProgram
from zbcompile.passes.torch_private import use_boxed_calls
from zbcompile.seeds import generator_state, set_generator_state

RESIDENT = ("parameter", "buffer", "constant")


@dataclass(frozen=True)
class CompiledStage:
    """A stage ready to run. `resident` holds its parameters, buffers and constants; `kept[piece]` the slots that a
    later
    pass reads, so must survive `piece`. `generator_travels` says whether generator state arrives and leaves with F."""

    program: StageProgram
    resident: Mapping[Slot, torch.Tensor]
    kept: Mapping[str, frozenset[Slot]]
    device: torch.device
    generator_arrives: bool
    generator_leaves: bool

    @property
    def index(self) -> int:
        return self.program.stage


def prepare_stage(
    program: StageProgram, resident: Mapping[Slot, torch.Tensor], device: torch.device, random_until: int
) -> CompiledStage:
    """Bind a stage program to its tensors. Its graphs become boxed calls: each frees its inputs as it uses them."""
    for piece in program.pieces.values():
        use_boxed_calls(piece.module)
    needs = {name: frozenset(program.pieces[name].inputs) for name in ("B", "W", "BW")}
    kept = {"F": needs["B"] | needs["W"] | needs["BW"], "B": needs["W"], "W": frozenset(), "BW": frozenset()}
    index = program.stage
    return CompiledStage(program, resident, kept, device, 0 < index <= random_until, index < random_until)  # type: ignore


@dataclass
class StageRun:
    """The mutable part of a stage during one step: `frames[microbatch]` holds what waits for B and W."""

    stage: CompiledStage
    gradients: Gradients
    inputs: list[dict[str, torch.Tensor]]
    loss_factor: torch.Tensor
    seeds: list[int]
    frames: dict[int, dict[Slot, torch.Tensor]] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def forward(self, microbatch: int, arrived: list[torch.Tensor]) -> list[torch.Tensor]:
        """F: `arrived` and the result are the boundary tensors in the order of the stage's `receives` and `sends`."""
        stage = self.stage
        frame = self.frames[microbatch] = {}
        self._position_generator(microbatch, arrived)
        frame.update(zip((Slot("activation", n) for n in stage.program.receives), arrived, strict=False))
        arrived.clear()
        leaving = self._call("F", microbatch, frame)
        sends = [leaving.pop(Slot("activation", name)) for name in stage.program.sends]
        sends = [dense(value, spec) for value, spec in zip(sends, stage.program.sends.values(), strict=True)]
        if stage.generator_leaves:
            sends.append(generator_state(stage.device))
        self._finish_forward(microbatch, leaving)
        return sends

    def _position_generator(self, microbatch: int, arrived: list[torch.Tensor]) -> None:
        if self.stage.generator_arrives:
            set_generator_state(self.stage.device, arrived.pop())
        elif self.stage.program.random or self.stage.generator_leaves:
            torch.manual_seed(self.seeds[microbatch])

    def _finish_forward(self, microbatch: int, leaving: dict[Slot, torch.Tensor]) -> None:
        frame = self.frames[microbatch]
        for slot, value in leaving.items():
            if slot.kind == "saved":
                frame[slot] = value
            elif slot.kind == "loss":
                self.losses[microbatch] = value
            elif slot.kind == "mutation":
                self.stage.resident[Slot("buffer", slot.name)].copy_(value)

    def backward(self, microbatch: int, arrived: list[torch.Tensor]) -> list[torch.Tensor]:
        """B: gradients of the stage's inputs from those of its outputs; what W needs stays behind."""
        return self._backward("B", microbatch, arrived)

    def full_backward(self, microbatch: int, arrived: list[torch.Tensor]) -> list[torch.Tensor]:
        """BW: input gradients and weight gradients in one graph; nothing stays behind."""
        sends = self._backward("BW", microbatch, arrived)
        del self.frames[microbatch]
        return sends

    def _backward(self, name: str, microbatch: int, arrived: list[torch.Tensor]) -> list[torch.Tensor]:
        program = self.stage.program
        frame = self.frames[microbatch]
        frame.update(zip((Slot("tangent", n) for n in program.gradients_in), arrived, strict=True))
        arrived.clear()
        if Slot("tangent", "loss") in program.pieces[name].inputs or Slot("tangent", "loss") in self.stage.kept[name]:
            frame[Slot("tangent", "loss")] = self.loss_factor
        leaving = self._call(name, microbatch, frame)
        frame.update({slot: value for slot, value in leaving.items() if slot.kind == "saved"})
        self._accumulate(microbatch, leaving)
        sends = [leaving[Slot("input_gradient", n)] for n in program.gradients_out]
        return [dense(value, spec) for value, spec in zip(sends, program.gradients_out.values(), strict=True)]

    def weight(self, microbatch: int) -> None:
        """W: the weight gradients that B left for later."""
        leaving = self._call("W", microbatch, self.frames.pop(microbatch))
        self._accumulate(microbatch, leaving)

    def _accumulate(self, microbatch: int, leaving: dict[Slot, torch.Tensor]) -> None:
        for slot in [slot for slot in leaving if slot.kind == "gradient"]:
            self.gradients.add(slot.name, self.stage.index, microbatch, leaving.pop(slot))

    def _call(self, name: str, microbatch: int, frame: dict[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """Run one piece. Values that no later pass reads leave the frame and are freed inside the call."""
        piece = self.stage.program.pieces[name]
        kept = self.stage.kept[name]
        values = [self._value(slot, microbatch, frame, slot in kept) for slot in piece.inputs]
        for slot in [slot for slot in frame if slot not in kept]:
            del frame[slot]
        with torch.no_grad():
            results = piece.module(values)
        return dict(zip(piece.outputs, results, strict=True))

    def _value(self, slot: Slot, microbatch: int, frame: dict[Slot, torch.Tensor], keep: bool) -> torch.Tensor:
        if slot.kind in RESIDENT:
            return self.stage.resident[slot]
        if slot.kind == "input":
            return self.inputs[microbatch][slot.name]
        if slot.kind == "accumulator":
            return self.gradients.buffer(slot.name, self.stage.index)
        return frame[slot] if keep else frame.pop(slot)

    def live_bytes(self) -> int:
        """Bytes of the distinct storages that the frames hold, without parameters, inputs and the loss factor."""
        return _storage_bytes((v for f in self.frames.values() for v in f.values()), self._not_counted())

    def _not_counted(self) -> set[int]:
        whole = [*self.stage.resident.values(), self.loss_factor, *(t for mb in self.inputs for t in mb.values())]
        return {t.untyped_storage().data_ptr() for t in whole}

    def check_empty(self) -> None:
        """After a step nothing may wait; anything that does is a fault of the schedule or of this runtime."""
        if self.frames:
            raise PipelineError(
                f"stage {self.stage.index} ended the step with microbatches {sorted(self.frames)} still waiting for "
                "their weight gradients; the schedule must give every F its B and W."
            )


def _storage_bytes(values: Iterable[torch.Tensor], without: set[int]) -> int:
    storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in values}
    return sum(size for key, size in storages.items() if key not in without)


def dense(value: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """`value` with the strides that the receiver's graph was traced for; a copy only where they differ."""
    if value.stride() == spec.stride or (is_dense(value) and _same_order(value, spec)):
        return value
    return torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)


def _same_order(value: torch.Tensor, spec: TensorSpec) -> bool:
    """Strides of dimensions of size 1 mean nothing."""
    return all(a == b or size == 1 for a, b, size in zip(value.stride(), spec.stride, value.shape, strict=True))


def run_forward_only(piece: Piece, values: Mapping[Slot, Any]) -> dict[Slot, torch.Tensor]:
    """One forward without a backward to follow."""
    with torch.no_grad():
        results = piece.module([values[slot] for slot in piece.inputs])
    return dict(zip(piece.outputs, results, strict=True))
