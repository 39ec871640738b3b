"""The price of a compiled stage: seconds and bytes of its passes, from its graphs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zbcompile.passes.compile_options import Choices
from zbcompile.passes.machine.hardware import Hardware, hardware_for
from zbcompile.passes.machine.roofline import kernel_seconds, seconds_of
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.peak_memory import transient_bytes
from zbcompile.passes.stage.stage_program import Collective, StageProgram, collectives_of
from zbcompile.schedules import Costs


class StagePrice(NamedTuple):
    """What a stage takes of a microbatch.

    * `seconds` of F, B and W, with their exchanges; `again`: of B's those in which it recomputes;
      `exchange`: of F's and B's those in which they wait for exchanges that a W can hide; `saved`
      by BW in place of B and W.
    * Bytes: `kept` for B and then, as `residue`, for W; `running`, by pass, the most alive while it
      runs, if messages are from other ranks; `message` to the stage behind it.
    """

    seconds: tuple[float, float, float]
    again: float
    exchange: tuple[float, float]
    kept: float
    residue: float
    running: Mapping[str, float]
    message: float
    saved: float = 0.0


def price_of(
    stage: StageProgram,
    hardware: Hardware,
    choices: Choices,
    device: str,
) -> StagePrice:
    """The price of a compiled stage."""
    times = {op: pass_seconds(piece, hardware) for op, piece in stage.pieces.items()}
    forward, backward, weight = (times.get(op, 0.0) for op in "FBW")
    saved = max(0.0, backward + weight - times["BW"]) if "BW" in times else 0.0
    (all_f, hides_f), (all_b, hides_b) = (exchange_of(stage, op, choices, device) for op in "FB")
    sizes = stage.crossing.kept, stage.crossing.residue, running_bytes(stage), stage.send_bytes
    seconds, again = (
        (forward + all_f, backward + all_b, weight),
        recomputed_seconds(stage, hardware),
    )
    return StagePrice(seconds, again, (hides_f, hides_b), *sizes, saved)


def running_bytes(stage: StageProgram) -> dict[str, int]:
    """Returns the peak bytes of a microbatch in each pass."""
    aside = {"B": stage.crossing.kept - stage.crossing.forward_to_backward}  # what only W reads
    return {op: transient_bytes(stage, op) + aside.get(op, 0) for op in stage.pieces}


def pass_seconds(piece: PassGraph, hardware: Hardware) -> float:
    """Seconds of a pass without its exchanges."""
    return 0.0 if piece.empty else hardware.start + seconds_of(piece.module, hardware)


def recomputed_seconds(stage: StageProgram, hardware: Hardware) -> float:
    """Seconds of B in which it runs operations of the forward again."""
    if "B" not in stage.pieces or stage.recomputed is None:
        return 0.0
    kernels = kernel_seconds(stage.pieces["B"].module, hardware)
    return sum(seconds for nodes, seconds in kernels if nodes[0].meta.get("pass") == "recompute")


def exchange_seconds(collective: Collective, choices: Choices, device: str) -> float:
    """The time of a collective on the hardware."""
    return (choices.hardware or hardware_for(device)).exchange_seconds(
        collective.bytes, collective.kind
    )


def exchange_of(stage: StageProgram, op: str, choices: Choices, device: str) -> tuple[float, float]:
    """Seconds for which a pass waits for collectives: for all of them, and for those that a W can
    hide. Operators that wait for their own exchange hide behind nothing."""
    found = [
        (each.hides, exchange_seconds(each, choices, device))
        for each in collectives_of(stage)
        if each.name == op
    ]
    return sum(seconds for _, seconds in found), sum(seconds for hides, seconds in found if hides)


def costs_of(prices: Sequence[StagePrice], **others: Any) -> Costs:
    """The costs of stages with these prices."""
    forward, backward, weight = zip(*(each.seconds for each in prices), strict=True)
    in_forward, in_backward = zip(*(each.exchange for each in prices), strict=True)
    return Costs(
        forward,
        backward,
        weight,
        activation=tuple(each.kept for each in prices),
        residue=tuple(each.residue for each in prices),
        message=tuple(each.message for each in prices),
        saved=tuple(each.saved for each in prices),
        forward_exchange=in_forward,
        backward_exchange=in_backward,
        time_unit="s",
        memory_unit="B",
        **others,
    )


def bytes_of(stages: Sequence[StageProgram]) -> dict[str, Any]:
    """What microbatches hold between the passes, and send, as fields of costs."""
    return {
        "activation": tuple(stage.crossing.kept for stage in stages),
        "residue": tuple(stage.crossing.residue for stage in stages),
        "message": tuple(stage.send_bytes for stage in stages),
        "memory_unit": "B",
    }


def running_of(prices: Sequence[StagePrice]) -> dict[str, tuple[float, ...]]:
    """By pass, for each stage: the most that is alive of a microbatch while it runs."""
    ops = {op for each in prices for op in each.running}
    return {op: tuple(each.running.get(op, 0) for each in prices) for op in ops}
