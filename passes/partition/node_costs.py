"""Loads: the weight of each node of the line, by which the line is cut into stages of equal weight."""

from math import fsum

from torch.fx import Node

from zbcompile.passes.gpu import kind_of
from zbcompile.passes.graph.process_groups import exchanged_bytes, is_collective, is_wait
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.machine.hardware import Hardware, hardware_for
from zbcompile.passes.machine.roofline import node_seconds
from zbcompile.passes.partition.inside_calls import CallPasses
from zbcompile.passes.partition.liveness import Line

BACKWARD = 2  # a backward costs about twice its forward: one product for the input's gradient, one for the weight's


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
    """F, B and W of an operator that stands for a call. A W exchanges nothing: sums over ranks come once per step.

    The passes are sets, whose order differs between processes. An exact sum does not depend on it, so all ranks cut
    alike where two cuts are equally good.
    """
    work = fsum(node_seconds(node, inside.flops[node], hardware) for nodes in inside.passes for node in nodes)
    return work + fsum(_exchange_seconds(node, hardware) for nodes in inside.passes[:2] for node in nodes)


def _exchange_seconds(node: Node, hardware: Hardware) -> float:
    """What a collective takes, counted where it is issued."""
    if not is_collective(node) or is_wait(node):
        return 0.0
    return hardware.exchange_seconds(exchanged_bytes(node), node.target.overloadpacket.__name__)  # type: ignore


def device_of(line: Line) -> str:
    """The type of the device that the line computes on."""
    devices = (kind_of(t.device) for node in line.nodes for t in tensors_of(node.meta["val"]))
    return next(devices, "cpu")
