"""Loads: the weight of each node of the line, by which the line is cut into stages of equal weight."""

import hashlib
from collections.abc import Mapping
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.gpu import kind_of
from zbcompile.passes.graph.fx import on_any_device
from zbcompile.passes.graph.process_groups import exchanged_bytes, is_collective, is_wait
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.machine.hardware import Hardware, hardware_for
from zbcompile.passes.machine.roofline import node_seconds
from zbcompile.passes.partition.inside_calls import CallPasses
from zbcompile.passes.partition.liveness import Line, held_behind

BACKWARD = 2  # a backward costs about twice its forward: one product for the input's gradient, one for the weight's


def loads_of(
    line: Line, basis: str, seconds: Mapping[str, float], hardware: Hardware | None = None
) -> tuple[list[float], str]:
    """The load of each node of the line by `basis` ("flops", "measured" or "parameters"), and its unit. `seconds` are
    the measured times, by `kernel_key`; `hardware` is what runs the operations for "flops"."""
    if basis == "parameters":
        return parameter_counts(line), "parameters"
    return (measured_seconds(line, seconds) if basis == "measured" else predicted_seconds(line, hardware)), "s"


def predicted_seconds(line: Line, hardware: Hardware | None = None) -> list[float]:
    """Forward and backward of each node on `hardware`, by default at the nominal speeds of the device."""
    hardware, seconds = hardware or hardware_for(device_of(line)), []
    for node in line.nodes:
        if node in line.inside:
            seconds.append(_call_seconds(line.inside[node], hardware))
            continue
        trains = bool(node.meta["differentiable"])
        forward = node_seconds(node, line.flops.get(node, 0), hardware)
        exchange = _exchange_seconds(node, hardware)
        seconds.append(forward * (1 + BACKWARD * trains) + exchange * (1 + trains))
    return seconds


def _call_seconds(inside: CallPasses, hardware: Hardware) -> float:
    """F, B and W of an operator that stands for a call. A W exchanges nothing: sums over ranks come once per step."""
    work = sum(node_seconds(node, inside.flops[node], hardware) for nodes in inside.passes for node in nodes)
    return work + sum(_exchange_seconds(node, hardware) for nodes in inside.passes[:2] for node in nodes)


def _exchange_seconds(node: Node, hardware: Hardware) -> float:
    """What a collective takes, counted where it is issued."""
    if not is_collective(node) or is_wait(node):
        return 0.0
    return hardware.exchange_seconds(exchanged_bytes(node), node.target.overloadpacket.__name__)  # type: ignore


def device_of(line: Line) -> str:
    """The type of the device that the line computes on."""
    devices = (kind_of(t.device) for node in line.nodes for t in tensors_of(node.meta["val"]))
    return next(devices, "cpu")


def parameter_counts(line: Line) -> list[float]:
    """Elements of the parameters that each node is the first to use."""
    seen: set[str] = set()
    counts = []
    on_line = frozenset(line.nodes)
    for node in line.nodes:
        new = {h.meta["slot"].name: h for h in held_behind(node, on_line) if h.meta["slot"].kind == "parameter"}
        counts.append(float(sum(h.meta["val"].numel() for name, h in new.items() if name not in seen)))
        seen |= set(new)
    return counts


def measured_seconds(line: Line, seconds: Mapping[str, float]) -> list[float]:
    """Forward and backward of each node as measured; `seconds` is by `kernel_key`, views take no time."""
    return [seconds.get(kernel_key(node), 0.0) for node in line.nodes]


def kernel_key(node: Node) -> str:
    """A key shared by nodes that call the same operation with equal arguments, on tensors of the same form, whichever
    device of its kind they are on: ranks put together what each has measured."""
    arguments = map_arg((node.args, node.kwargs), lambda argument: _form(argument))  # type: ignore[arg-type, return-value]
    return hashlib.sha256(on_any_device(repr((str(node.target), arguments))).encode()).hexdigest()[:16]


def _form(node: Node) -> Any:
    tensors = [(tuple(t.shape), t.stride(), str(t.dtype), t.device.type) for t in tensors_of(node.meta["val"])]
    return (tensors or repr(node.meta["val"]), bool(node.meta.get("differentiable")))
