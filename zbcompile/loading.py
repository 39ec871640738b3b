"""Loading a saved program: every rank reads and checks its own part, and nothing in the files is executed."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zbcompile.consensus import require_equal_programs, together
from zbcompile.engine import Engine
from zbcompile.errors import PipelineError
from zbcompile.group import make_engine, own_device
from zbcompile.loaded import LoadedPipeline
from zbcompile.options import Options
from zbcompile.passes.errors import CompileError
from zbcompile.program_files import MANIFEST, SCHEDULE, index_file, part_from_files, stage_file, tensor_file
from zbcompile.program_manifest import AGAIN, SavedProgram, digest_of, manifest_from_text, program_from_manifest
from zbcompile.schedules import ScheduleError
from zbcompile.schedules.files import from_json
from zbcompile.schedules.schedule import Lowered
from zbcompile.share import Init

MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, ScheduleError)


def load(
    directory: str | Path,
    state_dict: Mapping[str, Any] | None = None,
    *,
    ranks: int | None = None,
    mesh: Any = None,
    operators: Sequence[str] = (),
    init: Init | None = None,
    timeout: float = 300.0,
    debug_nan: bool = False,
) -> LoadedPipeline:
    """The pipeline that `pipe.program.save(directory)` saved, without the model's source; it runs the same bits.

    Args:
        directory: the program. Each process reads the manifest, the schedule and the parts of its own ranks.
        state_dict: the model's full state dict, as `pipe.state_dict(full=True)` or the model itself gives it; copied.
            Without it, call `load_state_dict` before the first step, or give `init=`.
        ranks: without torchrun, all ranks of the program run in this process; another number is refused.
        mesh, init, timeout, debug_nan: as for `zbcompile.pipeline`.
        operators: operators of other libraries that the program may call, such as "mylibrary::scale". Import the module
            that defines them first.

    Nothing in the directory is executed: graphs are data that name operators of torch, and of `operators`.

    Raises PipelineError, on every rank, for a directory that is incomplete or was changed, for another version of torch
    and for another number of ranks; CompileError for an operator that is not allowed.

    >>> pipe = zbcompile.load("program", state_dict=torch.load("model.pt"))      # doctest: +SKIP
    >>> loss = pipe.step(inputs, target=targets)                                 # doctest: +SKIP
    """
    folder = Path(directory)
    found = _attempt(folder)
    here = found["ranks"] if ranks is None and found else ranks
    engine = make_engine(lambda: own_device(found["device"] if found else "cpu"), here, mesh, timeout)
    with engine.watch.region(f"loading {folder}"):
        program = together(
            engine,
            f"loading {folder}",
            lambda: _read_for(folder, engine, operators),
        )
        require_equal_programs(engine, {"manifest": digest_of(program.written or {}), **program.manifest})
    pipe = LoadedPipeline(program, _options(program, init, timeout, debug_nan), engine)
    if state_dict is not None:
        pipe.load_state_dict(state_dict)
    return pipe


def _attempt(folder: Path) -> dict[str, Any] | None:
    """The manifest, if there is a good one: what is wrong with it is said when all ranks can hear it."""
    try:
        return read_manifest(folder)
    except (PipelineError, OSError):
        return None


def _options(program: SavedProgram, init: Init | None, timeout: float, debug_nan: bool) -> Options:
    step, schedule = program.step, program.schedule
    return Options(
        schedule=schedule,
        microbatches=schedule.microbatches,
        loss=None,
        loss_reduction=step.loss_reduction,
        choices=program.choices,
        split=step.split,
        chunks=None,
        seed=step.seed,
        timeout=timeout,
        max_shapes=1,
        init=init,
        debug_nan=debug_nan,
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a program directory. Raises PipelineError where there is none, or not a good one."""
    path = folder / MANIFEST
    if not path.is_file():
        raise PipelineError(
            f"{folder} has no {MANIFEST}: it is no program, or saving it was interrupted. {AGAIN}: "
            "pipe.program.save(directory)."
        )
    return manifest_from_text(path.read_text(encoding="utf-8", errors="replace"), str(path))


def _read_for(folder: Path, engine: Engine, operators: Collection[str]) -> SavedProgram:
    """This process's part of the program, which must be one for its device and number of ranks."""
    data = read_manifest(folder)
    if data["ranks"] != engine.ranks:
        raise PipelineError(
            f"{folder} was compiled for {data['ranks']} ranks, but there are {engine.ranks}. Start {data['ranks']} "
            f"processes, or compile it again for {engine.ranks}."
        )
    if data["device"] != engine.device.type:
        raise PipelineError(
            f"{folder} was compiled for {data['device']}, but this process's device is {engine.device}. {AGAIN} there."
        )
    return read_program(folder, data, engine.local, engine.device, operators)


def read_program(
    folder: Path, manifest: dict[str, Any], own: Sequence[int], device: torch.device, operators: Collection[str] = ()
) -> SavedProgram:
    """The program with the graphs of the ranks `own`, its tensors on `device`. Raises as `load` does."""
    reader = _Reader(folder, manifest["files"])
    return reader.sound(lambda: _assemble(manifest, reader, own, device, operators))


def _assemble(
    data: dict[str, Any], reader: "_Reader", own: Sequence[int], device: torch.device, operators: Collection[str]
) -> SavedProgram:
    lowered = from_json(reader.bytes(SCHEDULE).decode()).program
    if not isinstance(lowered, Lowered):
        raise ValueError(f"{SCHEDULE} has no communication")
    program = program_from_manifest(data, lowered, device)
    stages = list(program.stages)
    constants: dict[str, torch.Tensor] = {}
    unsaved: dict[str, torch.Tensor] = {}
    for rank in own:
        index = reader.json(index_file(rank))
        graphs = {stage: reader.json(stage_file(rank, stage)) for stage in program.stages_of(rank)}
        part = part_from_files(index, graphs, reader.bytes(tensor_file(rank)), device, operators)
        for stage, pieces in part.pieces.items():
            stages[stage] = replace(stages[stage], pieces=pieces)
        constants |= part.named("constant")
        unsaved |= part.named("buffer")
    model = replace(program.model, constants=constants, unsaved=unsaved)
    return replace(program, stages=tuple(stages), model=model)


class _Reader:
    """Reads files of a program directory and compares each with its hash."""

    def __init__(self, folder: Path, hashes: Mapping[str, str]) -> None:
        self.folder = folder
        self.hashes = hashes

    def bytes(self, name: str) -> bytes:
        """The content of a file. Raises PipelineError where it is missing or not what was written."""
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PipelineError(
                f"{path} cannot be read ({error.strerror}); the program is incomplete. Copy all of the directory, or "
                "save it again."
            ) from None
        if hashlib.sha256(content).hexdigest() != self.hashes[name]:
            raise PipelineError(
                f"{path} is not what was saved: its hash differs from the manifest's (truncated, edited, or of another "
                "program). Copy the directory again, or save it again."
            )
        return content

    def json(self, name: str) -> Any:
        return json.loads(self.bytes(name))

    def sound(self, make: Callable[[], SavedProgram]) -> SavedProgram:
        """Run `make`; what it cannot make sense of is reported as a damaged directory."""
        try:
            return make()
        except (PipelineError, CompileError):
            raise
        except MALFORMED as error:
            raise PipelineError(
                f"{self.folder} holds what no release writes ({type(error).__name__}: {error}). {AGAIN}."
            ) from error
