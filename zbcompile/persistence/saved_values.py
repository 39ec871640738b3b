"""Reading out of a checkpoint by way of torch.distributed.checkpoint, which is imported on use: that takes a second."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zbcompile.errors import PipelineError
from zbcompile.passes.errors import CompileError
from zbcompile.persistence.checkpoint_values import from_data
from zbcompile.persistence.saved_state import SavedState

Values = dict[str, Any]
ONE_PROCESS = "torch.distributed is disabled"  # how torch warns that one process reads or writes alone


def read_values(saved: SavedState, wanted: Values, section: str) -> Values:
    """Fill the tensors in `wanted` in place, and replace each None by its value. Asks no other process."""
    keyed = {f"{section}.{key}": value for key, value in wanted.items()}
    _fill(saved, {name: value for name, value in keyed.items() if value is not None})
    plain = saved.fields["values"]
    values = [from_data(plain[name], {}) if value is None else value for name, value in keyed.items()]
    return dict(zip(wanted, values, strict=True))


def read_process(saved: SavedState, name: str) -> Any:
    """`random` or `extra` as it was saved, with its tensors on the CPU."""
    found = {key: each for key, each in saved.tensors.items() if key.split(".")[0] == name}
    tensors = {key: torch.empty(each.shape, dtype=each.dtype, device="cpu") for key, each in found.items()}
    _fill(saved, tensors)
    return from_data(saved.fields["values"][name], tensors)


def _fill(saved: SavedState, tensors: Values) -> None:
    import torch.distributed.checkpoint as dcp

    from zbcompile.persistence.checkpoint_storage import CheckpointReader

    try:
        with quiet():
            dcp.load(tensors, storage_reader=CheckpointReader(saved.path, saved), no_dist=True)
    except dcp.CheckpointException as error:
        raise PipelineError(f"{saved.path} cannot be read: {first_cause(error)}. Load another checkpoint.") from None


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Raise PipelineError, with the checkpoint's name, for what fails inside: its values may be anyone's."""
    try:
        yield
    except (PipelineError, CompileError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error!s:.200}".partition("\n")[0]
        raise PipelineError(f"{path} cannot be loaded ({problem}). Load another checkpoint.") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warning that one process reads or writes alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ONE_PROCESS)
        yield


def first_cause(error: BaseException) -> str:
    """What went wrong on the first rank that failed, if torch.distributed.checkpoint says which, in one line."""
    failures = getattr(error, "failures", None) or {None: (error, None)}
    rank, (cause, _) = next(iter(sorted(failures.items())))
    text = f"{cause}".partition("\n")[0]
    text = text if isinstance(cause, PipelineError) else f"{type(cause).__name__}: {text}"
    return text if rank is None else f"rank {rank}: {text}"
