"""From a checkpoint with pickles to one of this format, in one process that holds all of it."""

from pathlib import Path

import torch

from zbcompile.errors import PipelineError
from zbcompile.persistence.background_save import Save
from zbcompile.persistence.checkpoint_directory import begin, candidates
from zbcompile.persistence.folder_lock import FolderLock
from zbcompile.persistence.part_files import Chunk
from zbcompile.persistence.plain_values import Tensors, to_data
from zbcompile.persistence.saved_state import SavedState, open_state
from zbcompile.version import __version__


def convert_checkpoint(old: Path, new: Path, trust: bool) -> Path:
    """Write the checkpoint `old`, or the newest one in that folder, into the folder `new`; the new directory.

    Raises PipelineError if it contains pickles and is not trusted, or cannot be written.
    """
    found = next(iter(candidates(old)), None)
    if found is None:
        raise PipelineError(f"{old} holds no checkpoint.")
    saved = open_state(found, trust)
    lock = FolderLock(new)
    try:
        while not lock.attempt(1.0):
            pass
        return _write(saved, new, lock)
    finally:
        lock.close()


def _write(saved: SavedState, new: Path, lock: FolderLock) -> Path:
    tensors: Tensors = {}
    values = {}
    for section in ("model", "optimizer"):
        room = {key: torch.empty(each[1], dtype=each[0]) if each else None for key, each in saved.keys(section).items()}
        for key, value in saved.read(room, section).items():
            name = f"{section}.{key}"
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            else:
                values[name] = to_data(value, name, {})
    kept: Tensors = {}
    process = {name: to_data(saved.process_value(name), name, kept) for name in ("random", "extra")}
    tensors |= {f"process.{name}": tensor for name, tensor in kept.items()}
    fields = {"zbcompile": __version__, "torch": torch.__version__, "step": saved.step, "ranks": 1}
    fields |= {"optimizer": saved.optimizer, "tied": {}, "values": values, "process": process}
    chunks = [Chunk(name, tuple(t.shape), (0,) * t.dim(), t.detach().contiguous()) for name, t in tensors.items()]
    save = Save(begin(new, saved.step), 0, 1, chunks, fields, None, lock)
    return save.run()
