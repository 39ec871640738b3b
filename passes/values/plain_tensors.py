"""Tensors that modules keep as plain attributes: a captured graph reads them where they are, and never looks whether
the attribute has got another one since."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zbcompile.passes.torch_private import storage_key

_TABLES = ("_parameters", "_buffers", "_modules")  # a module's own


class PlainTensor(NamedTuple):
    """A tensor in an attribute, or in a list, tuple or mapping there, as `holder[key]`, which `path` names."""

    path: str
    holder: Any
    key: Any
    tensor: torch.Tensor
    storage: int

    @property
    def is_replaced(self) -> bool:
        try:
            now = self.holder[self.key]
        except LookupError:
            return True
        return now is not self.tensor or storage_key(now) != self.storage


def plain_tensors(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> list[PlainTensor]:
    """Those that are among the `constants` of a captured graph."""
    storages = {storage_key(tensor) for tensor in constants.values()}
    return [each for each in _all(model) if each.storage in storages]


def _all(model: nn.Module) -> Iterator[PlainTensor]:
    for path, module in model.named_modules():
        yield from _in(vars(module), path)
        for name, value in vars(module).items():
            if name not in _TABLES:
                yield from _in(value, f"{path}.{name}")


def _in(holder: Any, path: str) -> Iterator[PlainTensor]:
    items = (
        holder.items() if isinstance(holder, dict) else enumerate(holder if isinstance(holder, list | tuple) else ())
    )
    for key, value in items:
        if isinstance(value, torch.Tensor):
            yield PlainTensor(f"{path}.{key}".lstrip("."), holder, key, value, storage_key(value))
