"""An independent count of the storages that are alive, and what a forward-only run may hold of
them."""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zbcompile.passes.graph.fx import tensors_of
from zbcompile.passes.stage.peak_memory import transient_bytes
from zbcompile.program.program import Program


def leave_aside() -> list[torch.Tensor]:
    """The tensors that there are. They and all else, in a process that has run many tests millions
    of objects, stay to its end: no collection or count from here on walks through them."""
    gc.collect()
    result = living_tensors()
    gc.freeze()
    return result


def living_tensors() -> list[torch.Tensor]:
    """All that are alive and were not left aside."""
    tensors = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate) in (torch.Tensor, nn.Parameter)
    ]
    return [tensor for tensor in tensors if not tensor.is_meta]  # no memory


class Alive(TorchDispatchMode):
    """Adds up the storages that are alive: those of `values`, and all made since, at the size that
    each has by then. `most` is the most at any operation: what is made, or was empty and is no
    longer, is added there; what has gone is looked for only where the sum would exceed the most."""

    def __init__(self, values: list[torch.Tensor], uncounted: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.without = {t.untyped_storage()._cdata for t in uncounted}
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.empty: list[StorageWeakRef] = []
        self.most = self.sum = 0  # `sum`: no less than what is alive
        self.look(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look(tensors_of(result))
        return result

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        sizes = [(key, result, _size(result)) for key, (result, _) in self.seen.items()]
        self.seen = {key: (result, size) for key, result, size in sizes if size is not None}
        self.empty = [result for result, size in self.seen.values() if size == 0]
        self.sum = sum(size for _, size in self.seen.values())
        return self.sum

    def look(self, values: list[torch.Tensor]) -> None:
        for value in values:
            storage = value.untyped_storage()
            if storage._cdata not in self.without:
                result, size = self.seen.get(storage._cdata, (None, 0))
                if result is None or result.expired():  # another storage may have been there
                    result, size = StorageWeakRef(storage), 0
                self.seen[storage._cdata] = result, storage.nbytes()
                self.sum += storage.nbytes() - size
        if self.sum > self.most or any(map(_size, self.empty)):
            self.most = max(self.most, self.now)


def _size(result: StorageWeakRef) -> int | None:
    """The bytes of a storage; None if it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(result.cdata)
    return None if storage is None else storage.nbytes()


def forward_bytes(program: Program) -> tuple[int, int]:
    """Returns what a forward-only run of all ranks in one process is predicted to hold: of one microbatch
    in its largest stage, since one stage runs at a time; and in messages and outputs, if none is
    taken before all are made.
    """
    count = program.schedule.microbatches
    inside = max(transient_bytes(stage, "F") for stage in program.stages)
    sent = sum(stage.message_bytes("F") for stage in program.stages)
    created = sum(spec.bytes for _, spec in program.returns.made.values())
    return inside, count * (sent + 2 * created)  # the parts of an output, and the output
