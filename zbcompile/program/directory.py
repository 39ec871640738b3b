"""Program directories: one JSON and one safetensors file per rank, the schedule, and a manifest.

Every rank writes its own files and the manifest comes last: a directory without a manifest is not
a program, so a half-written one is never mistaken for a complete one. Every file that is read is
compared with its hash, and nothing in it is executed.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from zbcompile.distributed.agreement import together
from zbcompile.distributed.mesh import DIMENSIONS
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.json_text import to_text
from zbcompile.model.model_info import has_values
from zbcompile.program.program import Program
from zbcompile.program.program_data import (
    program_from_data,
    program_to_data,
    rank_to_data,
    with_rank,
)
from zbcompile.safe_files import damage_in, read_bytes, sync, write_whole
from zbcompile.schedules import check, from_json
from zbcompile.schedules.ir.files import to_json
from zbcompile.untrusted_text import parse_json

FORMAT, VERSION = "zbcompile program", 10
MANIFEST, SCHEDULE = "manifest.json", "schedule.json"
AGAIN = "Compile and save the program again"
_NAME = r"(manifest|schedule|rank-\d{4,})\.(json|safetensors)"
_PROGRAM_FILE = re.compile(rf"{_NAME}|\.{_NAME}\.partial")

Hashes = dict[str, str]  # SHA-256 by file


def save_program(program: Program, directory: Path, ranks: Ranks) -> None:
    """Writes `program`. Each process writes the files of its `ranks`. See `Program.save`."""

    def prepare() -> None:
        _refuse(program)
        if ranks.is_first:
            old = program_files(directory)
            (directory / MANIFEST).unlink(missing_ok=True)
            for path in old:
                path.unlink(missing_ok=True)

    def write() -> Hashes:
        hashes: Hashes = {}
        for rank in ranks.local:
            data, tensors = rank_to_data(program, rank)
            files = {"json": to_text(data, 5).encode(), "safetensors": save(tensors)}
            for ending, content in files.items():
                hashes |= _write(directory, f"rank-{rank:04d}.{ending}", content, ranks.leads)
        return hashes

    def finish() -> None:
        hashes: Hashes = {}
        for name, digest in (item for part in parts for item in part.items()):
            if hashes.setdefault(name, digest) != digest:
                raise PipelineError(
                    f"{name} differs between ranks of one place in the pipeline: along a dimension"
                    " of the mesh they have graphs, constants or unsaved buffers of their own"
                    " (parts of different sizes, numbers made of the rank). A saved program has one"
                    " for all of them. Shard evenly, and keep what depends on the rank in a buffer"
                    " that the state dict holds."
                )
        if ranks.is_first:
            hashes |= _write(directory, SCHEDULE, to_json(program.lowered).encode())
            compared = {key: v for key, v in program.manifest.items() if key != "threads"}
            data = {
                "format": FORMAT,
                "version": VERSION,
                "torch": _torch_release(),
                "ranks": program.schedule.ranks,
                "device": program.device_type,
                "dimensions": {label: ranks.mesh.size(label) for label in program.groups},
                "compared": compared,
                "program": program_to_data(program),
                "files": dict(sorted(hashes.items())),
            }
            text = to_text({**data, "digest": digest_of(data)}, 2)
            _write(directory, MANIFEST, text.encode())

    what = f"saving {directory}"
    together(ranks, what, prepare)
    parts = ranks.gather(together(ranks, what, write))
    together(ranks, what, finish)


def save_here(program: Program, directory: Path) -> None:
    """Writes all ranks of `program` from this process."""
    save_program(program, directory, Ranks(program.schedule.ranks, torch.device("cpu")))


def program_files(directory: Path) -> list[Path]:
    """Returns the files of the program in `directory`, [] if it is new.

    Raises PipelineError if no program can be written there.
    """
    if directory.exists() and not directory.is_dir():
        raise PipelineError(
            f"{directory} is a file; expected a directory, or a path that does not exist yet."
        )
    paths = sorted(directory.iterdir()) if directory.exists() else []
    for path in paths:
        if path.is_symlink() or path.is_dir() or not _PROGRAM_FILE.fullmatch(path.name):
            raise PipelineError(
                f"{directory} holds other files ({path.name}); expected a new directory, or one"
                " that holds a program, which is replaced."
            )
    return paths


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the fields of the manifest of a program directory.

    Raises PipelineError if it is missing or damaged, or if this release or this torch cannot run
    the program.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise PipelineError(
            f"{folder} has no {MANIFEST}: it is not a program, or saving it was interrupted."
            f" {AGAIN}: pipe.program.save(directory)."
        )
    with damage_in(path, AGAIN):
        fields: dict[str, Any] = parse_json(read_bytes(path).decode(), ValueError)
        if (fields["format"], fields["version"]) != (FORMAT, VERSION):
            raise PipelineError(
                f"{path} is a {fields['format']!r} of version {fields['version']!r}; this release"
                f" reads a {FORMAT!r} of version {VERSION}. {AGAIN} with this release."
            )
        here = _torch_release()
        if fields["torch"] != here:
            raise PipelineError(
                f"{path}: the program was compiled with torch {fields['torch']} and this is torch"
                f" {here}; the operators of its graphs may differ. {AGAIN} with torch {here}, or"
                f" install torch {fields['torch']}."
            )
        if fields["digest"] != digest_of(fields):
            raise PipelineError(
                f"{path} was changed after it was written: its digest does not match. {AGAIN}."
            )
    return fields


def read_program(
    folder: Path,
    fields: Mapping[str, Any],
    ranks: Sequence[int],
    device: torch.device,
    operators: Collection[str] = (),
) -> Program:
    """Returns the program of a manifest, with the graphs of `ranks` and tensors on `device`.

    Raises PipelineError for a damaged file, CompileError for an operator that is not allowed.
    """
    with damage_in(folder / SCHEDULE, AGAIN):
        lowered = from_json(_read(folder, SCHEDULE, fields).decode())
    with damage_in(folder / MANIFEST, AGAIN):
        program = program_from_data(fields["program"], lowered, device, operators)
        groups = dict.fromkeys(fields["dimensions"], "")
    with damage_in(folder / SCHEDULE, AGAIN):  # its messages cannot deadlock either
        check(lowered, weight_order=None if program.exact else "any")
    for rank in ranks:
        name = f"rank-{rank:04d}.json"
        with damage_in(folder / name, AGAIN):
            data = parse_json(_read(folder, name, fields).decode(), ValueError)
            tensors = load(_read(folder, f"rank-{rank:04d}.safetensors", fields))
            program = with_rank(program, data, tensors, device, operators)
    return replace(program, groups=groups, saved=fields)


def digest_of(fields: Mapping[str, Any]) -> str:
    """Returns the hash of a manifest's fields except `digest`, whatever their order."""
    data = {name: value for name, value in fields.items() if name != "digest"}
    return hashlib.sha256(json.dumps(data, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _torch_release() -> str:
    """Returns the version of torch without its build: 2.13.0 for 2.13.0+cpu."""
    return torch.__version__.partition("+")[0]


def _refuse(program: Program) -> None:
    """Raises PipelineError for a program that cannot be saved."""
    foreign = [label for label in program.groups if label not in DIMENSIONS]
    if foreign:
        raise PipelineError(
            f"the model's graphs communicate through {len(foreign)} process group(s) that are no"
            " dimension of mesh=; a program names its groups by dimension, and cannot be saved"
            " with others. Use mesh.get_group(dimension) in the model, and pass the whole mesh to"
            " zbcompile.pipeline."
        )
    empty = [name for name, tensor in program.model.constants.items() if not has_values(tensor)]
    if empty:
        raise PipelineError(
            f"{empty[0]} is a tensor in a plain attribute of a model that was built without memory"
            " (meta or fake), so it has no values to save. Build the model on a real device, or"
            " make it a buffer."
        )


def _write(directory: Path, name: str, content: bytes, writes: bool = True) -> Hashes:
    """Returns the hash of a file, after writing it if this process `writes`."""
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / name, content)
        sync(directory)
    return {name: hashlib.sha256(content).hexdigest()}


def _read(folder: Path, name: str, fields: Mapping[str, Any]) -> bytes:
    """Returns the content of a file. Raises PipelineError if it is missing or was changed."""
    content = read_bytes(folder / name)
    if hashlib.sha256(content).hexdigest() != fields["files"][name]:
        raise PipelineError(
            f"{folder / name} is not what was saved: its hash differs from the manifest's"
            " (truncated, edited, or from another program). Copy the directory again, or save it"
            " again."
        )
    return content
