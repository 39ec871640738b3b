"""Weights as safetensors: what other programs write can be read, and what cannot is said."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

import zbcompile
from tests.support.checkpointing import PROBLEM
from tests.support.training import assert_same_tensors
from zbcompile.persistence.safetensors_weights import INDEX, SINGLE

Error = zbcompile.PipelineError


@pytest.mark.slow
def test_files_of_others(small_program: Callable[[str, int], Path], tmp_path: Path) -> None:
    """A tied matrix under its other name; another dtype, converted."""
    theirs = {name: tensor.bfloat16() for name, tensor in PROBLEM.model().state_dict().items()}
    del theirs["token.weight"]
    save_file(theirs, tmp_path / SINGLE)
    pipe = zbcompile.load(small_program("zb-h1", 2))
    zbcompile.load_weights(tmp_path, pipe)
    result = pipe.state_dict()
    assert result["token.weight"].dtype == torch.float32
    assert_same_tensors({name: result[name].bfloat16() for name in theirs}, theirs, "converted:")
    batch = PROBLEM.batches(1, 8)[0]
    assert torch.isfinite(pipe.step(*batch.args, target=batch.target))


def mapped(place: str) -> dict[str, bytes]:
    return {INDEX: f'{{"weight_map": {{"weight": {place}}}}}'.encode()}


W, B = torch.ones(2, 2), torch.ones(2)
TWICE = b'{"weight_map": {"weight": "1.safetensors", "bias": "2.safetensors"}}'
PARTS = {"1.safetensors": save({"weight": W}), "2.safetensors": save({"weight": W, "bias": B})}
BROKEN: list[tuple[dict[str, bytes], str]] = [
    ({}, "holds no model.safetensors and no model.safetensors.index.json, only nothing"),
    ({"pytorch_model.bin": b""}, "only pytorch_model.bin. .* saved as safetensors first"),
    ({INDEX: b"{}"}, 'expected {"weight_map"'),
    ({INDEX: b"[]"}, 'expected {"weight_map"'),
    (mapped("3"), "weight is in 3; expected the name of a file in the same folder"),
    (mapped('"../good/model.safetensors"'), "weight is in '../good/model.safetensors'"),
    ({SINGLE: b""}, "neither a safetensors file nor an index of such files: .*header too small"),
    ({SINGLE: b"nothing"}, "is neither a safetensors file"),
    ({SINGLE: (2).to_bytes(8, "little") + b"[]"}, "invalid JSON in header"),
    ({SINGLE: save({"weight": W, "bias": B})[:-3]}, "file not fully covered"),
    ({INDEX: TWICE, **PARTS}, "weight stands in several files. Save the weights again"),
    ({SINGLE: save({"weight": W})}, r"missing \['bias'\], unexpected nothing"),
    ({SINGLE: save({"weight": W[:1], "bias": B})}, r"weight has shape \[1, 2\] in .* and \[2, 2\]"),
    *(
        ({SINGLE: save({"weight": W.to(dtype), "bias": B})}, f"weight is stored as {named} and is")
        for dtype, named in ((torch.complex64, "C64"), (torch.int32, "I32"), (torch.bool, "BOOL"))
    ),
]


@pytest.mark.parametrize(("files", "message"), BROKEN, ids=lambda value: str(value)[:30])
def test_what_cannot_be_read_says_why(
    files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    before = (model := nn.Linear(2, 2)).weight.clone()
    with pytest.raises(Error, match=message):
        zbcompile.load_weights(tmp_path, model)
    assert torch.equal(model.weight, before)


def test_numbers_of_any_kind_come_back(tmp_path: Path) -> None:
    model = nn.Module()
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.complex64, torch.bfloat16, torch.float64)
    for place, dtype in enumerate(dtypes):
        model.register_buffer(f"b{place}", torch.ones(2).to(dtype))
    theirs = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    zbcompile.save_weights(tmp_path / SINGLE, model)
    for tensor in model.buffers():
        tensor.zero_()
    zbcompile.load_weights(tmp_path, model)
    assert_same_tensors(dict(model.state_dict()), theirs, "read:")
