"""Weights as safetensors: what other programs write can be read, and the other way round."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import zbcompile
from tests.support.checkpointing import PROBLEM, begin
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors


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
    once = {name: tensor for name, tensor in theirs.items() if name != "head.weight"}  # tied to the embedding
    assert_same_tensors(single, once, "in the file:")
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == once.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in once.values())
    assert {path.name for path in parts.iterdir()} == {*index["weight_map"].values(), "model.safetensors.index.json"}
    other = PROBLEM.make()
    load_model(other, str(tmp_path / "single.safetensors"))
    assert_same_tensors(dict(other.state_dict()), theirs, "loaded by safetensors:")


def test_files_of_others(small_program: Callable[[str, int], Path], tmp_path: Path) -> None:
    """A tied matrix under its other name; another dtype, converted."""
    theirs = {name: tensor.bfloat16() for name, tensor in PROBLEM.model().state_dict().items()}
    del theirs["token.weight"]
    save_file(theirs, tmp_path / "model.safetensors")
    pipe = zbcompile.load(small_program("zb-h1", 2))
    zbcompile.load_weights(tmp_path, pipe)
    found = pipe.state_dict()
    assert found["token.weight"].dtype == torch.float32
    assert_same_tensors({name: found[name].bfloat16() for name in theirs}, theirs, "converted:")
    batch = PROBLEM.batches(1, 8)[0]
    assert torch.isfinite(pipe.step(*batch.args, target=batch.target))


def test_to_and_from_transformers(tmp_path: Path) -> None:
    """Its shards with their index are read; what is written, in one file or a directory, it reads."""
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
        found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / target.partition("/")[0])
        assert_same_tensors(dict(found.state_dict()), dict(model.state_dict()), "read by transformers:")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "model.safetensors"
    with pytest.raises(zbcompile.PipelineError, match="is neither a safetensors file"):
        zbcompile.load_weights(path, model)
    zbcompile.save_weights(path, model)
    with pytest.raises(zbcompile.PipelineError, match=r"weight has shape \[2, 2\] in .* and \[2, 3\] in the model"):
        zbcompile.load_weights(path, nn.Linear(3, 2))
    with pytest.raises(zbcompile.PipelineError, match=r"missing nothing, unexpected \['bias'\]"):
        zbcompile.load_weights(path, nn.Linear(2, 2, bias=False))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(zbcompile.PipelineError, match="cannot be read"):
        zbcompile.load_weights(path, model)
    path.write_bytes(b"nothing")
    with pytest.raises(zbcompile.PipelineError, match="is neither a safetensors file"):
        zbcompile.load_weights(path, model)
