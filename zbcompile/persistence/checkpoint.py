"""Checkpoints: the state of a training run under the model's own names, for any number of ranks and any schedule.

docs/running.md describes the contents of the directory.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zbcompile.atomic_files import write_whole
from zbcompile.distributed.agreement import gathered, together
from zbcompile.errors import PipelineError
from zbcompile.frontend.pipeline import Pipeline
from zbcompile.model.random_state import random_state, restore_random_state
from zbcompile.persistence.checkpoint_directory import INDEX, begin, find_checkpoint, publish
from zbcompile.persistence.checkpoint_values import describe, read_values, write_values
from zbcompile.persistence.local_tensors import Holding, holding_of
from zbcompile.persistence.optimizer_state import load_optimizer, optimizer_values
from zbcompile.version import __version__

FORMAT, VERSION = "zbcompile checkpoint", 1
PROCESS = "process.pt"
Values = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded: how many steps had been trained, the `extra` that was saved, its directory (None
    if there was none), and the state of the first rank's generators (see `random_state.py`)."""

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
) -> Path:
    """Write a checkpoint into `folder`, which all ranks see; every rank must call it. Returns the new directory.

    Each rank writes what it owns, tied parameters and copies of a stage once, by torch.distributed.checkpoint. The
    directory appears under its name once everything is on disk: a crash leaves earlier checkpoints intact. Only
    one training run may write to a folder.

    Args:
        source: a pipeline, or a plain model in one process.
        optimizer: over `pipe.parameters()`; its state is saved under the parameters' names.
        step: how many steps have been trained; default: `pipe.step_index`, for a plain model 0.
        extra: what else to resume from, such as a scheduler's or a data loader's state dict: numbers, strings, tensors,
            lists, dicts. The first rank's is saved.
        keep: remove all but the newest `keep` checkpoints up to this one, once it is complete.

    Raises PipelineError, on every rank, if it cannot be written.

    >>> zbcompile.save_checkpoint("checkpoints", pipe, optimizer, keep=3)           # doctest: +SKIP
    PosixPath('checkpoints/step-00000020')
    """
    holding, folder = holding_of(source), Path(folder)
    ranks, first = holding.ranks, holding.ranks.is_first
    if keep is not None and keep < 1:
        raise PipelineError(f"keep={keep}; expected at least 1, or None to keep all checkpoints.")
    count = step if step is not None else source.step_index if isinstance(source, Pipeline) else 0
    what = f"saving a checkpoint in {folder}"
    with ranks.watch.region(what):
        process = together(ranks, what, lambda: _process_state(extra, ranks.device))
        values = _values(holding, optimizer)
        partial = gathered(ranks, together(ranks, what, lambda: begin(folder, count) if first else None))[0]
        assert partial is not None
        together(ranks, what, lambda: _require_shared(partial))
        if ranks.replicas.rank == 0:
            write_values(ranks, partial, values)
        index = _index(holding, optimizer, count)
        finished = together(ranks, what, lambda: _finish(partial, index, process, keep) if first else None)
        final = gathered(ranks, finished)[0]
        assert final is not None
        return final


def load_checkpoint(
    path: str | Path,
    source: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    *,
    required: bool = True,
    random: bool = True,
) -> Checkpoint:
    """Continue from a checkpoint, saved at any number of ranks, under any schedule, or from a plain model.

    Every rank must call it, and reads only its own part. Tensors are filled in place.

    Args:
        path: a checkpoint, or a folder of them, whose newest complete one is taken.
        source: a compiled or loaded pipeline, whose `step_index` is set too; or a plain model in one process.
        optimizer: gets the saved state and options; without it only the model is loaded.
        required: whether to raise if there is none; otherwise the `step` of the result is 0 and its `path` None.
        random: also set the generators of Python, torch and numpy to where the first rank's were.

    Raises PipelineError, on every rank and before anything is changed, if names or shapes differ.

    >>> at = zbcompile.load_checkpoint("checkpoints", pipe, optimizer, required=False)      # doctest: +SKIP
    >>> for step in range(at.step, steps): ...                                              # doctest: +SKIP
    """
    holding = holding_of(source)
    ranks = holding.ranks
    with ranks.watch.region(f"loading a checkpoint from {path}"):
        found = gathered(ranks, find_checkpoint(path))[0]
        if found is None and not required:
            return Checkpoint(step=0)
        if found is None:
            raise ranks.watch.known_to_all(
                PipelineError(f"{path} holds no complete checkpoint. Save one with zbcompile.save_checkpoint.")
            )
        at = together(ranks, f"loading {found}", lambda: _load(found, holding, optimizer, random))
    if isinstance(source, Pipeline):
        source.resume(at.step, (*holding.tensors, *_aliases(holding)))
    return at


def _require_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise PipelineError(
            f"{partial}, which the first rank has made, is not there for this rank. Checkpoints need a directory that "
            "all ranks share."
        )


def _values(holding: Holding, optimizer: Optimizer | None) -> dict[str, Values]:
    """The values that this process writes. Non-tensor values are written by rank 0 only."""
    ranks = holding.ranks
    model = {name: tensor for name, tensor in holding.tensors.items() if holding.writes(name)}
    found = together(ranks, "saving the optimizer", lambda: optimizer_values(optimizer, holding) if optimizer else {})
    own = {key: value for key, value in found.items() if holding.writes(_name_in(key, holding))}
    plain = {key: value for key, value in own.items() if not isinstance(value, torch.Tensor)}
    tensors = {key: value for key, value in own.items() if key not in plain}
    everywhere = {key: value for part in gathered(ranks, plain) for key, value in part.items()}
    return {"model": model, "optimizer": tensors | (everywhere if ranks.is_first else {})}


def _name_in(key: str, holding: Holding) -> str:
    """The parameter's name in `state.NAME.KEY` or `param_groups.NAME.KEY`."""
    name = key.partition(".")[2]
    while name not in holding.parameters:
        name = name.rpartition(".")[0]
    return name


def _index(holding: Holding, optimizer: Optimizer | None, step: int) -> Values:
    kinds = gathered(holding.ranks, type(optimizer).__name__ if optimizer else None)  # None if nothing is trained
    return {
        "format": FORMAT,
        "version": VERSION,
        "zbcompile": __version__,
        "torch": torch.__version__,
        "step": step,
        "ranks": holding.ranks.count,
        "optimizer": next(filter(None, kinds), None),
        "tied": _aliases(holding),
    }


def _aliases(holding: Holding) -> dict[str, str]:
    """The other names of tied tensors, each with the name under which a checkpoint has the tensor."""
    return {m.name: m.first for m in holding.model.members if m.saved and m.first != m.name}


def _process_state(extra: Any, device: torch.device) -> bytes:
    """The generators and `extra`, as bytes that can be read without running foreign code."""
    buffer = io.BytesIO()
    torch.save({"random": random_state(device), "extra": extra}, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise PipelineError(
            f"extra= holds something that is not a number, string, tensor, list or dict: {error}"
        ) from None
    return buffer.getvalue()


def _finish(partial: Path, index: Mapping[str, Any], process: bytes, keep: int | None) -> Path:
    write_whole(partial / PROCESS, process)
    write_whole(partial / INDEX, json.dumps(index, indent=1).encode())
    return publish(partial, keep)


def read_index(path: Path) -> Values:
    """The content of `checkpoint.json`. Raises PipelineError if the directory is not a checkpoint of this format."""
    try:
        index = json.loads((path / INDEX).read_text())
        if index["format"] == FORMAT and index["version"] == VERSION:
            return dict(index)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise PipelineError(f"{path} is no checkpoint of this release: its {INDEX} does not say {FORMAT!r}, {VERSION}.")


def _load(path: Path, holding: Holding, optimizer: Optimizer | None, random: bool) -> Checkpoint:
    index, saved = read_index(path), describe(path)
    _require_same_names(path, saved, holding)
    _require_same_optimizer(path, index, optimizer)
    process = torch.load(path / PROCESS, weights_only=True)
    with torch.no_grad():
        read_values(path, dict(holding.tensors), "model")
    if optimizer is not None:
        kept = {key.removeprefix("optimizer."): each for key, each in saved.items() if key.startswith("optimizer.")}
        load_optimizer(optimizer, holding, kept, lambda wanted: read_values(path, wanted, "optimizer"))
    if random:
        restore_random_state(process["random"], holding.ranks.device)
    return Checkpoint(index["step"], process["extra"], path, process["random"])


def _require_same_names(path: Path, saved: Mapping[str, Any], holding: Holding) -> None:
    """Require that the checkpoint holds the whole model, whatever part of it this process needs."""
    found = {key.removeprefix("model."): each for key, each in saved.items() if key.startswith("model.")}
    shapes = holding.shapes
    missing, unexpected = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    if missing or unexpected:
        raise PipelineError(
            f"{path} is of another model: missing {missing[:4] or 'nothing'}, unexpected {unexpected[:4] or 'nothing'}."
        )
    for name, shape in shapes.items():
        size = found[name][1] if found[name] else ()
        if tuple(size) != shape:
            raise PipelineError(f"{name} has shape {list(size)} in {path} and {list(shape)} in the model.")


def _require_same_optimizer(path: Path, index: Mapping[str, Any], optimizer: Optimizer | None) -> None:
    if optimizer is not None and index["optimizer"] != type(optimizer).__name__:
        raise PipelineError(
            f"{path} was saved with {index['optimizer'] or 'no optimizer'}, and this is {type(optimizer).__name__}. "
            "Use the same optimizer, or load without optimizer= to start with fresh optimizer state."
        )
