"""Values in the format of torch.distributed.checkpoint: every process writes its own, and reads what it asks for.

That package is imported on use, because importing it takes a second.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import CheckpointException

Values = dict[str, Any]


def write_values(ranks: Ranks, directory: Path, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the values of all ranks of a pipeline, by section and key; every rank must call it. Non-tensor values come
    from the first rank."""
    import torch.distributed.checkpoint as dcp

    given = {section: dict(each) for section, each in values.items() if each}
    writer = dcp.FileSystemWriter(directory, sync_files=True)
    try:
        with _quiet(), ranks.watch.position.waiting("the writing of all ranks"):
            dcp.save(given, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    except dcp.CheckpointException as error:  # not an Exception; raised on every rank
        raise ranks.watch.known_to_all(PipelineError(f"writing to {directory} failed: {_first(error)}")) from None


def _first(error: "CheckpointException") -> str:
    rank, (cause, _) = next(iter(sorted(error.failures.items())))
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def describe(directory: Path) -> dict[str, tuple[torch.dtype, torch.Size] | None]:
    """Every `section.key` of a checkpoint: dtype and size of a tensor, None for anything else."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        key: (value.properties.dtype, value.size) if isinstance(value, TensorStorageMetadata) else None
        for key, value in found.items()
    }


def read_values(directory: Path, wanted: Values, section: str) -> Values:
    """Fill the tensors in `wanted` in place, and replace each None by its value. Asks no other process."""
    import torch.distributed.checkpoint as dcp

    keyed = {f"{section}.{key}": value for key, value in wanted.items()}
    try:
        with _quiet():
            dcp.load(keyed, checkpoint_id=directory, no_dist=True)
    except dcp.CheckpointException as error:
        raise PipelineError(
            f"{directory} cannot be read: {_first(error)}. Copy all of the checkpoint, or resume from another one."
        ) from None
    return {key.removeprefix(f"{section}."): value for key, value in keyed.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warning that one process reads or writes alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
