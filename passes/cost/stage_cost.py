"""The cost of a compiled stage: seconds and peak bytes of its passes, from its graphs."""

from collections.abc import Mapping
from dataclasses import dataclass

from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.cost.node_cost import graph_seconds
from zbcompile.passes.stage.peak_memory import transient_bytes
from zbcompile.passes.stage.stage_program import StageProgram, collectives_of


@dataclass(frozen=True)
class StageCost:
    """The cost of one microbatch on one stage.

    Attributes:
        seconds: The duration of each pass ("F", "B", "W", "BW"), with its collectives.
        hideable: Seconds of the collectives of each pass that a W can run beside.
        peak: The most bytes that are alive while a pass runs, with what waits for later passes.
    """

    seconds: Mapping[str, float]
    hideable: Mapping[str, float]
    peak: Mapping[str, int]

    @property
    def fused_saving(self) -> float:
        """The seconds by which BW is shorter than B and W."""
        split = self.seconds.get("B", 0.0) + self.seconds.get("W", 0.0)
        return max(0.0, split - self.seconds["BW"]) if "BW" in self.seconds else 0.0


def stage_cost(stage: StageProgram, hardware: Hardware) -> StageCost:
    """Returns the cost of a stage on a machine."""
    seconds = {
        op: graph_seconds(piece.module.graph, hardware) for op, piece in stage.pieces.items()
    }
    hideable = dict.fromkeys(stage.pieces, 0.0)
    for collective in collectives_of(stage):
        duration = hardware.collective_seconds(collective.bytes, collective.kind)
        seconds[collective.name] += duration
        if collective.hides:
            hideable[collective.name] += duration
    only_in_w = stage.crossing.kept - stage.crossing.forward_to_backward
    peak = {op: transient_bytes(stage, op) + (only_in_w if op == "B" else 0) for op in stage.pieces}
    return StageCost(seconds, hideable, peak)
