"""The files of a checkpoint for torch.distributed.checkpoint: safetensors, and index.json, which is
written last.

`index.json` holds the values that are no tensors, for every file its size, its SHA-256 and that of
its header, and a digest of itself. Headers hold the dtype, shape and offset of every chunk, as
torch's `HuggingFaceStorageWriter` writes them.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zbcompile.errors import PipelineError
from zbcompile.json_text import to_text
from zbcompile.model.distributed_tensors import TensorShard, local_of
from zbcompile.persistence.checkpoint_directory import INDEX, candidates, publish
from zbcompile.persistence.safetensors_files import header_digest, write_safetensors
from zbcompile.safe_files import damage_in, sha256_of, write_whole
from zbcompile.torch_private import pytree

FORMAT, VERSION = "zbcompile checkpoint", 6
AGAIN = "Load another checkpoint"
Values = dict[str, Any]


class CheckpointWriter(FileSystemWriter):
    """Writes this process's tensors into `file`, which is in the staging directory.

    The first process gets the `contribution` of every process to the index, writes the index with
    the further `fields`, and gives the directory its name. `working` is entered around all work
    that waits for no other rank.
    """

    def __init__(
        self,
        file: Path,
        contribution: Mapping[str, Any],
        fields: Mapping[str, Any],
        working: Callable[[], AbstractContextManager[None]],
    ) -> None:
        _ignore_warning()
        super().__init__(file.parent)
        self.file, self.contribution, self.fields = file, contribution, fields
        self.working = working

    def stage(self, state_dict: Values) -> Values:
        """Returns a copy on the CPU, for a save that goes on while training changes the tensors."""
        return pytree.tree_map(_copy, state_dict)  # type: ignore[no-any-return]

    def write_data(self, plan: Any, planner: Any) -> "Future[list[WriteResult]]":
        tensors, offsets = Values(), Values()
        with self.working():
            for item in plan.items:
                name, values = item.index.fqn, planner.resolve_data(item)
                tensors[name] = values.detach().cpu().contiguous()
                offsets[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            # as torch's writer has it
            metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
            written = write_safetensors(self.file, tensors, metadata)
        contribution = {**self.contribution, "files": {self.file.name: written}}
        future = Future[Any]()
        future.set_result([WriteResult(MetadataIndex(""), 0, contribution)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts = [result.storage_data for (result,) in results]
        left_out = sorted({name for part in parts for name in part["left_out"]})
        data: Values = {"format": FORMAT, "version": VERSION, **self.fields, "left_out": left_out}
        data |= {"files": {}, "values": {}}
        for part in parts:
            data["files"] |= part["files"]
            data["values"] |= part["values"]
        partial = self.file.parent
        with self.working():
            write_whole(partial / INDEX, with_digest(data).encode())
            publish(partial, self.fields["keep"])


class CheckpointReader(HuggingFaceStorageReader):
    """Reads a checkpoint. `fields` are those of its index, `metadata` describes its tensors.

    Raises PipelineError if the index is damaged, or a file is missing, of another size, or has
    another header.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder
        if not (folder / INDEX).exists():
            raise PipelineError(
                f"{folder} has no {INDEX}: it is no checkpoint, or one with pickles, which are"
                " never read."
            )
        with damage_in(folder / INDEX, AGAIN):
            self.fields = _checked_fields(folder)
            self.metadata = super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self.metadata

    def fill(self, tensors: Values) -> None:
        """Fills tensors in place, by their names in the checkpoint."""
        _ignore_warning()
        try:
            dcp.load(tensors, storage_reader=self, no_dist=True)
        except dcp.CheckpointException as error:
            raise first_cause(error)[1] from None

    def section(self, name: str) -> Values:
        """Returns the entries of "model" or "optimizer" by name: the metadata of a tensor, or None
        for any other value."""
        entries = {**dict.fromkeys(self.fields["values"]), **self.metadata.state_dict_metadata}
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): value
            for key, value in entries.items()
            if key.startswith(prefix)
        }


def _ignore_warning() -> None:
    """Ignores that one process reads or writes alone, also in a thread that outlives the call."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _copy(tensor: Any) -> torch.Tensor:
    copy = local_of(tensor).detach().to("cpu", copy=True)
    if isinstance(tensor, TensorShard):
        return TensorShard.of(copy, (tuple(tensor.shape), tensor.offset))
    return copy


def with_digest(data: Values) -> str:
    """Returns the text of an index.json with these fields and their digest, the last field."""
    text = to_text(data, 2)
    return f'{text[:-3]},\n"digest": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'


def _checked_fields(folder: Path) -> Values:
    """Returns the fields of index.json. Raises ValueError if they differ from their digest, or a
    file from its size or header."""
    text = (folder / INDEX).read_text(encoding="utf-8")
    fields: Values = json.loads(text)
    del fields["digest"]
    if with_digest({**fields, "format": FORMAT, "version": VERSION}) != text:
        raise ValueError(f"its digest differs, or it is not format {VERSION}")
    if {file.name for file in folder.glob("*.safetensors")} != fields["files"].keys():
        raise ValueError("other files are in the directory than were written")
    for file, written in fields["files"].items():
        if (folder / file).stat().st_size != written["bytes"]:
            raise ValueError(f"{file} has another size")
        if header_digest(folder / file) != written["header"]:
            raise ValueError(f"{file} was changed: its header differs")
    return fields


def first_cause(error: BaseException) -> tuple[int | None, BaseException]:
    """Returns the first rank that failed, if torch.distributed.checkpoint says which, and its
    error."""
    failures = getattr(error, "failures", None) or {None: (error, None)}
    rank, (cause, _) = next(iter(sorted(failures.items())))
    return rank, cause


def verify_checkpoint(path: str | Path) -> None:
    """Compares every file of a checkpoint, or of each checkpoint in a folder, with its SHA-256 in
    the index.

    Raises PipelineError for a damaged checkpoint, and if there is none.

    >>> zbcompile.verify_checkpoint("checkpoints")                                  # doctest: +SKIP
    """
    checkpoints = candidates(path)
    if not checkpoints:
        raise PipelineError(f"there is no checkpoint in {path}.")
    for checkpoint in checkpoints:
        for name, written in CheckpointReader(checkpoint).fields["files"].items():
            file = checkpoint / name
            if sha256_of(file) != written["sha256"]:
                raise PipelineError(
                    f"{file} was changed after it was written: its SHA-256 differs. Load another"
                    " checkpoint."
                )
