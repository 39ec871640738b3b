"""The cuts of a model, for reports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cuts:
    """`after[i]` is the index in the line of the last node of stage i (the last stage ends the
    line), `names[i]` the name of that node. `loads[stage]` is what a stage weighs,
    `rank_loads[rank]` the sum over the rank's stages, both in `unit`; `boundary[i]` the bytes that
    cross the cut behind stage i in one microbatch. `overweight` is a sentence about what keeps the
    loads from being even; empty if they are.
    """

    after: tuple[int, ...]
    names: tuple[str, ...]
    basis: str
    unit: str
    loads: tuple[float, ...]
    rank_loads: tuple[float, ...]
    boundary: tuple[int, ...]
    overweight: str = ""
