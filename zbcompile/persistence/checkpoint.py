"""Checkpoints: the state of a training run under the model's own names, for any number of ranks and any schedule.

docs/running.md describes the contents of the directory.
"""

import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zbcompile.api.averages import Averages
from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.agreement import from_first, gathered, require_equal_programs, together
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import random_state, restore_random_state
from zbcompile.options import Options
from zbcompile.persistence.background_save import FolderWriter, Save
from zbcompile.persistence.checkpoint_directory import begin, candidates, final_name
from zbcompile.persistence.checkpoint_record import Chunk, require_whole
from zbcompile.persistence.folder_lock import FolderLock
from zbcompile.persistence.local_tensors import Holding, holding_of, require_names
from zbcompile.persistence.optimizer_state import kind_of, load_optimizer, optimizer_values
from zbcompile.persistence.plain_values import Tensors, digests_of, to_data
from zbcompile.persistence.saved_averages import averages_to_write, counted, load_averages, require_averages
from zbcompile.persistence.saved_state import UNKNOWN, SavedState, first_cause, open_state, quiet
from zbcompile.version import __version__

Values = dict[str, Any]
ROUND = 2.5  # seconds in which all ranks wait for the lock of a folder before they speak to each other again


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
    ema: Averages | None = None,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    wait: bool = True,
    frozen: bool = True,
) -> Path:
    """Write a checkpoint into `folder`, which all ranks see; every rank must call it. Returns the new directory.

    Each rank writes what it owns, tied parameters and copies of a stage once, as safetensors, planned by
    torch.distributed.checkpoint. The directory appears under its name once everything is on disk: a crash leaves
    earlier checkpoints intact. A pipeline that has saved holds the folder until it is closed: another run is refused.

    Args:
        source: a pipeline, or a plain model in one process.
        optimizer: over `pipe.parameters()`; its state is saved under the parameters' names.
        ema: averages of this pipeline, made by `zbcompile.ema`, to be saved as well.
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
        together(ranks, what, writer.finish)
        _require_same_call(ranks, step=count, wait=wait, frozen=frozen)
        _hold(writer, folder, ranks)
        holding, left_out = _without_frozen(holding, frozen)
        index = {**_index(holding, optimizer, count), "left_out": left_out, "ema": counted(ema)}
        values, plain = _values(holding, optimizer)
        values["ema"] = together(ranks, what, lambda: averages_to_write(ema, source, holding))
        process = _process(extra, ranks, values["process"], ema)
        fields = {**index, "values": plain, "process": process}
        partial = from_first(ranks, what, lambda: begin(folder, count))
        together(ranks, what, lambda: _require_shared(partial))
        chunks = _staged(ranks, partial, values, copy=not wait)
        timeout = source.options.timeout if isinstance(source, Pipeline) else Options.timeout
        processes = ranks.number, len(ranks.members)
        save = Save(
            partial, *processes, chunks, fields, keep, writer.lock, lambda: ranks.watch.fault is not None, timeout
        )
        if wait:
            _write(ranks, what, save)
        else:
            writer.start(save)
    return final_name(partial)


def hold_folder(folder: str | Path, pipe: Pipeline) -> None:
    """Refuse other runs that write checkpoints into `folder`, until `pipe` is closed; every rank must call it.

    Raises PipelineError, on every rank, if another run holds it.
    """
    with pipe.ranks.watch.region(f"taking {folder}"):
        _hold(pipe.attached(FolderWriter), Path(folder), pipe.ranks)


def load_checkpoint(
    path: str | Path,
    source: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ema: Averages | None = None,
    required: bool = True,
    random: bool = True,
    trust: bool = False,
    fallback: bool = False,
) -> Checkpoint:
    """Continue from a checkpoint, saved at any number of ranks, under any schedule, or from a plain model.

    Every rank must call it, and reads only its own part. Tensors are filled in place. All files are compared with
    their checksums first, each rank a share of them.

    Args:
        path: a checkpoint, or a folder of them, whose newest one is taken.
        source: a compiled or loaded pipeline, whose `step_index` is set too; or a plain model in one process.
        optimizer: gets the saved state and options; without it only the model is loaded.
        ema: averages of this pipeline, made by `zbcompile.ema`, which continue from the saved ones.
        required: whether to raise if there is none; otherwise the `step` of the result is 0 and its `path` None.
        random: also set the generators of Python, torch and numpy to where the first rank's were.
        trust: also read checkpoints that contain pickles, which can run any code: those of releases before this
            format, and those of torch.distributed.checkpoint itself.
        fallback: of a folder, take the newest checkpoint that is whole, with a warning on standard error.

    Raises PipelineError, on every rank and before anything is changed, if files are damaged or names or shapes differ.

    >>> at = zbcompile.load_checkpoint("checkpoints", pipe, optimizer, required=False)      # doctest: +SKIP
    >>> for step in range(at.step, steps): ...                                              # doctest: +SKIP
    """
    holding = holding_of(source)
    ranks = holding.ranks
    with ranks.watch.region(f"loading a checkpoint from {path}"):
        if isinstance(source, Pipeline):
            together(ranks, f"saving before loading {path}", source.attached(FolderWriter).finish)
        found = _newest_whole(Path(path), ranks, trust, fallback)
        if found is None and not required:
            return Checkpoint(step=0)
        if found is None:
            raise ranks.refusal(f"{path} holds no complete checkpoint. Save one with zbcompile.save_checkpoint.")
        more = optimizer, ema, random
        at = together(ranks, f"loading {found}", lambda: _load(open_state(found, trust), source, holding, *more))
    if isinstance(source, Pipeline):
        source.resume(at.step, source.state_dict())
    return at


def _newest_whole(path: Path, ranks: Ranks, trust: bool, fallback: bool) -> Path | None:
    """The checkpoint to load; None if there is none. Raises PipelineError, on every rank, for a damaged one."""
    found = gathered(ranks, candidates(path))[0]
    for number, each in enumerate(found):
        problem = next(filter(None, gathered(ranks, _problem(each, ranks, trust))), None)
        if problem is None:
            return each
        if not fallback or each == path or number == len(found) - 1:
            raise ranks.refusal(problem)
        if ranks.is_first:
            print(f"zbcompile: SKIPPING A DAMAGED CHECKPOINT: {problem}", file=sys.stderr, flush=True)
    return None


def _problem(path: Path, ranks: Ranks, trust: bool) -> str | None:
    """What is wrong with a checkpoint, as far as this process's share of its files shows."""
    try:
        record = open_state(path, trust).record
        if record is not None:
            require_whole(record, ranks.number, len(ranks.members))
    except PipelineError as error:
        return str(error)
    return None


def _hold(writer: FolderWriter, folder: Path, ranks: Ranks) -> None:
    """Take the lock of the folder, unless it is held. All ranks wait for it in rounds shorter than any timeout."""
    if writer.folder == folder.absolute():
        together(ranks, f"writing to {folder}", lambda: writer.lock.keep() if writer.lock else None)
        return
    lock = FolderLock(folder.absolute()) if ranks.is_first else None
    while not gathered(ranks, together(ranks, f"taking {folder}", lambda: lock is None or lock.attempt(ROUND)))[0]:
        pass
    writer.take(folder.absolute(), lock)


def _require_same_call(ranks: Ranks, **own: Any) -> None:
    """Raise PipelineError, on every rank, if ranks were given different arguments."""
    every = gathered(ranks, own)
    for name, number in ((name, number) for name in own for number in range(len(every))):
        if every[number][name] != every[0][name]:
            text = f"{name}={every[0][name]} on the first rank and {name}={every[number][name]} on rank {number}"
            raise ranks.refusal(f"save_checkpoint received {text}; expected the same on every rank.")


def _without_frozen(holding: Holding, frozen: bool) -> tuple[Holding, list[str]]:
    """The share without its frozen parameters, unless these are saved as well; and the names that a rank leaves out."""
    own = {name for name, each in holding.parameters.items() if not (frozen or each.requires_grad)}
    kept = {name: tensor for name, tensor in holding.tensors.items() if name not in own}
    return replace(holding, tensors=kept), sorted(set[str]().union(*gathered(holding.ranks, own)))


def _require_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise PipelineError(
            f"{partial}, which the first rank has made, is not visible to this rank. Checkpoints need a directory that "
            "all ranks share."
        )


def _values(holding: Holding, optimizer: Optimizer | None) -> tuple[dict[str, Tensors], Values]:
    """The tensors that this process writes, by section and name; all other values of the optimizer, of all, as data."""
    ranks = holding.ranks
    model = {name: tensor for name, tensor in holding.tensors.items() if holding.writes(name)}
    found = together(ranks, "saving the optimizer", lambda: optimizer_values(optimizer, holding) if optimizer else {})
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    plain = together(
        ranks,
        "saving the optimizer",
        lambda: {f"optimizer.{k}": to_data(v, f"optimizer.{k}", {}) for k, v in found.items() if k not in tensors},
    )
    everywhere = {key: value for part in gathered(ranks, plain) for key, value in part.items()}
    return {"model": model, "optimizer": tensors, "process": {}}, everywhere


def _process(extra: Any, ranks: Ranks, values: Tensors, averages: Averages | None) -> Values:
    """The first rank's generators, and `extra`, as data; their tensors are added to `values`. Raises PipelineError, on
    every rank, if another rank passes another `extra`, or has other averages: one rank's would be saved."""
    tensors: Tensors = {}
    data = together(ranks, "saving extra=", lambda: to_data(extra, "extra", tensors))
    given = {"extra": data, "the tensors of extra": digests_of(tensors), "ema": counted(averages)}
    remedy = "Pass the same on every rank: what belongs to one rank goes into a list of all, or a file of its own."
    require_equal_programs(ranks, given, "save one checkpoint with different values", remedy)
    if not ranks.is_first:
        return {}
    values.update(tensors)
    return {"random": to_data(random_state(ranks.device), "random", values), "extra": data}


def _staged(ranks: Ranks, partial: Path, values: Mapping[str, Tensors], copy: bool) -> list[Chunk]:
    """What this process writes of the values of all, as torch.distributed.checkpoint plans it."""
    import torch.distributed.checkpoint as dcp

    from zbcompile.persistence.checkpoint_storage import StagingWriter

    writer = StagingWriter(copy)
    given = {section: tensors for section, tensors in values.items() if tensors}
    try:
        with quiet(), ranks.watch.position.waiting("the plan of all ranks"):
            dcp.save(given, storage_writer=writer, process_group=ranks.everyone, no_dist=ranks.everyone is None)
    except dcp.CheckpointException as error:  # not an Exception; raised on every rank
        problem = f"writing to {partial} failed: {first_cause(error)}"
        raise ranks.refusal(problem) from None
    return writer.chunks


def _write(ranks: Ranks, what: str, save: Save) -> None:
    """Write at once. If that fails on any rank, the first one removes what was written."""
    try:
        together(ranks, what, save.write_own)
        together(ranks, what, lambda: save.commit() if save.lock else None)
    except PipelineError:
        if save.lock:
            save.abandon()
        raise


def _index(holding: Holding, optimizer: Optimizer | None, step: int) -> Values:
    ranks = holding.ranks
    kind = together(ranks, "saving the optimizer", lambda: kind_of(optimizer) if optimizer else None)
    kinds = gathered(ranks, kind)  # None if nothing is trained
    tied = {m.name: m.first for m in holding.model.members if m.saved and m.first != m.name}  # by the others' names
    return {
        "zbcompile": __version__,
        "torch": torch.__version__,
        "step": step,
        "ranks": ranks.count,
        "optimizer": next(filter(None, kinds), None),
        "tied": tied,
    }


def _load(
    saved: SavedState, source: Any, holding: Holding, optimizer: Optimizer | None, ema: Averages | None, random: bool
) -> Checkpoint:
    _require_same_names(saved, holding)
    _require_same_optimizer(saved, optimizer)
    require_averages(saved, ema, source, holding)
    with saved.blamed():
        generators, extra = saved.process_value("random"), saved.process_value("extra")
        with torch.no_grad():
            saved.read({name: each for name, each in holding.tensors.items() if name not in saved.left_out}, "model")
            if ema is not None:
                load_averages(saved, ema, holding)
        if optimizer is not None:
            load_optimizer(optimizer, holding, saved.keys("optimizer"), lambda wanted: saved.read(wanted, "optimizer"))
        if random and generators is not None:
            restore_random_state(generators, holding.ranks.device)
    return Checkpoint(saved.step, extra, saved.path, generators)


def _require_same_names(saved: SavedState, holding: Holding) -> None:
    """Require that the checkpoint holds the whole model, whatever part of it this process needs."""
    path, found, shapes = saved.path, saved.keys("model") | dict.fromkeys(saved.left_out), holding.shapes
    aliases = () if saved.record else (member.name for member in holding.model.members)  # torch saves tied ones twice
    require_names(path, sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys() - {*aliases}))
    for name, shape in shapes.items():
        _, size = found[name] or (None, ())
        if shape is not None and tuple(size) != shape and name not in saved.left_out:
            raise PipelineError(f"{name} has shape {list(size)} in {path} and {list(shape)} in the model.")


def _require_same_optimizer(saved: SavedState, optimizer: Optimizer | None) -> None:
    if optimizer is not None and saved.optimizer not in (kind_of(optimizer), UNKNOWN):
        raise PipelineError(
            f"{saved.path} was saved with {saved.optimizer or 'no optimizer'}, but this is {kind_of(optimizer)}. "
            "Use the same optimizer, or load without optimizer= to start with fresh optimizer state."
        )
