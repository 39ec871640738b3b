"""Checkpoints: the state of a training run under the model's own names, for any number of ranks and
any schedule.

docs/checkpoints.md describes the contents of the directory.
"""

import functools
import hashlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.agreement import agree, from_first, gathered, together
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import random_state, restore_random_state
from zbcompile.model.tensor_shard import shard_of
from zbcompile.passes.errors import CompileError
from zbcompile.persistence.checkpoint_directory import begin, candidates, final_name
from zbcompile.persistence.checkpoint_values import Tensors, from_data, to_data
from zbcompile.persistence.local_state import LocalState, local_state, require_names
from zbcompile.persistence.optimizer_entries import class_name, load_optimizer, optimizer_entries
from zbcompile.persistence.safetensors_files import bytes_of, safetensors_dtype
from zbcompile.version import __version__

Values = dict[str, Any]
ONE_PROCESS = (  # how torch warns that one process reads or writes alone
    "torch.distributed is disabled"
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded: how many steps had been trained, the `extra` that was saved,
    its directory (None if there was none), and the state of the first rank's generators (see
    `random_state`)."""

    step: int
    extra: Any = None
    path: Path | None = None
    random: Mapping[str, Any] | None = field(default=None, repr=False)


class BackgroundSave:
    """The save of a pipeline that is under way in a thread, and the process group in which its
    threads meet."""

    def __init__(self) -> None:
        self.group: Any = None
        self.pending: tuple[Path, Any, bool] | None = None

    def close(self) -> None:
        """Waits for the save that is under way. Raises PipelineError if it failed, and removes what
        it has written."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        partial, future, is_first = pending
        if (error := future.exception()) is not None:
            raise _unfinished(partial, error, is_first) from error


def save_checkpoint(
    folder: str | Path,
    source: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    wait: bool = True,
    frozen: bool = True,
) -> Path:
    """Write a checkpoint into `folder`, which all ranks see; every rank must call it. Returns the
    new directory.

    Each rank writes what it owns, tied parameters and copies of a stage once, as safetensors,
    planned by torch.distributed.checkpoint. The directory appears under its name once everything is
    on disk: a crash leaves earlier checkpoints intact. Only one run may write into a folder.

    Args:
        source: a compiled pipeline, or a plain model in one process.
        optimizer: over `pipe.parameters()`; its state is saved under the parameters' names.
        step: how many steps have been trained; default: `pipe.step_index`, for a plain model 0.
        extra: what else to resume from, such as a scheduler's or a data loader's state dict: None,
            numbers, strings, bytes, tensors, lists, tuples, dicts. It must be the same on all
            ranks.
        keep: remove all but the newest `keep` checkpoints up to this one, once it is complete.
        wait: False returns once everything is copied, and writes in a thread. The next save, a load
            and `pipe.close()` wait for it and raise what went wrong. Needs memory for a copy of
            this process's share on the CPU.
        frozen: False leaves out the parameters that are not trained, such as those below adapters.
            A load keeps the values that the model has for them.

    Raises PipelineError, on every rank, if it cannot be written.

    >>> zbcompile.save_checkpoint("checkpoints", pipe, optimizer, keep=3)           # doctest: +SKIP
    PosixPath('checkpoints/step-00000020')
    """
    state, folder = local_state(source), Path(folder)
    ranks, what = state.ranks, f"saving a checkpoint in {folder}"
    if keep is not None and keep < 1:
        raise PipelineError(f"keep={keep}; expected at least 1, or None to keep all checkpoints.")
    if not wait and not isinstance(source, Pipeline):
        raise PipelineError(
            "wait=False needs a pipeline, whose close() waits for the end. Save a plain model at"
            " once."
        )
    count = step if step is not None else source.step_index if isinstance(source, Pipeline) else 0
    if type(count) is not int or count < 0:
        raise PipelineError(
            f"step={count!r}; expected how many steps have been trained, a whole number from 0 on."
        )
    with ranks.watch.region(what):
        background = _finish_earlier(source, ranks, what)
        arguments = {"step": count, "wait": wait, "frozen": frozen}
        agree(
            ranks,
            arguments,
            "call save_checkpoint with different arguments",
            "Pass the same on every rank.",
        )
        tensors, contribution = together(ranks, what, lambda: _contents(state, optimizer, frozen))
        _add_process(tensors, contribution["values"], extra, ranks)
        together(ranks, what, lambda: _require_dtypes(tensors))
        partial = from_first(ranks, what, lambda: begin(folder, count))
        together(ranks, what, lambda: _require_shared(partial))
        _write(
            ranks,
            partial,
            tensors,
            (contribution, _fields(state, count), keep),
            None if wait else background,
        )
    return final_name(partial)


def verify_checkpoint(path: str | Path) -> None:
    """Compares every file of a checkpoint, or of each checkpoint in a folder, with its SHA-256 in
    the index.

    Raises PipelineError for a damaged checkpoint, and if there is none.

    >>> zbcompile.verify_checkpoint("checkpoints")                                  # doctest: +SKIP
    """
    from zbcompile.persistence.checkpoint_files import require_unchanged

    checkpoints = candidates(path)
    if not checkpoints:
        there = Path(path).is_dir()
        raise PipelineError(
            f"{path} holds no checkpoint." if there else f"there is no folder {path}."
        )
    for checkpoint in checkpoints:
        require_unchanged(checkpoint)


def load_checkpoint(
    path: str | Path,
    source: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    *,
    required: bool = True,
) -> Checkpoint:
    """Continue from a checkpoint, saved at any number of ranks, under any schedule, or from a plain
    model. The generators of Python, torch and numpy are set to where the first rank's were.

    Every rank must call it, and reads only its own part. Tensors are filled in place.
    `zbcompile.verify_checkpoint` compares all files with their checksums; a load checks the index,
    and the sizes and headers of files.

    Args:
        path: a checkpoint, or a folder of them, whose newest one is taken.
        source: a compiled pipeline, whose `step_index` is set too, or a plain model in one process.
        optimizer: gets the saved state and options; without it only the model is loaded.
        required: whether to raise if there is none; otherwise the `step` of the result is 0 and its
            `path` None.

    Raises PipelineError, on every rank and before anything is changed, if the pipeline is not
    compiled, the index is damaged, or names or shapes differ.

    >>> at = zbcompile.load_checkpoint("folder", pipe, optimizer, required=False)  # doctest: +SKIP
    >>> for step in range(at.step, steps): ...  # doctest: +SKIP
    """
    checkpoint, ranks = load_state(path, source, optimizer, required=required), _ranks_of(source)
    if checkpoint.random is not None and checkpoint.path is not None:
        with ranks.watch.region(f"restoring the generators from {path}"), _blamed(checkpoint.path):
            restore_random_state(checkpoint.random, ranks.device)
    return checkpoint


def load_state(
    path: str | Path,
    source: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    *,
    required: bool = True,
) -> Checkpoint:
    """Loads as `load_checkpoint` does, but leaves the random generators alone."""
    ranks = _ranks_of(source)
    with ranks.watch.region(f"loading a checkpoint from {path}"):
        _finish_earlier(source, ranks, f"saving before loading {path}")
        state = local_state(source)
        newest = gathered(ranks, next(iter(candidates(path)), None))[0]
        if newest is None and not required:
            return Checkpoint(step=0)
        if newest is None:
            raise ranks.refusal(
                f"{path} holds no complete checkpoint. Save one with zbcompile.save_checkpoint."
            )
        index = together(
            ranks, f"loading {newest}", lambda: _checked_index(newest, state, optimizer)
        )
        checkpoint = together(ranks, f"loading {newest}", lambda: _fill(index, state, optimizer))
        if isinstance(source, Pipeline):
            source.resume(checkpoint.step, state.model.names)
    return checkpoint


def _ranks_of(source: Pipeline | nn.Module) -> Ranks:
    return source.ranks if isinstance(source, Pipeline) else local_state(source).ranks


def _finish_earlier(source: Pipeline | nn.Module, ranks: Ranks, what: str) -> BackgroundSave:
    """Waits on every rank for the save that is under way."""
    background = (
        source.attached(BackgroundSave) if isinstance(source, Pipeline) else BackgroundSave()
    )
    together(ranks, what, background.close)
    return background


# Saving


def _require_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise PipelineError(
            f"{partial}, which the first rank has made, is not visible to this rank. Checkpoints"
            " need a directory that all ranks share."
        )


def _contents(
    state: LocalState, optimizer: Optimizer | None, frozen: bool
) -> tuple[Tensors, Values]:
    """Returns the tensors that this process writes, and what else it contributes to the index."""
    kind = None if optimizer is None else class_name(optimizer)
    left_out = {
        name for name, value in state.parameters.items() if not (frozen or value.requires_grad)
    }
    names = [
        name for name in sorted(state.tensors) if name not in left_out and state.is_writer(name)
    ]
    entries: Values = {f"model.{name}": shard_of(state.tensors[name]) for name in names}
    if optimizer is not None:
        entries |= {
            f"optimizer.{key}": value for key, value in optimizer_entries(optimizer, state).items()
        }
    tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    values = {
        name: to_data(value, name, tensors)
        for name, value in entries.items()
        if name not in tensors
    }
    return tensors, {"values": values, "optimizer": kind, "left_out": sorted(left_out)}


def _add_process(tensors: Tensors, values: Values, extra: Any, ranks: Ranks) -> None:
    """Adds the first rank's generators, and `extra`.

    Raises PipelineError, on every rank, if another rank passes another `extra`: one rank's would be
    saved.
    """
    extra_tensors: Tensors = {}
    data = together(ranks, "saving extra=", lambda: to_data(extra, "extra", extra_tensors))
    compared = {
        "extra": data,
        "the tensors of extra": {name: _digest(tensor) for name, tensor in extra_tensors.items()},
    }
    remedy = (
        "Pass the same on every rank: what belongs to one rank goes into a list of all, or a file"
        " of its own."
    )
    agree(ranks, compared, "save one checkpoint with different values", remedy)
    if ranks.is_first:
        values |= {
            "extra": data,
            "random": to_data(random_state(ranks.device), "random", extra_tensors),
        }
        tensors |= extra_tensors


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor.detach().cpu().contiguous())).hexdigest()


def _require_dtypes(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if safetensors_dtype(tensor.dtype) is None:
            raise PipelineError(
                f"{name} is {tensor.dtype}, which safetensors cannot hold. Convert it, or leave it"
                " out of the state dict (persistent=False)."
            )


def _fields(state: LocalState, step: int) -> Values:
    """Returns what the index says of the whole checkpoint."""
    # by the others' names
    tied = {m.name: m.first for m in state.model.members if m.saved and m.first != m.name}
    versions = {"zbcompile": __version__, "torch": torch.__version__}
    return {**versions, "step": step, "ranks": state.ranks.count, "tied": tied}


def _write(
    ranks: Ranks,
    partial: Path,
    tensors: Tensors,
    record: tuple[Any, ...],
    background: BackgroundSave | None,
) -> None:
    """Writes at once; or copies what is to be written, and writes in a thread."""
    import torch.distributed.checkpoint as dcp  # takes a second

    from zbcompile.persistence.checkpoint_files import CheckpointWriter

    position, alone, is_first = ranks.watch.position, ranks.everyone is None, ranks.number == 0
    working = position.working if background is None else nullcontext
    contribution, fields, keep = record
    writer = CheckpointWriter(partial, ranks.number, contribution, fields, keep, working)
    if background is not None:
        with position.waiting("the making of a group"):
            background.group = background.group or ranks.apart()
        warnings.filterwarnings("ignore", message=ONE_PROCESS)  # the thread outlives any context
        future = dcp.async_save(
            tensors, storage_writer=writer, process_group=background.group, no_dist=alone
        )
        background.pending = partial, future, is_first
        return
    try:
        with _quiet(), position.waiting("the checkpoint of all ranks"):
            dcp.save(tensors, storage_writer=writer, process_group=ranks.everyone, no_dist=alone)
    except dcp.CheckpointException as error:  # not an Exception; raised on every rank
        raise ranks.watch.known_to_all(_unfinished(partial, error, is_first)) from None


def _unfinished(partial: Path, error: BaseException, is_first: bool) -> PipelineError:
    """Returns the error for a save that failed. The first process removes what was written."""
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
    return PipelineError(f"{partial} was not finished: {_first_cause(error)}")


# Loading


def _checked_index(path: Path, state: LocalState, optimizer: Optimizer | None) -> Any:
    """Returns the index of a checkpoint of this whole model and this kind of optimizer, whatever
    part is read here."""
    from zbcompile.persistence.checkpoint_files import read_index, require_headers

    index = read_index(path)
    require_headers(index, state.ranks.number, len(state.ranks.members))
    was, this = index.fields["optimizer"], None if optimizer is None else class_name(optimizer)
    if this is not None and was != this:
        raise PipelineError(
            f"{path} was saved with {was or 'no optimizer'}, but this is {this}. Use the same"
            " optimizer, or load without optimizer= to start with fresh optimizer state."
        )
    saved = index.section("model") | dict.fromkeys(index.fields["left_out"])
    require_names(
        path, sorted(state.shapes.keys() - saved.keys()), sorted(saved.keys() - state.shapes.keys())
    )
    for name, shape in state.shapes.items():
        stored = saved[name]
        if shape is not None and stored is not None and stored.shape != shape:
            raise PipelineError(
                f"{name} has shape {list(stored.shape)} in {path} and {list(shape)} in the model."
            )
    return index


def _fill(index: Any, state: LocalState, optimizer: Optimizer | None) -> Checkpoint:
    """Fills the model and the optimizer. Returns the checkpoint with its other values."""
    with _blamed(index.path):
        process = {
            name: value
            for name, value in index.tensors.items()
            if name.split(".")[0] in ("extra", "random")
        }
        tensors = {
            name: torch.empty(value.shape, dtype=value.dtype, device="cpu")
            for name, value in process.items()
        }
        _read(index, tensors)
        random, extra = (
            from_data(index.fields["values"][name], tensors) for name in ("random", "extra")
        )
        stored = index.section("model")
        with torch.no_grad():
            _read(
                index,
                {f"model.{name}": value for name, value in state.tensors.items() if name in stored},
            )
        if optimizer is not None:
            plain = index.fields["values"].items()
            values = {
                key: from_data(value, {}) for key, value in plain if key.startswith("optimizer.")
            }
            load_optimizer(
                optimizer,
                state,
                index.section("optimizer"),
                values,
                functools.partial(_read, index),
            )
    return Checkpoint(index.fields["step"], extra, index.path, random)


def _read(index: Any, tensors: Values) -> None:
    """Fills tensors out of a checkpoint in place, by their names in it."""
    import torch.distributed.checkpoint as dcp

    from zbcompile.persistence.checkpoint_files import CheckpointReader

    try:
        with _quiet():
            dcp.load(tensors, storage_reader=CheckpointReader(index), no_dist=True)
    except dcp.CheckpointException as error:
        raise PipelineError(
            f"{index.path} cannot be read: {_first_cause(error)}. Load another checkpoint."
        ) from None


@contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """Raises PipelineError, with the checkpoint's name, for what fails inside."""
    try:
        yield
    except (PipelineError, CompileError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error!s:.200}".partition("\n")[0]
        raise PipelineError(
            f"{path} cannot be loaded ({problem}). Load another checkpoint."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses torch's warning that one process reads or writes alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ONE_PROCESS)
        yield


def _first_cause(error: BaseException) -> str:
    """Returns what went wrong on the first rank that failed, if torch.distributed.checkpoint says
    which."""
    failures = getattr(error, "failures", None) or {None: (error, None)}
    rank, (cause, _) = next(iter(sorted(failures.items())))
    text = f"{cause}".partition("\n")[0]
    text = text if isinstance(cause, PipelineError) else f"{type(cause).__name__}: {text}"
    return text if rank is None else f"rank {rank}: {text}"
