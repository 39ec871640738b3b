"""Tensors arrive at other stages as they were, strides included, whatever its strides are."""

import pytest
import torch
from torch import Tensor

from zbcompile.distributed.transport import as_contiguous, laid_out, packed, packed_buffer
from zbcompile.passes.stage.stage_program import tensor_spec

NUMBERS = torch.arange(720.0)
TENSORS = {
    "contiguous": NUMBERS.view(8, 9, 10),
    "permuted": NUMBERS.view(8, 9, 10).permute(2, 0, 1),
    "channels last": NUMBERS.view(4, 6, 5, 6).contiguous(memory_format=torch.channels_last),
    "rows of a slice": NUMBERS.view(8, 9, 10)[:, 2:5],
    "every second": NUMBERS.view(8, 90)[:, ::2],
    "a slice, permuted": NUMBERS.view(8, 9, 10)[:, 2:5].permute(1, 2, 0),
    "expanded": NUMBERS[:24].view(4, 1, 6).expand(4, 5, 6),
    "a scalar expanded": NUMBERS[3].expand(4, 5),
    "a scalar": NUMBERS[3],
    "a slice, expanded": NUMBERS.view(8, 1, 90)[:, :, 3:9].expand(8, 2, 6),
    "no elements": NUMBERS.view(8, 90)[:, :0],
    "one element": NUMBERS.view(8, 90)[3:4, 5:6],
}


@pytest.mark.parametrize("name", TENSORS)
def test_arrives_as_it_was(name: str) -> None:
    """A kernel may give other strides than its fake said; the graph gets those that it was traced
    for."""
    sent = TENSORS[name]
    spec = tensor_spec(sent)
    buffer = packed_buffer(spec, sent.device)
    as_contiguous(buffer).copy_(as_contiguous(packed(sent)))
    assert as_contiguous(buffer).is_contiguous()
    assert buffer.numel() <= sent.numel()
    backwards = tuple(reversed(range(sent.ndim)))
    turned = sent.contiguous().permute(backwards).contiguous().permute(backwards)
    for value in (buffer, sent.contiguous(), turned):
        arrived = laid_out(value, spec)
        assert torch.equal(arrived, sent)
        assert _strides(arrived) == _strides(sent)


def test_what_is_in_place_is_not_copied() -> None:
    value = TENSORS["rows of a slice"]
    assert laid_out(value, tensor_spec(value)) is value
    assert packed(TENSORS["permuted"]) is TENSORS["permuted"]


def _strides(value: Tensor) -> list[int]:
    """Strides of dimensions of size 1 mean nothing, nor do those of a tensor without elements."""
    pairs = zip(value.stride(), value.shape, strict=True)
    return [stride for stride, size in pairs if size > 1 and value.numel()]
