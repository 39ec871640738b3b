"""Captures in a folder, for all processes of a test run: workers of pytest-xdist, and the ranks that these start.

A process that finds a capture under way elsewhere waits for it. Reading one back takes a twentieth of making it. What
does not survive being written (graphs inside the graph, autograd.Functions, tensors of the model) is not stored.
"""

import fcntl
import hashlib
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zbcompile.passes.capture.export import Captured
from zbcompile.passes.torch_private import storage_key

FOLDER = "ZBCOMPILE_TEST_CAPTURES"  # the environment variable that names it
EVERYTHING = Options(ops_filter=None, node_metadata_key_filter=None)


def read_or_make(key: bytes, fits: Callable[[Captured], bool], make: Callable[[], tuple[Captured, bool]]) -> Captured:
    """The capture stored under a key if it `fits`; otherwise the one that `make` makes, which is stored if none was and
    `make` says that others may have it."""
    if FOLDER not in os.environ:
        return make()[0]
    path = Path(os.environ[FOLDER]) / hashlib.sha256(key).hexdigest()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases it
        if path.exists():
            found = from_bytes(path.read_bytes())
            return found if fits(found) else make()[0]
        made, shared = make()
        if shared and (content := to_bytes(made)) is not None:
            path.write_bytes(content)
    return made


def to_bytes(captured: Captured) -> bytes | None:
    """None for what would not be the same when it is read back."""
    inside = [each for each in captured.module.modules() if each is not captured.module]
    aliases = len({storage_key(tensor) for tensor in captured.constants.values()}) < len(captured.constants)
    if inside or aliases or captured.functions or captured.plain or captured.groups:
        return None
    with suppress(Exception):  # whatever an object raises that does not let itself be pickled
        return GraphPickler.dumps(captured, EVERYTHING)
    return None


def from_bytes(content: bytes) -> Captured:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        found: Any = GraphPickler.loads(content, FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
    for module in (found.module, found.guards and found.guards.module):
        if module:
            module.recompile()
    return found  # type: ignore[no-any-return]
