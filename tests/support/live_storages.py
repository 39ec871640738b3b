"""An independent count of the storages that are alive, and what a forward-only run may hold of them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.stage.peak_memory import transient_bytes
from zbcompile.program.program import Program


class Alive(TorchDispatchMode):
    """Adds up, after every operation, the storages that are alive: those of `values`, and all made since."""

    def __init__(self, values: list[torch.Tensor], uncounted: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.without = {t.untyped_storage()._cdata for t in uncounted}
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0
        self.look(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look(tensors_of(result))
        return result

    def look(self, values: list[torch.Tensor]) -> None:
        for value in values:
            storage = value.untyped_storage()
            if storage._cdata not in self.without:
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.seen = {key: found for key, found in self.seen.items() if not found[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.seen.values()))


def forward_bytes(program: Program) -> tuple[int, int]:
    """What a forward-only run of all ranks in one process is predicted to hold: of one microbatch in its largest stage,
    since one stage runs at a time; and in messages and outputs, if none is taken before all are made."""
    count = program.schedule.microbatches
    inside = max(transient_bytes(stage, "F") for stage in program.stages)
    sent = sum(stage.send_bytes for stage in program.stages)
    made = sum(spec.bytes for _, spec in program.returns.made.values())
    return inside, count * (sent + 2 * made)  # the parts of an output, and the output
