"""Checkpoints: the state of a training run under the model's own names, for any number of ranks and any schedule.

docs/running.md describes the contents of the directory.
"""

import functools
import hashlib
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
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
from zbcompile.persistence.checkpoint_directory import INDEX, begin, candidates, final_name, part_of, publish
from zbcompile.persistence.checkpoint_values import Tensors, to_data
from zbcompile.persistence.folder_writer import FolderWriter
from zbcompile.persistence.local_tensors import Holding, holding_of, require_names
from zbcompile.persistence.optimizer_state import kind_of, load_optimizer, optimizer_values
from zbcompile.persistence.safetensors_files import bytes_of
from zbcompile.persistence.saved_state import SavedState, open_state, record_to_text
from zbcompile.persistence.saved_values import (
    ONE_PROCESS,
    blamed,
    first_cause,
    quiet,
    read_process,
    read_values,
)
from zbcompile.safe_files import cannot_write, write_whole
from zbcompile.version import __version__

Values = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded: how many steps had been trained, the `extra` that was saved, its directory (None
    if there was none), and the state of the first rank's generators (see `random_state`)."""

    step: int
    extra: Any = None
    path: Path | None = None
    random: Mapping[str, Any] | None = field(default=None, repr=False)


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
    """Write a checkpoint into `folder`, which all ranks see; every rank must call it. Returns the new directory.

    Each rank writes what it owns, tied parameters and copies of a stage once, as safetensors, planned by
    torch.distributed.checkpoint. The directory appears under its name once everything is on disk: a crash leaves
    earlier checkpoints intact. Only one run may write into a folder.

    Args:
        source: a pipeline, or a plain model in one process.
        optimizer: over `pipe.parameters()`; its state is saved under the parameters' names.
        step: how many steps have been trained; default: `pipe.step_index`, for a plain model 0.
        extra: what else to resume from, such as a scheduler's or a data loader's state dict: None, numbers, strings,
            bytes, tensors, lists, tuples, dicts. It must be the same on all ranks.
        keep: remove all but the newest `keep` checkpoints up to this one, once it is complete.
        wait: False returns once everything is copied, and writes in a thread. The next save, a load and `pipe.close()`
            wait for it and raise what went wrong. Needs memory for a copy of this process's share on the CPU.
        frozen: False leaves out the parameters that are not trained, such as those below adapters. A load keeps the
            values that the model has for them.

    Raises PipelineError, on every rank, if it cannot be written.

    >>> zbcompile.save_checkpoint("checkpoints", pipe, optimizer, keep=3)           # doctest: +SKIP
    PosixPath('checkpoints/step-00000020')
    """
    holding, folder = holding_of(source), Path(folder)
    ranks, what = holding.ranks, f"saving a checkpoint in {folder}"
    if keep is not None and keep < 1:
        raise PipelineError(f"keep={keep}; expected at least 1, or None to keep all checkpoints.")
    if not wait and not isinstance(source, Pipeline):
        raise PipelineError("wait=False needs a pipeline, whose close() waits for the end. Save a plain model at once.")
    count = step if step is not None else source.step_index if isinstance(source, Pipeline) else 0
    if type(count) is not int or count < 0:
        raise PipelineError(f"step={count!r}; expected how many steps have been trained, a whole number from 0 on.")
    kept: Any = nullcontext(source.attached(FolderWriter)) if isinstance(source, Pipeline) else closing(FolderWriter())
    with kept as writer, ranks.watch.region(what):
        together(ranks, what, lambda: writer.finish(ranks.watch.position))
        given = {"step": count, "wait": wait, "frozen": frozen}
        agree(ranks, given, "call save_checkpoint with different arguments", "Pass the same on every rank.")
        tensors, own = together(ranks, what, lambda: _contents(holding, optimizer, frozen))
        _add_process(tensors, own["values"], extra, ranks)
        partial = from_first(ranks, what, lambda: begin(folder, count))
        together(ranks, what, lambda: _require_shared(partial))
        commit = functools.partial(_commit, partial, _fields(holding, count), keep)
        _write(ranks, partial, tensors, own, commit, None if wait else writer)
    return final_name(partial)


def verify_checkpoint(path: str | Path) -> None:
    """Compares every file of a checkpoint, or of each checkpoint in a folder, with its checksums.

    Raises PipelineError for a damaged checkpoint, and if there is none.

    >>> zbcompile.verify_checkpoint("checkpoints")                                  # doctest: +SKIP
    """
    checkpoints = candidates(path)
    if not checkpoints:
        there = Path(path).is_dir()
        raise PipelineError(f"{path} holds no checkpoint." if there else f"there is no folder {path}.")
    for checkpoint in checkpoints:
        open_state(checkpoint).require_whole()


def load_checkpoint(
    path: str | Path,
    source: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    *,
    required: bool = True,
) -> Checkpoint:
    """Continue from a checkpoint, saved at any number of ranks, under any schedule, or from a plain model. The
    generators of Python, torch and numpy are set to where the first rank's were.

    Every rank must call it, and reads only its own part. Tensors are filled in place. All files are compared with
    their checksums first, each rank a share of them.

    Args:
        path: a checkpoint, or a folder of them, whose newest one is taken.
        source: a pipeline, whose `step_index` is set too, or a plain model in one process. A pipeline that is not
            compiled yet remembers the checkpoint: the first `compile`, `eval` or step fills the parameters, the first
            `compile` or step the optimizer, which `pipe.optimizer` made, and raises if names or shapes differ.
        optimizer: gets the saved state and options; without it only the model is loaded.
        required: whether to raise if there is none; otherwise the `step` of the result is 0 and its `path` None.

    Raises PipelineError, on every rank and before anything is changed, if files are damaged or names or shapes differ.

    >>> at = zbcompile.load_checkpoint("checkpoints", pipe, optimizer, required=False)      # doctest: +SKIP
    >>> for step in range(at.step, steps): ...                                              # doctest: +SKIP
    """
    at = load_state(path, source, optimizer, required=required)
    if at.random is not None and at.path is not None:
        ranks = source.ranks if isinstance(source, Pipeline) else holding_of(source).ranks
        with ranks.watch.region(f"restoring the generators from {path}"), blamed(at.path):
            restore_random_state(at.random, ranks.device)
    return at


def load_state(
    path: str | Path, source: Pipeline | nn.Module, optimizer: Optimizer | None = None, *, required: bool = True
) -> Checkpoint:
    """Loads as `load_checkpoint` does, but leaves the random generators alone."""
    ranks = source.ranks if isinstance(source, Pipeline) else holding_of(source).ranks
    with ranks.watch.region(f"loading a checkpoint from {path}"):
        if isinstance(source, Pipeline):
            writer = source.attached(FolderWriter)
            together(ranks, f"saving before loading {path}", lambda: writer.finish(ranks.watch.position))
        found = _newest(Path(path), ranks)
        if found is None and not required:
            return Checkpoint(step=0)
        if found is None:
            raise ranks.refusal(f"{path} holds no complete checkpoint. Save one with zbcompile.save_checkpoint.")
        load = CheckpointLoad(open_state(found), source, optimizer)
        at = together(ranks, f"loading {found}", load.begin)
        if not isinstance(source, Pipeline):
            load(True)
        else:
            before, source.step_index = source.step_index, at.step
            try:
                source.once_placed(load)
            except BaseException:
                source.step_index = before
                raise
    return at


def _newest(path: Path, ranks: Ranks) -> Path | None:
    """The checkpoint to load; None if there is none. Raises PipelineError, on every rank, for a damaged one."""
    found = next(iter(gathered(ranks, candidates(path))[0]), None)
    problem = None if found is None else next(filter(None, gathered(ranks, _problem(found, ranks))), None)
    if problem is not None:
        raise ranks.refusal(problem)
    return found


def _problem(path: Path, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, as far as this process's share of its files shows."""
    try:
        open_state(path).require_whole(ranks.number, len(ranks.members))
    except PipelineError as error:
        return str(error)
    return None


def _require_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise PipelineError(
            f"{partial}, which the first rank has made, is not visible to this rank. Checkpoints need a directory that "
            "all ranks share."
        )


def _contents(holding: Holding, optimizer: Optimizer | None, frozen: bool) -> tuple[Tensors, Values]:
    """The tensors that this process writes, and what else it contributes to the record."""
    left_out = {name for name, each in holding.parameters.items() if not (frozen or each.requires_grad)}
    holding = replace(holding, tensors={n: each for n, each in holding.tensors.items() if n not in left_out})
    found: Values = {f"model.{name}": holding.tensors[name] for name in sorted(holding.tensors) if holding.writes(name)}
    kind, state = (kind_of(optimizer), optimizer_values(optimizer, holding)) if optimizer else (None, {})
    found |= {f"optimizer.{key}": each for key, each in state.items()}
    tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
    values = {name: to_data(each, name, tensors) for name, each in found.items() if name not in tensors}
    return tensors, {"values": values, "optimizer": kind, "left_out": sorted(left_out)}


def _add_process(tensors: Tensors, values: Values, extra: Any, ranks: Ranks) -> None:
    """Add the first rank's generators, and `extra`. Raises PipelineError, on every rank, if another rank passes another
    `extra`: one rank's would be saved."""
    own: Tensors = {}
    data = together(ranks, "saving extra=", lambda: to_data(extra, "extra", own))
    given = {"extra": data, "the tensors of extra": {name: _digest(each) for name, each in own.items()}}
    remedy = "Pass the same on every rank: what belongs to one rank goes into a list of all, or a file of its own."
    agree(ranks, given, "save one checkpoint with different values", remedy)
    if ranks.is_first:
        values |= {"extra": data, "random": to_data(random_state(ranks.device), "random", own)}
        tensors |= own


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor.detach().cpu().contiguous())).hexdigest()


def _fields(holding: Holding, step: int) -> Values:
    """What the record says of the whole checkpoint."""
    tied = {m.name: m.first for m in holding.model.members if m.saved and m.first != m.name}  # by the others' names
    versions = {"zbcompile": __version__, "torch": torch.__version__}
    return {**versions, "step": step, "ranks": holding.ranks.count, "tied": tied}


def _commit(partial: Path, fields: Values, keep: int | None, parts: Sequence[Mapping[str, Any]]) -> None:
    """On the first process: write the record, and give the directory its name."""
    try:
        write_whole(partial / INDEX, record_to_text(fields, parts).encode())
        publish(partial, keep)
    except OSError as error:
        raise cannot_write(partial, error) from None


def _write(
    ranks: Ranks, partial: Path, tensors: Tensors, own: Values, commit: Callable[..., None], later: FolderWriter | None
) -> None:
    """Write at once, and on a failure remove what was written; or copy what is to be written, for `later`."""
    import torch.distributed.checkpoint as dcp  # takes a second

    from zbcompile.persistence.checkpoint_storage import CheckpointWriter

    position, alone = ranks.watch.position, ranks.everyone is None
    working = later.working if later else position.working
    storage = CheckpointWriter(part_of(partial, ranks.number), own, commit, working)
    if later is not None:
        group = later.group_of(ranks)
        warnings.filterwarnings("ignore", message=ONE_PROCESS)  # the thread outlives any context
        pending = dcp.async_save(tensors, storage_writer=storage, process_group=group, no_dist=alone)
        later.start(partial, pending, is_first=ranks.number == 0)
        return
    try:
        with quiet(), position.waiting("the checkpoint of all ranks"):
            dcp.save(tensors, storage_writer=storage, process_group=ranks.everyone, no_dist=alone)
    except dcp.CheckpointException as error:  # not an Exception; raised on every rank
        if ranks.number == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise ranks.refusal(f"{partial} was not finished: {first_cause(error)}") from None


@dataclass
class CheckpointLoad:
    """A checkpoint that is being loaded: into `source` as soon as its parameters have their places, and into the
    optimizer as soon as a step is compiled."""

    saved: SavedState
    source: Pipeline | nn.Module
    optimizer: Optimizer | None
    filled: bool = False

    def begin(self) -> Checkpoint:
        """Read what no parameter has to wait for: the step, the random state and `extra`. Raises PipelineError if the
        state is that of another optimizer."""
        _require_same_optimizer(self.saved, self.optimizer)
        with blamed(self.saved.path):
            random, extra = read_process(self.saved, "random"), read_process(self.saved, "extra")
        return Checkpoint(self.saved.fields["step"], extra, self.saved.path, random)

    def __call__(self, trains: bool) -> None:
        """Fill what can be filled; every rank must call it."""
        if self.filled and not (trains and self.optimizer is not None):
            return
        holding = holding_of(self.source)
        together(holding.ranks, f"loading {self.saved.path}", lambda: self._fill(holding, trains))
        if isinstance(self.source, Pipeline):
            self.source.resume(self.source.step_index, holding.model.names)
        self.filled = True

    def _fill(self, holding: Holding, trains: bool) -> None:
        saved, left_out = self.saved, self.saved.fields["left_out"]
        _require_same_names(saved, holding)
        with blamed(saved.path):
            if not self.filled:
                with torch.no_grad():
                    wanted = {name: each for name, each in holding.tensors.items() if name not in left_out}
                    read_values(saved, wanted, "model")
            if self.optimizer is not None and trains:
                read = functools.partial(read_values, saved, section="optimizer")
                load_optimizer(self.optimizer, holding, saved.keys("optimizer"), read)


def _require_same_names(saved: SavedState, holding: Holding) -> None:
    """Require that the checkpoint holds the whole model, whatever part of it this process needs."""
    left_out = saved.fields["left_out"]
    found, shapes = saved.keys("model") | dict.fromkeys(left_out), holding.shapes
    require_names(saved.path, sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys()))
    for name, shape in shapes.items():
        each = found[name]
        if shape is not None and each is not None and each.shape != shape:
            raise PipelineError(f"{name} has shape {list(each.shape)} in {saved.path} and {list(shape)} in the model.")


def _require_same_optimizer(saved: SavedState, optimizer: Optimizer | None) -> None:
    if optimizer is not None and saved.fields["optimizer"] != kind_of(optimizer):
        was, this = saved.fields["optimizer"] or "no optimizer", kind_of(optimizer)
        raise PipelineError(
            f"{saved.path} was saved with {was}, but this is {this}. "
            "Use the same optimizer, or load without optimizer= to start with fresh optimizer state."
        )
