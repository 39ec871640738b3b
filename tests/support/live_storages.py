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
    """Adds up, after every operation, the storages that are alive: those of `values`, and all made since, at the size
    that each has by then."""

    def __init__(self, values: list[torch.Tensor], uncounted: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.without = {t.untyped_storage()._cdata for t in uncounted}
        self.seen: dict[int, StorageWeakRef] = {}
        self.most = 0
        self.look(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look(tensors_of(result))
        return result

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        return self.look([])

    def look(self, values: list[torch.Tensor]) -> int:
        for value in values:
            storage = value.untyped_storage()
            if storage._cdata not in self.without:
                self.seen[storage._cdata] = StorageWeakRef(storage)
        sizes = {key: _size(found) for key, found in self.seen.items()}
        self.seen = {key: found for key, found in self.seen.items() if sizes[key] is not None}
        alive = sum(size or 0 for size in sizes.values())
        self.most = max(self.most, alive)
        return alive


def _size(found: StorageWeakRef) -> int | None:
    """The bytes of a storage; None if it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(found.cdata)
    return None if storage is None else storage.nbytes()


def forward_bytes(program: Program) -> tuple[int, int]:
    """What a forward-only run of all ranks in one process is predicted to hold: of one microbatch in its largest stage,
    since one stage runs at a time; and in messages and outputs, if none is taken before all are made."""
    count = program.schedule.microbatches
    inside = max(transient_bytes(stage, "F") for stage in program.stages)
    sent = sum(stage.send_bytes for stage in program.stages)
    made = sum(spec.bytes for _, spec in program.returns.made.values())
    return inside, count * (sent + 2 * made)  # the parts of an output, and the output
