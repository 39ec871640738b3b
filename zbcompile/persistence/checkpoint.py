"""Checkpoints: the state of a training run under the model's own names, for any number of ranks and
any schedule.

docs/checkpoints.md describes the contents of the directory.
"""

import hashlib
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.agreement import agree, from_first, together
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import shard_of
from zbcompile.model.seeds import random_state, restore_random_state
from zbcompile.persistence.checkpoint_directory import INDEX, begin, candidates, final_name
from zbcompile.persistence.checkpoint_files import CheckpointReader, CheckpointWriter, first_cause
from zbcompile.persistence.checkpoint_values import Tensors, from_data, to_data
from zbcompile.persistence.local_state import (
    LocalState,
    class_name,
    load_optimizer,
    local_state,
    optimizer_entries,
    require_names,
)
from zbcompile.persistence.safetensors_files import bytes_of
from zbcompile.safe_files import damage_in
from zbcompile.version import __version__

Values = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded: how many steps had been trained, the `extra` that was saved,
    its directory (None if there was none), and the state of the first rank's generators (see
    `random_state`)."""

    step: int
    extra: Any = None
    path: Path | None = None
    random: Mapping[str, Any] = field(default_factory=dict, repr=False)


class BackgroundSave:
    """The save of a pipeline that is under way in a thread, and the process group in which its
    threads meet."""

    def __init__(self) -> None:
        self.group: Any = None
        self.pending: tuple[Path, Any, bool] | None = None

    def close(self) -> None:
        """Blocks until the save in the thread has ended. Raises PipelineError if it failed, and
        removes its files."""
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
    if step is None:
        step = source.step_index if isinstance(source, Pipeline) else 0
    if type(step) is not int or step < 0:
        raise PipelineError(
            f"step={step!r}; expected how many steps have been trained, a whole number from 0 on."
        )
    with ranks.watch.region(what):
        background = _finish_earlier(source, ranks, what)
        tensors: Tensors = {}
        data, kind = together(
            ranks, what, lambda: (to_data(extra, "extra", tensors), class_name(optimizer))
        )
        arguments = {"step": step, "wait": wait, "frozen": frozen, "optimizer": kind}
        digests = {
            name: hashlib.sha256(bytes_of(tensor.detach().cpu().contiguous())).hexdigest()
            for name, tensor in tensors.items()
        }
        remedy = (
            "Pass the same on every rank: what belongs to one rank goes into a list of all, or a"
            " file of its own."
        )
        agree(
            ranks,
            {**arguments, "extra": data, "the tensors of extra": digests},
            "save one checkpoint with different values",
            remedy,
        )
        random = to_data(random_state(ranks.device), "random", tensors)
        values: Values = {"extra": data, "random": random}
        if not ranks.is_first:
            tensors, values = {}, {}
        contribution = together(
            ranks, what, lambda: _add_state(tensors, values, state, optimizer, frozen)
        )
        partial = from_first(ranks, what, lambda: begin(folder, step))
        together(ranks, what, lambda: _require_shared(partial))
        fields = {
            "zbcompile": __version__,
            "torch": torch.__version__,
            "ranks": ranks.count,
            "step": step,
            "optimizer": kind,
            "keep": keep,
        }
        _write(ranks, partial, tensors, contribution, fields, None if wait else background)
    return final_name(partial)


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
    checkpoint = load_state(path, source, optimizer, required=required)
    if checkpoint.path is not None:
        ranks = local_state(source).ranks
        with (
            ranks.watch.region(f"restoring the generators from {path}"),
            damage_in(checkpoint.path / INDEX, "Load another checkpoint"),
        ):
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
    state = local_state(source)
    ranks = state.ranks
    with ranks.watch.region(f"loading a checkpoint from {path}"):
        _finish_earlier(source, ranks, f"saving before loading {path}")
        newest = ranks.gather(next(iter(candidates(path)), None))[0]
        if newest is None and not required:
            return Checkpoint(step=0)
        if newest is None:
            raise ranks.refusal(
                f"{path} holds no complete checkpoint. Save one with zbcompile.save_checkpoint."
            )
        what = f"loading {newest}"
        reader = together(ranks, what, lambda: _checked(newest, state, optimizer))
        checkpoint = together(ranks, what, lambda: _fill(reader, state, optimizer))
        if isinstance(source, Pipeline):
            source.resume(checkpoint.step, state.model.names)
    return checkpoint


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


def _add_state(
    tensors: Tensors, values: Values, state: LocalState, optimizer: Optimizer | None, frozen: bool
) -> Values:
    """Adds the model's and the optimizer's tensors that this process writes, and their other
    values. Returns the contribution of this process to the index."""
    left_out = {
        name for name, value in state.parameters.items() if not (frozen or value.requires_grad)
    }
    entries: Values = {
        f"model.{name}": shard_of(tensor)
        for name, tensor in sorted(state.tensors.items())
        if name not in left_out and state.is_writer(name)
    }
    if optimizer is not None:
        for key, value in optimizer_entries(optimizer, state).items():
            entries[f"optimizer.{key}"] = value
    for name, value in entries.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            values[name] = to_data(value, name, tensors)
    return {"values": values, "left_out": sorted(left_out)}


def _write(
    ranks: Ranks,
    partial: Path,
    tensors: Tensors,
    contribution: Values,
    fields: Values,
    background: BackgroundSave | None,
) -> None:
    """Writes a checkpoint, with `background` in a thread and from copies of the tensors."""
    position = ranks.watch.position
    working = position.working if background is None else nullcontext
    file = partial / f"part-{ranks.number:05d}.safetensors"
    writer = CheckpointWriter(file, contribution, fields, working)
    options: Values = {"storage_writer": writer, "no_dist": ranks.everyone is None}
    sections: Values = {}
    for name, tensor in tensors.items():  # torch logs every key of the outer dict
        section, dot, key = name.partition(".")
        (sections.setdefault(section, {}) if dot else sections)[key or section] = tensor
    if background is not None:
        with position.waiting("the making of a group"):
            background.group = background.group or ranks.new_gloo_group()
        future = dcp.async_save(sections, process_group=background.group, **options)
        background.pending = partial, future, ranks.number == 0
        return
    try:
        with position.waiting("the checkpoint of all ranks"):
            dcp.save(sections, process_group=ranks.everyone, **options)
    except dcp.CheckpointException as error:  # not an Exception; raised on every rank
        raise ranks.watch.on_all_ranks(_unfinished(partial, error, ranks.number == 0)) from None


def _unfinished(partial: Path, error: BaseException, is_first: bool) -> PipelineError:
    """Returns the error for a save that failed. The first process removes what was written."""
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
    rank, cause = first_cause(error)
    text = f"{cause}".partition("\n")[0]
    text = text if isinstance(cause, PipelineError) else f"{type(cause).__name__}: {text}"
    return PipelineError(
        f"{partial} was not finished: {text if rank is None else f'rank {rank}: {text}'}"
    )


# Loading


def _checked(path: Path, state: LocalState, optimizer: Optimizer | None) -> CheckpointReader:
    """Returns the reader of a checkpoint of this whole model and this kind of optimizer, whatever
    part is read here."""
    reader = CheckpointReader(path)
    saved_kind, kind = reader.fields["optimizer"], class_name(optimizer)
    if kind is not None and saved_kind != kind:
        raise PipelineError(
            f"{path} was saved with {saved_kind or 'no optimizer'}, but this is {kind}. Use the"
            " same optimizer, or load without optimizer= to start with fresh optimizer state."
        )
    saved = reader.section("model") | dict.fromkeys(reader.fields["left_out"])
    require_names(
        path, sorted(state.shapes.keys() - saved.keys()), sorted(saved.keys() - state.shapes.keys())
    )
    for name, shape in state.shapes.items():
        if shape is not None and saved[name] is not None and saved[name].size != shape:
            raise PipelineError(
                f"{name} has shape {list(saved[name].size)} in {path} and {list(shape)} in the"
                " model."
            )
    return reader


def _fill(reader: CheckpointReader, state: LocalState, optimizer: Optimizer | None) -> Checkpoint:
    """Fills the model and the optimizer. Returns the checkpoint with its other values."""
    with damage_in(reader.folder / INDEX, "Load another checkpoint"):
        saved: Values = {**reader.metadata.state_dict_metadata}
        tensors = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
            for name, stored in saved.items()
            if name.split(".")[0] in ("extra", "random")
        }
        reader.fill(tensors)
        values = reader.fields["values"]
        random, extra = (from_data(values[name], tensors) for name in ("random", "extra"))
        in_model = reader.section("model")
        with torch.no_grad():
            reader.fill({f"model.{k}": v for k, v in state.tensors.items() if k in in_model})
        if optimizer is not None:
            load_optimizer(optimizer, state, reader.section("optimizer"), values, reader.fill)
    return Checkpoint(reader.fields["step"], extra, reader.folder, random)
