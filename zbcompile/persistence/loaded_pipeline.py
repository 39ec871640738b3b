"""Loading a saved program: every rank reads and checks its own part, and nothing in the files is
executed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zbcompile.api.pipeline import Pipeline
from zbcompile.backends.types import GraphCompiler
from zbcompile.distributed.agreement import agree, together
from zbcompile.distributed.process_group import find_ranks, is_alone, own_device
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.step import Engine
from zbcompile.errors import PipelineError
from zbcompile.model.materialize import Init
from zbcompile.model.model_info import has_values, module_of
from zbcompile.options import BACKENDS, PipelineOptions
from zbcompile.passes import gpu
from zbcompile.program.directory import AGAIN, MANIFEST, read_manifest, read_program
from zbcompile.program.program import Program
from zbcompile.safe_files import damage_in

SAME = (
    "Every rank must load the same directory, with the same torch and number of threads"
    " (OMP_NUM_THREADS)."
)


def load(
    directory: str | Path,
    state_dict: Mapping[str, Any] | None = None,
    *,
    ranks: int | None = None,
    mesh: Any = None,
    checkpoint: str | Path | None = None,
    operators: Sequence[str] = (),
    init: Init | None = None,
    seed: int | None = None,
    timeout: float = PipelineOptions.timeout,
    debug_nan: bool = False,
    backend: str | GraphCompiler | None = None,
    cuda_graphs: bool | None = None,
) -> Pipeline:
    """The pipeline that `pipe.program.save(directory)` saved, without the model's source; it runs
    the same bits.

    Args:
        directory: the program. Each process reads the manifest, the schedule and the parts of its
            own ranks.
        state_dict: the model's full state dict, as `pipe.state_dict(full=True)` or the model itself
            gives it; copied. Without it, give `checkpoint=` or `init=`, or call `load_state_dict`
            or `zbcompile.load_weights` before the first step.
        checkpoint: a checkpoint of `zbcompile.save_checkpoint`, or a folder of them, whose newest
            one is taken: the model's tensors, and the step. An optimizer is made afterwards; see
            `zbcompile.load_checkpoint`.
        ranks: without torchrun, all ranks of the program run in this process; another number is
            refused.
        mesh, init, timeout, debug_nan: as for `zbcompile.pipeline`.
        seed: enters `zbcompile.microbatch_seed`; default: the one that it was compiled with.
        operators: operators of other libraries that the program may call, such as
            "mylibrary::scale". Import the module that defines them first.
        backend, cuda_graphs: as for `zbcompile.pipeline`; default: as the program was saved. The
            directory holds graphs, never compiled code: inductor compiles them here, or finds them
            in its cache (docs/backends.md).


    Nothing in the directory is executed: graphs are data that name operators of torch, and of
    `operators`.

    Raises PipelineError, on every rank, for a directory that is incomplete or was changed, for
    another version of torch and for another number of ranks; CompileError for an operator that is
    not allowed.

    >>> pipe = zbcompile.load("program", state_dict=torch.load("model.pt"))      # doctest: +SKIP
    >>> loss = pipe.step(inputs, target=targets)                                 # doctest: +SKIP
    """
    if state_dict is not None and checkpoint is not None:
        raise PipelineError(
            "load received state_dict= and checkpoint=; both give the model its values. Pass one."
        )
    values: dict[str, Any] = {
        "ranks": ranks,
        "mesh": mesh,
        "init": init,
        "timeout": timeout,
        "debug_nan": debug_nan,
        "operators": operators,
        "seed": seed,
        "backend": backend,
        "cuda_graphs": cuda_graphs,
    }
    options = {name: value for name, value in values.items() if value is not None}
    PipelineOptions(**options)  # a wrong value is refused before anything is read
    folder = Path(directory)
    if ranks is None and is_alone(mesh):
        ranks = read_manifest(folder)["ranks"]
    here = find_ranks(lambda: device_for(folder), ranks, mesh, timeout)
    with here.watch.region(f"loading {folder}"):
        program = together(
            here, f"loading {folder}", lambda: _read_for(folder, here, operators, init)
        )
        same = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "digest": program.saved["digest"],
            "debug_nan": debug_nan,
        }
        agree(here, same, "loaded different programs", SAME)
    with here.watch.region(f"filling {folder}"):
        with damage_in(folder / MANIFEST, AGAIN):
            chosen = _options(program, options)
            pipe = Pipeline(module_of(program.model), chosen, Engine(here), program)
        if state_dict is not None:
            together(here, "loading the state dict", lambda: pipe.load_state_dict(state_dict))
    if checkpoint is not None:
        from zbcompile.persistence.checkpoint import load_state  # imports DCP, which takes a second

        load_state(checkpoint, pipe)
    return pipe


def device_for(folder: Path) -> torch.device:
    """Returns this process's device of the kind that a program was compiled for; the CPU if its
    manifest cannot be read, which all ranks report together afterwards."""
    try:
        return own_device() if read_manifest(folder)["device"] == gpu.KIND else torch.device("cpu")
    except (PipelineError, OSError):
        return torch.device("cpu")


def _options(program: Program, options: Mapping[str, Any]) -> PipelineOptions:
    """The options of a loaded program: those that it was saved with, unless others are
    asked for."""
    saved = {**vars(program.choices), **vars(program.step)}
    if "backend" not in options and saved["backend"] not in BACKENDS:
        raise PipelineError(
            f"the program was saved with a custom backend, {saved['backend']}, which a directory"
            ' cannot hold. Pass backend=: that function, "fx" or "inductor".'
        )
    return PipelineOptions(**{**saved, "schedule": program.schedule, **options})


def _read_for(folder: Path, ranks: Ranks, operators: Collection[str], init: Init | None) -> Program:
    """This process's part of the program, which must be one for its device and number of ranks."""
    data = read_manifest(folder)
    if data["ranks"] != ranks.count:
        raise PipelineError(
            f"{folder} was compiled for {data['ranks']} ranks, but there are {ranks.count}. Start"
            f" {data['ranks']} processes, or compile it again for"
            f" {ranks.count}."
        )
    if data["device"] != ranks.device.type:
        raise PipelineError(
            f"{folder} was compiled for {data['device']}, but this process's device is"
            f" {ranks.device}. {AGAIN} there."
        )
    program = read_program(folder, data, ranks.local, ranks.device, operators)
    unfilled = [name for name, tensor in program.model.unsaved.items() if not has_values(tensor)]
    if unfilled and init is None:
        raise PipelineError(
            f"{unfilled[0]} is a buffer that no state dict holds, and {folder} was compiled without"
            " its values (under fake tensors, or on the meta device). Pass init=fn(name, tensor),"
            " which fills it in place, or compile a model on a real device."
        )
    for name, size in data["dimensions"].items():
        if name not in ranks.mesh.names or ranks.mesh.size(name) != size:
            raise PipelineError(
                f'{folder} was compiled for {size} ranks along "{name}", but there are'
                f' {ranks.mesh.size(name)}. Pass mesh= with "{name}" of size {size}, or compile it'
                " again."
            )
    labels = ranks.mesh.labels.items()
    return replace(
        program, groups={label: name for name, label in labels if label in program.groups}
    )
