"""Preparing a stage to run: every value gets a register, every piece of its graphs a plan of
registers.

At run time a microbatch is one list of values, the registers; a pass fetches its inputs by index,
frees those that no later pass reads, and stores what it keeps. Everything that can be decided
beforehand is decided here, once per program.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch

from zbcompile.backends.types import Run
from zbcompile.model.seeds import Relay
from zbcompile.passes import gpu
from zbcompile.passes.graph.roles import Slot, TensorSpec
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_private import boxed

RESIDENT = ("parameter", "buffer", "constant")
LOSS_FACTOR = Slot("tangent", "loss")
_FOLLOWS = {
    "F": ("B", "W", "BW"),
    "B": ("W",),
    "W": (),
    "BW": (),
    "S": ("STATS", "T"),
    "STATS": ("T",),
    "T": (),
    "LOOKUP": ("SPREAD",),
    "SPREAD": (),
}
_OPEN = ("F", "S", "LOOKUP")  # passes that begin with a microbatch, and receive activations
_RETURN = ("B", "BW", "STATS", "SPREAD")  # passes that receive gradients
_REPORTS = ("buffer_update", "output", "fits", "loss")
# in place of a stage: a rank's shard of the output layer, and of the embedding
SHARD, LOOKUPS = (
    -1,
    -2,
)
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One piece as a call: which registers it takes, which of them it frees, and where its results
    go.

    `run` takes a list, which it empties. `arrives` are (register, spec) and `sends` (result, spec)
    in the order in which boundary tensors travel, `saves` (result, register), `gradients`
    (parameter, results: one per use, see `zbcompile.passes.partition.shared_parameters`), `parts`
    (result, part of a gradient that several stages compute), `mutations` (result, buffer),
    `outputs` (result, leaf of the model's output), `fits`
    (result, exchange of tokens); `loss` is a result or None. `opens` says that a microbatch begins
    with this pass, `closes` that none follows, `reports` that it has any of the last four.
    """

    run: Run
    opens: bool
    closes: bool
    reports: bool
    arrives: tuple[tuple[int, TensorSpec], ...]
    takes: tuple[int, ...]
    frees: tuple[int, ...]
    accumulators: tuple[tuple[int, str], ...]
    saves: tuple[tuple[int, int], ...]
    sends: tuple[tuple[int, TensorSpec], ...]
    gradients: tuple[tuple[str, tuple[int, ...]], ...]
    parts: tuple[tuple[int, str], ...]
    mutations: tuple[tuple[int, str], ...]
    outputs: tuple[tuple[int, str], ...]
    fits: tuple[tuple[int, str], ...]
    loss: int | None


@dataclass(frozen=True, eq=False)
class CompiledStage:
    """A stage ready to run.

    Attributes:
        receives: The tensors that arrive in messages for F and for B, in order. Generator state
            comes last.
        template: The registers of a microbatch before its F: parameters, buffers and constants
            are set, all others are None.
        inputs: The registers of batch inputs by path.
        passing: The registers that hold values of one microbatch only.
        generator_leaves: Whether generator state leaves with F, which `relay` continues.
        mergeable: Whether calls run the graphs as they are, so that a pair can be one graph.
        pairs: The graphs of a pass of this stage together with one of another (see
            `zbcompile.engine.rank`).
    """

    program: StageProgram
    device: torch.device
    receives: Mapping[str, tuple[TensorSpec, ...]]
    resident: Mapping[Slot, torch.Tensor]
    template: tuple[torch.Tensor | None, ...]
    calls: Mapping[str, Call]
    inputs: tuple[tuple[int, str], ...]
    loss_factor: int | None
    passing: tuple[int, ...]
    generator_leaves: bool
    relay: Relay
    mergeable: bool
    pairs: "WeakKeyDictionary[CompiledStage, dict[tuple[str, str], Run | None]]" = field(
        init=False, repr=False, default_factory=WeakKeyDictionary
    )

    @property
    def index(self) -> int:
        return self.program.stage

    @property
    def generator_arrives(self) -> bool:
        """Whether generator state arrives with F."""
        return len(self.receives["F"]) > len(self.program.receives)

    def with_runs(self, runs: Mapping[str, Run]) -> "CompiledStage":
        """The stage with other code for some passes, each of which runs on its own."""
        calls = {
            name: replace(call, run=runs.get(name, call.run)) for name, call in self.calls.items()
        }
        return replace(self, calls=calls, mergeable=False)


def prepare_stage(
    program: StageProgram,
    resident: Mapping[Slot, torch.Tensor],
    device: torch.device,
    random_until: int,
    runs: Mapping[str, Run] | None = None,
) -> CompiledStage:
    """Bind a stage program to its tensors. `runs` are what a backend made of its graphs, by pass;
    without them the graphs run as FX code. Either way a call frees its inputs as it uses them."""
    code = runs or {name: boxed(piece.module).forward for name, piece in program.pieces.items()}
    registers = _registers(program)
    index = program.stage
    return CompiledStage(
        program=program,
        device=device,
        receives=received_specs(program, random_until, device),
        resident=resident,
        template=_template(registers, resident),
        calls={name: _call(program, name, code[name], registers) for name in program.pieces},
        inputs=tuple(
            (place, slot.name) for slot, place in registers.items() if slot.role == "batch"
        ),
        loss_factor=registers.get(LOSS_FACTOR),
        passing=tuple(place for slot, place in registers.items() if _passes(slot)),
        generator_leaves=index < random_until,
        relay=Relay(device),
        mergeable=runs is None,
    )


def received_specs(
    program: StageProgram, random_until: int, device: torch.device
) -> dict[str, tuple[TensorSpec, ...]]:
    """Returns the tensors that arrive in messages for F and for B, in order.

    Generator state travels with F up to stage `random_until`, behind the activations.
    """
    forward = tuple(program.receives.values())
    if 0 < program.stage <= random_until:
        size = gpu.generator_state(device).numel()
        forward += (TensorSpec((size,), (1,), "uint8", str(device)),)
    return {"F": forward, "B": tuple(program.gradients_in.values())}


def rebind(stage: CompiledStage, resident: Mapping[Slot, torch.Tensor]) -> CompiledStage:
    """`stage` on other resident tensors."""
    return replace(
        stage, resident=resident, template=_template(_registers(stage.program), resident)
    )


def _template(
    registers: Mapping[Slot, int], resident: Mapping[Slot, torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    return tuple(resident[slot] if slot.role in RESIDENT else None for slot in registers)


def _registers(program: StageProgram) -> dict[Slot, int]:
    """A register for everything that a piece reads or that arrives."""
    slots = [slot for piece in program.pieces.values() for slot in piece.inputs]
    slots += [Slot("activation", name) for name in program.receives]
    slots += [Slot("gradient", name) for name in program.gradients_in]
    return {slot: place for place, slot in enumerate(dict.fromkeys(slots))}


def _passes(slot: Slot) -> bool:
    return slot.role not in RESIDENT and slot != LOSS_FACTOR


def _call(program: StageProgram, name: str, run: Run, registers: Mapping[Slot, int]) -> Call:
    piece = program.pieces[name]
    follow = [program.pieces[later] for later in _FOLLOWS[name] if later in program.pieces]
    kept = {slot for later in follow for slot in later.inputs}
    places = {slot: place for place, slot in enumerate(piece.outputs)}
    by_name: dict[str, list[int]] = {}
    for at, parameter in _named(piece, "weight_gradient"):
        by_name.setdefault(parameter, []).append(at)
    roles = {slot.role for slot in piece.outputs}
    return Call(
        run=run,
        opens=name in _OPEN,
        closes=not follow,
        reports=not roles.isdisjoint(_REPORTS),
        arrives=tuple((registers[slot], spec) for slot, spec in arriving(program, name).items()),
        takes=tuple(registers[slot] for slot in piece.inputs),
        frees=tuple(
            place for slot, place in registers.items() if _passes(slot) and slot not in kept
        ),
        accumulators=tuple(
            (registers[slot], slot.name) for slot in piece.inputs if slot.role == "accumulator"
        ),
        saves=tuple(
            (at, registers[slot])
            for slot, at in places.items()
            if slot.role == "saved" and slot in kept
        ),
        sends=tuple((places[slot], spec) for slot, spec in leaving(program, name).items()),
        gradients=tuple((name, tuple(places)) for name, places in by_name.items()),
        parts=_named(piece, "part"),
        mutations=_named(piece, "buffer_update"),
        outputs=_named(piece, "output"),
        fits=_named(piece, "fits"),
        loss=next((place for slot, place in places.items() if slot.role == "loss"), None),
    )


def arriving(program: StageProgram, name: str) -> dict[Slot, TensorSpec]:
    """The slots of what arrives for a pass, in the order in which it travels."""
    down = (
        {Slot("activation", each): spec for each, spec in program.receives.items()}
        if name in _OPEN
        else {}
    )
    return down | (
        {Slot("gradient", each): s for each, s in program.gradients_in.items()}
        if name in _RETURN
        else {}
    )


def leaving(program: StageProgram, name: str) -> dict[Slot, TensorSpec]:
    """The slots of what a pass makes for others, in the order in which it travels."""
    slots = (
        {Slot("activation", each): spec for each, spec in program.sends.items()}
        if name in _OPEN
        else {}
    )
    slots |= {Slot("gradient", each): spec for each, spec in program.gradients_out.items()}
    return {slot: spec for slot, spec in slots.items() if slot in program.pieces[name].outputs}


def _named(piece: PassGraph, kind: str) -> tuple[tuple[int, str], ...]:
    """The results of one kind."""
    return tuple(
        (place, slot.name) for place, slot in enumerate(piece.outputs) if slot.role == kind
    )
