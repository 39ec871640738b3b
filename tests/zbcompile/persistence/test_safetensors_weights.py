"""Weights as safetensors: what other programs write can be read, and the other way round."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save, save_file
from torch import nn

import zbcompile
from tests.support.checkpointing import PROBLEM, begin
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors
from zbcompile.persistence.safetensors_weights import INDEX, SINGLE


def write_and_read(program: str, folder: str) -> dict[str, torch.Tensor]:
    """Two ranks write both forms; what they read back from the second is this rank's share."""
    pipe, _ = begin(program)
    zbcompile.save_weights(f"{folder}/single.safetensors", pipe)
    zbcompile.save_weights(f"{folder}/parts", pipe)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    zbcompile.load_weights(f"{folder}/parts", pipe)
    share = dict(pipe.state_dict())
    pipe.close()
    return share


def test_two_ranks_write_what_others_read(
    small_program: Callable[[str, int], Path], pool: Pool, tmp_path: Path
) -> None:
    theirs = dict(PROBLEM.model().state_dict())
    shares = pool.run(write_and_read, str(small_program("zb-h1", 2)), str(tmp_path))
    assert_same_tensors(shares[0] | shares[1], theirs, "read back:")
    single, parts = load_file(tmp_path / "single.safetensors"), tmp_path / "parts"
    once = {
        name: tensor for name, tensor in theirs.items() if name != "head.weight"
    }  # tied to the embedding
    assert_same_tensors(single, once, "in the file:")
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == once.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in once.values())
    assert {path.name for path in parts.iterdir()} == {
        *index["weight_map"].values(),
        "model.safetensors.index.json",
    }
    other = PROBLEM.make()
    load_model(other, str(tmp_path / "single.safetensors"))
    assert_same_tensors(dict(other.state_dict()), theirs, "loaded by safetensors:")


@pytest.mark.slow
def test_files_of_others(small_program: Callable[[str, int], Path], tmp_path: Path) -> None:
    """A tied matrix under its other name; another dtype, converted."""
    theirs = {name: tensor.bfloat16() for name, tensor in PROBLEM.model().state_dict().items()}
    del theirs["token.weight"]
    save_file(theirs, tmp_path / "model.safetensors")
    pipe = zbcompile.load(small_program("zb-h1", 2))
    zbcompile.load_weights(tmp_path, pipe)
    result = pipe.state_dict()
    assert result["token.weight"].dtype == torch.float32
    assert_same_tensors({name: result[name].bfloat16() for name in theirs}, theirs, "converted:")
    batch = PROBLEM.batches(1, 8)[0]
    assert torch.isfinite(pipe.step(*batch.args, target=batch.target))


def test_to_and_from_transformers(tmp_path: Path) -> None:
    """Its shards with their index are read; what is written, in one file or a directory, it
    reads."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **{"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    )
    model, other = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="1KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    zbcompile.load_weights(tmp_path / "theirs", other)
    assert_same_tensors(dict(other.state_dict()), dict(model.state_dict()), "read:")
    for target in ("parts", "single/model.safetensors"):
        zbcompile.save_weights(tmp_path / target, other)
        config.save_pretrained(tmp_path / target.partition("/")[0])
        result = transformers.LlamaForCausalLM.from_pretrained(tmp_path / target.partition("/")[0])
        assert_same_tensors(
            dict(result.state_dict()), dict(model.state_dict()), "read by transformers:"
        )


BROKEN: list[tuple[dict[str, bytes], str]] = [
    ({}, "holds no model.safetensors and no model.safetensors.index.json, only nothing"),
    ({"pytorch_model.bin": b""}, "only pytorch_model.bin. .* saved as safetensors first"),
    ({INDEX: b"{}"}, 'expected {"weight_map"'),
    ({INDEX: b"[]"}, 'expected {"weight_map"'),
    (
        {INDEX: b'{"weight_map": {"weight": 3}}'},
        "weight is in 3; expected the name of a file in the same folder",
    ),
    (
        {INDEX: b'{"weight_map": {"weight": "../good/model.safetensors"}}'},
        "weight is in '../good/model.safetensors'",
    ),
    ({SINGLE: b""}, "neither a safetensors file nor an index of such files: .*header too small"),
    ({SINGLE: (2).to_bytes(8, "little") + b"[]"}, "invalid JSON in header"),
    (
        {
            INDEX: b'{"weight_map": {"weight": "1.safetensors", "bias": "2.safetensors"}}',
            "1.safetensors": save({"weight": torch.ones(2, 2)}),
            "2.safetensors": save({"weight": torch.zeros(2, 2), "bias": torch.ones(2)}),
        },
        "weight stands in several files. Save the weights again",
    ),
]


@pytest.mark.parametrize(("files", "message"), BROKEN)
def test_a_folder_that_cannot_be_read_says_why(
    files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(zbcompile.PipelineError, match=message):
        zbcompile.load_weights(tmp_path, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("stored", "named"), [(torch.complex64, "C64"), (torch.int32, "I32"), (torch.bool, "BOOL")]
)
def test_values_of_another_kind_are_refused(
    stored: torch.dtype, named: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.clone()
    save_file({"weight": torch.ones(2, 2, dtype=stored)}, tmp_path / SINGLE)
    with pytest.raises(
        zbcompile.PipelineError,
        match=f"weight is stored as {named} and is torch.float32 in the model",
    ):
        zbcompile.load_weights(tmp_path, model)
    assert torch.equal(model.weight, before)


def test_numbers_of_any_kind_come_back(tmp_path: Path) -> None:
    model = nn.Module()
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.complex64, torch.bfloat16, torch.float64)
    for place, dtype in enumerate(dtypes):
        model.register_buffer(f"b{place}", torch.ones(2).to(dtype))
    theirs = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(theirs, tmp_path / SINGLE)
    for tensor in model.buffers():
        tensor.zero_()
    zbcompile.load_weights(tmp_path, model)
    assert_same_tensors(dict(model.state_dict()), theirs, "read:")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "model.safetensors"
    with pytest.raises(zbcompile.PipelineError, match="is neither a safetensors file"):
        zbcompile.load_weights(path, model)
    zbcompile.save_weights(path, model)
    with pytest.raises(
        zbcompile.PipelineError, match=r"weight has shape \[2, 2\] in .* and \[2, 3\] in the model"
    ):
        zbcompile.load_weights(path, nn.Linear(3, 2))
    with pytest.raises(zbcompile.PipelineError, match=r"missing nothing, unexpected \['bias'\]"):
        zbcompile.load_weights(path, nn.Linear(2, 2, bias=False))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(zbcompile.PipelineError, match="file not fully covered"):
        zbcompile.load_weights(path, model)
    path.write_bytes(b"nothing")
    with pytest.raises(zbcompile.PipelineError, match="is neither a safetensors file"):
        zbcompile.load_weights(path, model)
