"""Captures and programs in a folder, for all processes of a test run: workers of pytest-xdist, and the ranks that
these start.

A process that finds one under way elsewhere waits for it. Reading one back takes a twentieth of making it. What does
not survive being written (graphs inside the graph, autograd.Functions, tensors of the model) is not stored. What a rank
made for its GPU another one reads for its own.
"""

import fcntl
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zbcompile.passes.capture.export import Captured
from zbcompile.passes.torch_private import storage_key
from zbcompile.program.program import Program

FOLDER = "ZBCOMPILE_TEST_CAPTURES"  # the environment variable that names it
EVERYTHING = Options(ops_filter=None, node_metadata_key_filter=None)


def own_gpu() -> int | None:
    """The index of the GPU that this process uses."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def index_of(device: torch.device) -> int | str | None:
    """The word "own" for that GPU, whichever it is."""
    return "own" if device.type == "cuda" and device.index == own_gpu() else device.index


def device_at(kind: str, index: int | str | None) -> torch.device:
    return torch.device(kind, own_gpu() if index == "own" else index)  # type: ignore[arg-type]


class _Pickler(GraphPickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, torch.device):
            return device_at, (obj.type, index_of(obj))
        return super().reducer_override(obj)


def read_or_make(
    key: bytes,
    fits: Callable[[Any], bool],
    make: Callable[[], tuple[Any, bool]],
    to_bytes: Callable[[Any], bytes | None] | None = None,
) -> Any:
    """What is stored under a key if it `fits`; otherwise what `make` makes, which is stored if nothing was and `make`
    says that others may have it. `to_bytes` writes it, by default as a capture."""
    if FOLDER not in os.environ:
        return make()[0]
    path = Path(os.environ[FOLDER]) / hashlib.sha256(key).hexdigest()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases it
        if path.exists():
            found = from_bytes(path.read_bytes())
            return found if fits(found) else make()[0]
        made, shared = make()
        if shared and (content := (to_bytes or capture_to_bytes)(made)) is not None:
            whole = path.with_suffix(".new")  # a process may be killed here: half a file must not have the name
            whole.write_bytes(content)
            whole.rename(path)
    return made


def capture_to_bytes(captured: Captured) -> bytes | None:
    """None for what would not be the same when it is read back."""
    whole = _is_whole([captured.module], captured.constants)
    return _dumped(captured) if whole and not (captured.functions or captured.groups) else None


def program_to_bytes(program: Program) -> bytes | None:
    """None for what would not be the same when it is read back, beyond buffers that no state dict holds."""
    graphs = [piece.module for stage in program.stages for piece in stage.pieces.values()]
    if not _is_whole(graphs, program.model.constants) or program.groups or program.also:
        return None
    return _dumped(replace(program, model=replace(program.model, unsaved={})))


def _is_whole(graphs: Iterable[nn.Module], constants: Mapping[str, Tensor]) -> bool:
    """Whether nothing is inside the graphs, no two constants are one tensor, and none would come back on the GPU of the
    rank that wrote it."""
    inside = [each for graph in graphs for each in graph.modules() if each is not graph]
    apart = len({storage_key(tensor) for tensor in constants.values()}) == len(constants)
    return not inside and apart and not any(tensor.is_cuda for tensor in constants.values())


def _dumped(found: Any) -> bytes | None:
    with suppress(Exception):  # whatever an object raises that does not let itself be pickled
        return _Pickler.dumps(found, EVERYTHING)
    return None


def from_bytes(content: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        found: Any = GraphPickler.loads(content, FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
    for module in _graphs(found):
        module.recompile()
    return found


def _graphs(found: Captured | Program) -> list[fx.GraphModule]:
    """Captures are written with their code; the pieces of a program make theirs when they first run."""
    whole = [found.module] if isinstance(found, Captured) else []
    return whole if found.guards is None else [*whole, found.guards.module]
