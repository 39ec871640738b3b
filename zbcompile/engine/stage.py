"""A stage ready to run, and the stage during one step.

Every value that a pass reads or receives has a register. A microbatch is a list of registers: a
pass takes its inputs by index, drops those that no later pass reads, so that its graph frees them
after their last use, and stores what later passes read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zbcompile.backends.types import Run
from zbcompile.distributed.transport import laid_out
from zbcompile.engine.gradients import Gradients
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import Relay, seed_generators
from zbcompile.passes import gpu
from zbcompile.passes.graph.roles import (
    ACCUMULATOR,
    ACTIVATION,
    BATCH,
    BUFFER,
    BUFFER_UPDATE,
    CONSTANT,
    FITS,
    GRADIENT,
    LOSS,
    OUTPUT,
    PARAMETER,
    PART,
    SAVED,
    TANGENT,
    WEIGHT_GRADIENT,
    Slot,
    TensorSpec,
)
from zbcompile.passes.graph.storage import storage_bytes
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_private import boxed, storage_key

Tensors = list[Tensor]
Registers = list[Tensor | None]

SHARD, LOOKUPS = -1, -2  # in place of a stage: a rank's shard of the output layer, of the embedding
LOSS_FACTOR = Slot(TANGENT, "loss")
RESIDENT = (PARAMETER, BUFFER, CONSTANT)
RESULTS = (WEIGHT_GRADIENT, PART, BUFFER_UPDATE, LOSS, OUTPUT, FITS)
OPENING = ("F", "S", "EMBED")  # passes that a microbatch begins with; they receive activations
RETURNING = ("B", "BW", "STATS", "EMBED_GRAD")  # passes that receive gradients
LATER = {
    "F": ("B", "W", "BW"),
    "B": ("W",),
    "S": ("STATS", "T"),
    "STATS": ("T",),
    "EMBED": ("EMBED_GRAD",),
}


@dataclass(frozen=True)
class Call:
    """One pass graph over registers.

    Attributes:
        run: Takes a list of inputs, which it empties, and returns the results.
        opens: Whether a microbatch begins with this pass.
        closes: Whether it ends with this pass.
        receives: The registers of received tensors, in order, as the graph was traced for them.
        takes: The registers of the inputs.
        frees: The registers that no later pass reads.
        accumulators: The registers of gradient buffers, with their parameters.
        saves: Results that later passes read, with their registers.
        sends: Results that other stages receive, in order.
        results: The results of the step: their slot and index.
    """

    run: Run
    opens: bool
    closes: bool
    receives: tuple[tuple[int, TensorSpec], ...]
    takes: tuple[int, ...]
    frees: tuple[int, ...]
    accumulators: tuple[tuple[int, str], ...]
    saves: tuple[tuple[int, int], ...]
    sends: tuple[tuple[int, TensorSpec], ...]
    results: tuple[tuple[Slot, int], ...]


@dataclass(frozen=True, eq=False)
class CompiledStage:
    """A stage ready to run.

    Attributes:
        receives: The tensors that arrive in messages for F and for B, in order. Generator state
            comes last.
        template: The registers of a microbatch before its F: parameters, buffers and constants
            are set, all others are None.
        inputs: The registers of batch inputs by path.
        generator_leaves: Whether generator state leaves with F, which `relay` continues.
        mergeable: Whether calls run the graphs as they are, so that a pair can be one graph.
        pairs: The graphs of a pass of this stage together with one of another (see
            `zbcompile.engine.rank`).
    """

    program: StageProgram
    device: torch.device
    receives: Mapping[str, tuple[TensorSpec, ...]]
    resident: Mapping[Slot, Tensor]
    template: tuple[Tensor | None, ...]
    calls: Mapping[str, Call]
    inputs: tuple[tuple[int, str], ...]
    loss_factor: int | None
    generator_leaves: bool
    relay: Relay
    mergeable: bool
    pairs: "WeakKeyDictionary[CompiledStage, dict[tuple[str, str], Run]]" = field(
        init=False, repr=False, default_factory=WeakKeyDictionary
    )

    @property
    def index(self) -> int:
        return self.program.stage


def prepare_stage(
    program: StageProgram,
    resident: Mapping[Slot, Tensor],
    device: torch.device,
    random_until: int,
    runs: Mapping[str, Run] | None = None,
) -> CompiledStage:
    """Binds a stage to its tensors.

    Args:
        random_until: The last stage that draws random numbers.
        runs: What a backend made of the graphs, by pass. Others run as FX code.
    """
    code = {name: boxed(graph.module).forward for name, graph in program.pieces.items()}
    code |= runs or {}
    registers = _registers(program)
    return CompiledStage(
        program=program,
        device=device,
        receives=received_specs(program, random_until, device),
        resident=resident,
        template=_template(registers, resident),
        calls={name: _call(program, name, code[name], registers) for name in program.pieces},
        inputs=tuple((at, slot.name) for slot, at in registers.items() if slot.role == BATCH),
        loss_factor=registers.get(LOSS_FACTOR),
        generator_leaves=program.stage < random_until,
        relay=Relay(device),
        mergeable=runs is None,
    )


def received_specs(
    program: StageProgram, random_until: int, device: torch.device
) -> dict[str, tuple[TensorSpec, ...]]:
    """Returns the tensors that arrive in messages for F and for B, in order.

    Generator state is sent with F up to stage `random_until`, behind the activations.
    """
    forward = tuple(program.receives.values())
    if 0 < program.stage <= random_until:
        size = gpu.generator_state(device).numel()
        forward += (TensorSpec((size,), (1,), "uint8", str(device)),)
    return {"F": forward, "B": tuple(program.gradients_in.values())}


def rebind(stage: CompiledStage, resident: Mapping[Slot, Tensor]) -> CompiledStage:
    """Returns the stage on other parameters, buffers and constants."""
    template = _template(_registers(stage.program), resident)
    return replace(stage, resident=resident, template=template)


def _template(
    registers: Mapping[Slot, int], resident: Mapping[Slot, Tensor]
) -> tuple[Tensor | None, ...]:
    return tuple(resident[slot] if slot.role in RESIDENT else None for slot in registers)


def _registers(program: StageProgram) -> dict[Slot, int]:
    slots = [slot for graph in program.pieces.values() for slot in graph.inputs]
    slots += [Slot(ACTIVATION, name) for name in program.receives]
    slots += [Slot(GRADIENT, name) for name in program.gradients_in]
    return {slot: place for place, slot in enumerate(dict.fromkeys(slots))}


def _call(program: StageProgram, name: str, run: Run, registers: Mapping[Slot, int]) -> Call:
    graph = program.pieces[name]
    later = [program.pieces[key] for key in LATER.get(name, ()) if key in program.pieces]
    read_later = {slot for piece in later for slot in piece.inputs}
    received, sent = dict[Slot, TensorSpec](), dict[Slot, TensorSpec]()
    if name in OPENING:
        received = {Slot(ACTIVATION, n): spec for n, spec in program.receives.items()}
        sent = {Slot(ACTIVATION, n): spec for n, spec in program.sends.items()}
    if name in RETURNING:
        received = {Slot(GRADIENT, n): spec for n, spec in program.gradients_in.items()}
    sent |= {Slot(GRADIENT, n): spec for n, spec in program.gradients_out.items()}
    results = {slot: at for at, slot in enumerate(graph.outputs)}
    return Call(
        run=run,
        opens=name in OPENING,
        closes=not later,
        receives=tuple((registers[slot], spec) for slot, spec in received.items()),
        takes=tuple(registers[slot] for slot in graph.inputs),
        frees=tuple(
            place
            for slot, place in registers.items()
            if slot.role not in RESIDENT and slot != LOSS_FACTOR and slot not in read_later
        ),
        accumulators=tuple(
            (registers[slot], slot.name) for slot in graph.inputs if slot.role == ACCUMULATOR
        ),
        saves=tuple(
            (at, registers[slot])
            for slot, at in results.items()
            if slot.role == SAVED and slot in read_later
        ),
        sends=tuple((results[slot], spec) for slot, spec in sent.items() if slot in results),
        results=tuple((slot, at) for slot, at in results.items() if slot.role in RESULTS),
    )


@dataclass
class StageRun:
    """A stage during one step. Methods are called without gradient recording.

    Attributes:
        stages: The stage as each microbatch runs it.
        rows: The rows of each sum that belong to a shard of the output layer; None: all.
        frames: The registers of each microbatch that has begun and not ended.
        outputs: The leaves of the model's output that this stage computes, by microbatch.
        fits: Whether tokens had room in an exchange between experts.
        accumulators: The gradient buffers of each pass, with their registers.
    """

    stages: Sequence[CompiledStage]
    gradients: Gradients
    inputs: list[dict[str, Tensor]]
    loss_factor: Tensor
    seeds: list[int]
    rows: slice | None = None
    frames: dict[int, Registers] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    fits: list[Tensor] = field(default_factory=list)
    accumulators: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)

    @property
    def index(self) -> int:
        return self.stages[0].index

    def run(self, name: str, microbatch: int, received: Tensors) -> Tensors:
        """Runs a pass on the tensors received for it, and returns those to send."""
        call = self.call(name, microbatch)
        return self.end(call, microbatch, call.run(self.begin(call, microbatch, received)))

    def call(self, name: str, microbatch: int) -> Call:
        return self.stages[microbatch].calls[name]

    def begin(self, call: Call, microbatch: int, received: Tensors) -> Tensors:
        """Returns the inputs of a pass, in the order of its graph."""
        if call.opens:
            stage = self.stages[microbatch]
            inputs = self.inputs[microbatch]
            frame = self.frames[microbatch] = list(stage.template)
            if stage.loss_factor is not None:
                frame[stage.loss_factor] = self.loss_factor
            for place, path in stage.inputs:
                frame[place] = inputs[path]
            if len(stage.receives["F"]) > len(stage.program.receives):  # generator state arrives
                stage.relay.continue_from(received.pop(), self.seeds[microbatch])
            elif stage.program.random or stage.generator_leaves:
                seed_generators(self.seeds[microbatch], stage.device)
        frame = self.frames.pop(microbatch) if call.closes else self.frames[microbatch]
        if received or call.receives:
            for (place, spec), value in zip(call.receives, received, strict=True):
                frame[place] = laid_out(value, spec)
            received.clear()
        if call.accumulators:
            key = id(call.accumulators)  # hashing all names takes longer than a small pass
            if key not in self.accumulators:  # the first pass of the step creates the buffers
                buffers = [
                    (at, self.gradients[n].buffer(self.index)) for at, n in call.accumulators
                ]
                if self.rows is not None:
                    buffers = [(at, buffer[self.rows]) for at, buffer in buffers]
                self.accumulators[key] = buffers
            for place, buffer in self.accumulators[key]:
                frame[place] = buffer
        values = [frame[place] for place in call.takes]
        for place in call.frees:
            frame[place] = None
        return values  # type: ignore[return-value]

    def end(self, call: Call, microbatch: int, results: Sequence[Tensor]) -> Tensors:
        """Stores the results of a pass, and returns the tensors to send."""
        if call.saves:
            frame = self.frames[microbatch]
            for at, place in call.saves:
                frame[place] = results[at]
        for (role, name), at in call.results:
            self._store(role, name, microbatch, results[at])
        sends = [laid_out(results[at], spec) for at, spec in call.sends] if call.sends else []
        if call.opens and (stage := self.stages[microbatch]).generator_leaves:
            sends.append(stage.relay.leave())
        return sends

    def _store(self, role: str, name: str, microbatch: int, value: Tensor) -> None:
        if role == WEIGHT_GRADIENT:
            self.gradients[name].add(self.index, microbatch, value)
        elif role == PART:
            self.gradients.parts.setdefault(name, {})[microbatch] = value
        elif role == BUFFER_UPDATE:
            self.stages[microbatch].resident[Slot(BUFFER, name)].copy_(value)
        elif role == LOSS:
            self.losses[microbatch] = value
        elif role == OUTPUT:
            self.outputs.setdefault(name, {})[microbatch] = value
        else:
            self.fits.append(value)

    def live_bytes(self) -> int:
        """Returns the bytes of the storages in the registers, without parameters, buffers,
        constants, batch inputs and the loss factor."""
        resident = {id(value): value for stage in self.stages for value in stage.resident.values()}
        inputs = [value for microbatch in self.inputs for value in microbatch.values()]
        ignored = {storage_key(v) for v in (*resident.values(), *inputs, self.loss_factor)}
        values = (value for frame in self.frames.values() for value in frame)
        return storage_bytes((value for value in values if value is not None), ignored)

    def check_empty(self) -> None:
        """Raises PipelineError if a microbatch has not ended, which is a bug of the schedule."""
        if self.frames:
            owner = f"stage {self.index}" if self.index >= 0 else "a vocabulary shard"
            raise PipelineError(
                f"{owner} ended the step with microbatches {sorted(self.frames)} still waiting for"
                " their weight gradients; the schedule must give every F its B and W, and every S"
                " its T."
            )
