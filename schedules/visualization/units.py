"""Timelines in readable units, such as milliseconds and mebibytes in place of seconds and bytes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zbcompile.schedules.simulation.timeline import Timeline

TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
FLOPS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))
SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def in_units(timelines: Sequence[Timeline], bytes_known: bool = True) -> list[Timeline]:
    """The same timelines, which are in seconds (or FLOPs) and bytes, in units that fit the longest and the largest of
    them; unless `bytes_known`, what they hold stays as it is."""
    units = FLOPS if timelines[0].costs.time_unit == "FLOP" else TIMES
    time, time_unit = _unit(max(t.finish for t in timelines), units)
    largest = max(max(t.peak_memory) for t in timelines)
    size, memory_unit = _unit(largest, SIZES) if bytes_known else (1, "")
    return [_scaled(t, time, size, time_unit, memory_unit) for t in timelines]


def in_flops(timeline: Timeline, speed: float) -> Timeline:
    """A timeline in seconds of a device that does `speed` FLOPs in each, in FLOPs."""
    return _scaled(timeline, 1 / speed, 1, "FLOP", "")


def for_trace(timeline: Timeline) -> Timeline:
    """A timeline in seconds and bytes, in the milliseconds and bytes that a Chrome trace takes."""
    return _scaled(timeline, 1e-3, 1, "ms", "B")


def _unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit of which the amount is at least 1.5."""
    return next((unit for unit in units if largest >= 1.5 * unit[0]), units[-1])


def _scaled(timeline: Timeline, time: float, size: float, time_unit: str, memory_unit: str) -> Timeline:
    costs = timeline.costs
    units = dict.fromkeys(("activation", "residue", "vocab_state"), size)
    units |= dict.fromkeys(("optimizer", "forward_exchange", "backward_exchange"), time)
    values: dict[str, Any] = {name: tuple(v / unit for v in getattr(costs, name)) for name, unit in units.items()}
    scaled = replace(
        costs,
        **values,
        comm=costs.comm / time,
        bandwidth=None if costs.bandwidth is None else costs.bandwidth * time,
        time_unit=time_unit,
        memory_unit=memory_unit,
    )
    start, end = ([moment / time for moment in moments] for moments in (timeline.start, timeline.end))
    peaks, limits = (tuple(amount / size for amount in each) for each in (timeline.peak_memory, timeline.memory_limits))
    return Timeline(timeline.graph, scaled, start, end, peaks, limits)
