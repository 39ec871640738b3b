"""Compiled graphs by their keys: what a capture freezes into them.

An export depends on shapes and modes (the key) and on the state of modules and loss
(`ModuleState`). All ranks of a pipeline have the whole batch, and so the same key.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from zbcompile.batches.batch import Microbatch
from zbcompile.engine.executable import BoundGraphs, Executable, plan_step
from zbcompile.passes.module_state import ModuleState
from zbcompile.passes.torch_private import attention_priority, gradient_dtype
from zbcompile.passes.torch_private_hooks import hooks_of
from zbcompile.program.program import Program
from zbcompile.schedules import Schedule


class TorchModes(NamedTuple):
    """The modes of torch that capture freezes into the graphs, and those that forward may read."""

    autocast: torch.dtype | None
    attention_kernels: tuple[Any, ...]
    default_dtype: torch.dtype
    other_modes: tuple[Any, ...]


def torch_modes(device: torch.device) -> TorchModes:
    """Returns the present modes of torch for a device."""
    cuda, autocast = torch.backends.cuda, torch.is_autocast_enabled(device.type)
    kernels = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
        attention_priority(),
    )
    modes = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
    )
    dtype = torch.get_autocast_dtype(device.type) if autocast else None
    return TorchModes(dtype, kernels, torch.get_default_dtype(), modes)


class GraphKey(NamedTuple):
    """The values for which the graphs of a step are specialised.

    `inputs` is the form of a microbatch, `model` what a step assumes about the module
    (`ModelBinding.checked_state`), `returns` what a step returns besides its loss.
    """

    inputs: tuple[Any, ...]
    model: tuple[Any, ...]
    modes: TorchModes
    returns: str


KeyDetails = dict[str, Any]  # the values behind a key by their names


def key_details(model: nn.Module, key: GraphKey) -> KeyDetails:
    """Returns the values behind the key of a step of `model`, for a notice that says how two keys
    differ."""
    details: KeyDetails = {"inputs": key.inputs, "returned values": key.returns}
    for name, module in model.named_modules():
        path = f"model.{name}".rstrip(".")
        details |= {f"{path}.training": module.training, f"hooks of {path}": hooks_of(module)}
    for name, parameter in model.named_parameters():
        dtype = gradient_dtype(parameter) if parameter.requires_grad else None
        details[f"gradients of model.{name}"] = dtype
    return details | {name.replace("_", " "): value for name, value in key.modes._asdict().items()}


def recompile_reason(
    microbatch: Microbatch, new: KeyDetails, cached: Collection[KeyDetails]
) -> str:
    """Returns how a key differs from the nearest of the cached keys, for a notice; "" if it is in
    what the module state says."""
    near = min(cached, key=lambda old: len(new.items() ^ old.items()), default={})
    changed = [name for name in new if new[name] != near.get(name)]
    reasons = [f"microbatches of {microbatch.summary()}"] if "inputs" in changed else []
    others = [name for name in changed if name != "inputs"] if near else []
    for name in others[:1]:
        value, more = new[name], f" and {len(others) - 1} more" * (len(others) > 1)
        change = f"other {name}" if isinstance(value, tuple) else f"{name}: {near[name]} -> {value}"
        reasons.append(change + more)
    return " and ".join(reasons)


@dataclass(frozen=True, eq=False)
class CompiledGraphs:
    """The graphs that were compiled for a key: those of one microbatch of a step, or those of each
    microbatch of an evaluation. They are valid while the module state is unchanged."""

    graphs: tuple[BoundGraphs, ...]
    state: ModuleState | None = None
    details: KeyDetails | None = None
    key: Any = None

    def is_valid(self) -> bool:
        return not self.change()

    def change(self) -> str:
        """Returns the first value of the module state that has changed, "" if none has."""
        return "" if self.state is None else self.state.change()


@dataclass
class GraphCache:
    """At most `limit` entries, the least recently used first. A new entry evicts the oldest, but
    never `first`."""

    limit: int
    first: CompiledGraphs | None = None
    entries: list[CompiledGraphs] = field(default_factory=list)
    plans: dict[tuple[int, ...], Executable] = field(default_factory=dict)

    def find(self, key: Any) -> CompiledGraphs | None:
        """Returns the valid entry of a key, which becomes the most recently used one."""
        for entry in reversed(self.entries):
            if entry.key == key and entry.is_valid():
                self.entries.remove(entry)
                self.entries.append(entry)
                return entry
        return None

    def change(self, key: Any) -> str:
        """Returns what has changed in the module state since the last entry of a key."""
        return next((entry.change() for entry in reversed(self.entries) if entry.key == key), "")

    def add(self, entry: CompiledGraphs) -> bool:
        """Adds an entry. Returns True if that evicts another one."""
        excess = len(self.entries) + 1 - self.limit
        evictable = [old for old in self.entries if old is not self.first]
        evicted = evictable[: max(0, excess)]
        self.entries = [old for old in self.entries if old not in evicted] + [entry]
        self.plans.clear()
        return bool(evicted)

    def plan(
        self,
        graphs: Sequence[BoundGraphs],
        order: Callable[[Program, int], Schedule],
        ranks: Sequence[int],
    ) -> Executable:
        """Returns the executable of microbatches that run these graphs, in the order that `order`
        has for as many microbatches."""
        key = tuple(part.number for part in graphs)
        if key not in self.plans:
            if len(self.plans) >= self.limit:
                self.plans.clear()
            self.plans[key] = plan_step(graphs, order(graphs[0].program, len(graphs)), ranks)
        return self.plans[key]

    def clear(self) -> None:
        self.first = None
        self.entries.clear()
        self.plans.clear()
