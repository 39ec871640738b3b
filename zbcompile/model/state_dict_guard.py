"""The refusal of `model.state_dict()` while other ranks hold a part of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from torch import nn

from zbcompile.errors import PipelineError
from zbcompile.passes.meta_device import is_on_meta

_allowed: ContextVar[bool] = ContextVar("local state dicts", default=False)


def refuse_state_dict(model: nn.Module, summary: str) -> None:
    """Lets `model.state_dict()` raise PipelineError while tensors of other ranks are on the meta
    device. `summary` says what this process holds."""
    model.register_state_dict_pre_hook(partial(_refuse, summary))


def _refuse(summary: str, model: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not _allowed.get() and is_on_meta(model):
        raise PipelineError(
            f"this process holds {summary}, and the rest of the model is on the meta device. Call"
            " pipe.state_dict(full=True) on every rank, or zbcompile.save_weights."
        )


@contextmanager
def local_state_allowed() -> Iterator[None]:
    """Allows `model.state_dict()` inside; tensors of other ranks are on the meta device."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)
