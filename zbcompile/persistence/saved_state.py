"""A checkpoint that was opened for reading: the format of this release, or with `trust` one that contains pickles.

torch.distributed.checkpoint is imported on use, because importing it takes a second.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zbcompile.errors import PipelineError
from zbcompile.passes.errors import CompileError
from zbcompile.persistence.checkpoint_directory import INDEX
from zbcompile.persistence.checkpoint_record import Record, is_pickled, read_record
from zbcompile.persistence.plain_values import from_data
from zbcompile.untrusted_text import read_json

if TYPE_CHECKING:
    from torch.distributed.checkpoint import CheckpointException, StorageReader

Values = dict[str, Any]
UNKNOWN = "an unknown optimizer"
PROCESS = "process.pt"  # in a checkpoint of the first format: the generators and `extra`


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint holds. `described` has dtype and size of every tensor by `section.key`, None for any other
    value; `process` the data of `random` and `extra`; `record` is None if it contains pickles."""

    path: Path
    step: int
    optimizer: str | None
    described: Mapping[str, tuple[torch.dtype, torch.Size] | None]
    process: Mapping[str, Any]
    record: Record | None

    @property
    def left_out(self) -> frozenset[str]:
        """The frozen parameters that were not saved."""
        return frozenset(self.record.fields.get("left_out", ()) if self.record else ())

    @property
    def averaged(self) -> Mapping[str, Any] | None:
        """The decay and the number of updates of the averages that were saved; None if there are none."""
        return self.record.fields.get("ema") if self.record else None

    def keys(self, section: str) -> dict[str, tuple[torch.dtype, torch.Size] | None]:
        """What is described of one section, by key."""
        start = f"{section}."
        return {key.removeprefix(start): each for key, each in self.described.items() if key.startswith(start)}

    def read(self, wanted: Values, section: str) -> Values:
        """Fill the tensors in `wanted` in place, and replace each None by its value. Asks no other process."""
        import torch.distributed.checkpoint as dcp

        keyed = {f"{section}.{key}": value for key, value in wanted.items()}
        try:
            with quiet():
                dcp.load(keyed, storage_reader=self._reader(), no_dist=True)
        except dcp.CheckpointException as error:
            raise PipelineError(f"{self.path} cannot be read: {first_cause(error)}. Load another checkpoint.") from None
        return {key.removeprefix(f"{section}."): value for key, value in keyed.items()}

    def _reader(self) -> "StorageReader":
        from torch.distributed.checkpoint import FileSystemReader

        from zbcompile.persistence.checkpoint_storage import CheckpointReader

        return CheckpointReader(self.path, self.record) if self.record is not None else FileSystemReader(self.path)

    def process_value(self, name: str) -> Any:
        """`random` or `extra` as it was saved."""
        if self.record is None:
            return self.process.get(name)
        found = {key: each for key, each in self.keys("process").items() if each and key.split(".")[0] == name}
        tensors = self.read({key: torch.empty(size, dtype=dtype) for key, (dtype, size) in found.items()}, "process")
        return from_data(self.process[name], tensors)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Raise PipelineError, with the checkpoint's name, for what fails inside: its values may be anyone's."""
        try:
            yield
        except (PipelineError, CompileError):
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error!s:.200}".partition("\n")[0]
            raise PipelineError(f"{self.path} cannot be loaded ({problem}). Load another checkpoint.") from error


def open_state(path: Path, trust: bool = False) -> SavedState:
    """Open a checkpoint. Raises PipelineError if it is damaged, or contains pickles and is not trusted."""
    if trust and is_pickled(path):
        return _open_pickled(path)
    record = read_record(path)
    described: Values = {name: (tensor.dtype, torch.Size(tensor.shape)) for name, tensor in record.tensors.items()}
    described |= dict.fromkeys(record.fields["values"])
    fields = record.fields
    return SavedState(path, fields["step"], fields["optimizer"], described, fields["process"], record)


def _open_pickled(path: Path) -> SavedState:
    """A checkpoint with pickles, which are executed: of the first format, or of any program that wrote one with
    torch.distributed.checkpoint as {"model": ..., "optimizer": ...}."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        found = FileSystemReader(path).read_metadata().state_dict_metadata
        index = read_json(path / INDEX, PipelineError) if (path / INDEX).exists() else {}
        process = torch.load(path / PROCESS, weights_only=True) if (path / PROCESS).exists() else {}
    except Exception as error:  # of a pickle
        raise PipelineError(f"{path} is damaged ({type(error).__name__}: {error}). Load another checkpoint.") from None
    described = {
        key: (value.properties.dtype, value.size) if isinstance(value, TensorStorageMetadata) else None
        for key, value in found.items()
    }
    return SavedState(path, index.get("step", 0), index.get("optimizer", UNKNOWN), described, process, None)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warning that one process reads or writes alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def first_cause(error: "CheckpointException") -> str:
    """What went wrong on the first rank that failed."""
    rank, (cause, _) = next(iter(sorted(error.failures.items())))
    return str(cause) if isinstance(cause, PipelineError) else f"rank {rank}: {type(cause).__name__}: {cause}"
