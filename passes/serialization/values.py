"""What is known of a graph's values - shapes, types, strides, and which of them share memory - as data, and back.

The runtime needs this: a buffer can be reused once no later pass reads a view of it. Read back, values are fake
tensors that alias as the originals did.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from zbcompile.passes.serialization.arguments import device_from_data, named
from zbcompile.passes.torch_private import FakeTensorMode, fake_of, storage_key


@dataclass
class ValueWriter:
    """Numbers the storages of a graph in order of appearance; `bytes[i]` is the size of storage i."""

    numbers: dict[int, int] = field(default_factory=dict)
    bytes: list[int] = field(default_factory=list)

    def write(self, value: Any) -> Any:
        """A tensor as [dtype, device, shape, strides, storage, offset], several as a list of these, others as None."""
        if isinstance(value, tuple | list):
            return {"values": [self.write(each) for each in value]}
        if not isinstance(value, torch.Tensor):
            return None
        dtype = str(value.dtype).removeprefix("torch.")
        shape, stride = list(map(int, value.shape)), list(map(int, value.stride()))
        return [dtype, value.device.type, shape, stride, self._number(value), int(value.storage_offset())]

    def _number(self, value: torch.Tensor) -> int:
        key = storage_key(value)
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.bytes.append(int(value.untyped_storage().nbytes()))
        return self.numbers[key]


@dataclass
class ValueReader:
    """Makes fake tensors from what a `ValueWriter` wrote."""

    bytes: list[int]
    device: torch.device
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    storages: dict[int, torch.Tensor] = field(default_factory=dict)

    def read(self, data: Any) -> Any:
        """The value; None if there was no tensor."""
        if data is None:
            return None
        if isinstance(data, dict):
            return tuple(self.read(each) for each in data["values"])
        name, kind, shape, stride, number, offset = data
        dtype = named("dtype", name)
        value = torch.as_strided(self._storage(number, dtype).view(dtype), shape, stride, offset)
        return fake_of(value, self.mode, device_from_data(kind, self.device))

    def _storage(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        if number not in self.storages:
            count = self.bytes[number] // dtype.itemsize
            self.storages[number] = torch.empty(count, dtype=dtype, device="meta")
        return self.storages[number]
