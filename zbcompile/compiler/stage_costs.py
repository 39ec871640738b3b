"""The costs of a schedule's passes, from the costs of compiled stages."""

from collections.abc import Sequence
from typing import Any

from zbcompile.passes.cost.stage_cost import StageCost
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.schedules import Costs


def costs_of(stages: Sequence[StageProgram], costs: Sequence[StageCost], **links: Any) -> Costs:
    """Returns the costs of stages in seconds and bytes; `links` are the fields for messages."""
    forward, backward, weight = (
        tuple(cost.seconds.get(op, 0.0) for cost in costs) for op in ("F", "B", "W")
    )
    hideable = {op: tuple(cost.hideable.get(op, 0.0) for cost in costs) for op in ("F", "B")}
    return Costs(
        forward,
        backward,
        weight,
        saved=tuple(cost.fused_saving for cost in costs),
        forward_exchange=hideable["F"],
        backward_exchange=hideable["B"],
        time_unit="s",
        **bytes_of(stages),
        **links,
    )


def bytes_of(stages: Sequence[StageProgram]) -> dict[str, Any]:
    """Returns what a microbatch keeps between the passes, and sends, as fields of costs."""
    return {
        "activation": tuple(stage.crossing.kept for stage in stages),
        "residue": tuple(stage.crossing.residue for stage in stages),
        "message": tuple(stage.message_bytes("F") for stage in stages),
        "memory_unit": "B",
    }
