"""Folders as `save_pretrained` writes them: read into a pipeline without memory, and written again,
bit for bit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zbcompile
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

transformers = pytest.importorskip("transformers")
INDEX = "model.safetensors.index.json"
TINY = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def mixtral() -> Any:
    """Its experts are one tensor in memory, and a tensor each in files, under another name."""
    config = transformers.MixtralConfig(**TINY, num_hidden_layers=2, num_local_experts=11)
    config.experts_implementation = "batched_mm"
    return transformers.MixtralForCausalLM(config)


def gpt2() -> Any:
    """Its head is tied to the embedding."""
    sizes = {"vocab_size": 16, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    )


MODELS = {"mixtral": mixtral, "gpt2": gpt2}


def written(name: str, folder: Path) -> Any:
    """A model, and the folder that transformers writes of it, in many files."""
    torch.manual_seed(3)
    model = MODELS[name]()
    model.save_pretrained(folder, max_shard_size="2KB")
    assert len(list(folder.glob("*.safetensors"))) > 4
    return model


def weight_map(folder: Path) -> Mapping[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]  # type: ignore[no-any-return]


def read_and_write(name: str, folder: str) -> tuple[dict[str, torch.Tensor], int]:
    """A model without memory, its weights read and written again: this rank's share, and how many
    elements it holds."""
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        model = MODELS[name]()
    model.tie_weights()
    pipe = zbcompile.pipeline(model, ranks=2, schedule="zb-h1", microbatches=2)
    ids = torch.arange(24).reshape(4, 6) % 16
    pipe.compile(input_ids=ids, labels=ids)
    zbcompile.load_weights(f"{folder}/theirs", pipe)
    zbcompile.save_weights(f"{folder}/ours", pipe)
    share = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return share, sum(
        parameter.numel() for parameter in model.parameters() if not parameter.is_meta
    )


def same_folder(model: Any, folder: Path) -> None:
    """What was written is what `save_pretrained` writes, and `from_pretrained` reads it back."""
    assert weight_map(folder / "ours").keys() == weight_map(folder / "theirs").keys()
    assert (folder / "ours" / "config.json").read_text() == (
        folder / "theirs" / "config.json"
    ).read_text()
    result, info = type(model).from_pretrained(folder / "ours", output_loading_info=True)
    assert not any(info.values())
    assert_same_tensors(
        dict(result.state_dict()), dict(model.state_dict()), "read by transformers:"
    )


@pytest.mark.beyond_sample
@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    model = written(name, tmp_path / "theirs")
    share, _ = read_and_write(name, str(tmp_path))
    assert_same_tensors(share, dict(model.state_dict()), "read:")
    same_folder(model, tmp_path)


@pytest.mark.slow
def test_ranks_hold_their_own(pool: Pool, tmp_path: Path) -> None:
    """Of two ranks each has memory for its own share, fills that, and writes it."""
    model = written("mixtral", tmp_path / "theirs")
    (first, one), (second, other) = pool.run(read_and_write, "mixtral", str(tmp_path))
    assert_same_tensors(first | second, dict(model.state_dict()), "read:")
    full = sum(parameter.numel() for parameter in model.parameters())
    assert one + other == full
    assert max(one, other) < 0.7 * full
    same_folder(model, tmp_path)


def test_weights_of_the_base_model(tmp_path: Path) -> None:
    """A folder of the model without its head: names without the prefix, and the head is tied."""
    model = gpt2()
    model.transformer.save_pretrained(tmp_path, max_shard_size="2KB")
    assert not any(name.startswith("transformer.") for name in weight_map(tmp_path))
    zbcompile.load_weights(tmp_path, other := gpt2())
    assert_same_tensors(dict(other.state_dict()), dict(model.state_dict()), "read:")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A missing expert; the weights of another model."""
    model = written("mixtral", tmp_path)
    lost = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    file = tmp_path / weight_map(tmp_path)[lost]
    save_file(
        {name: tensor for name, tensor in load_file(file).items() if name != lost},
        file,
        {"format": "pt"},
    )
    index = {
        "weight_map": {name: item for name, item in weight_map(tmp_path).items() if name != lost}
    }
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        zbcompile.PipelineError, match=r"experts\.gate_up_proj cannot be made of .*\(21 tensors\)"
    ):
        zbcompile.load_weights(tmp_path, model)
    with pytest.raises(zbcompile.PipelineError, match="is of another model: missing"):
        zbcompile.load_weights(
            tmp_path, transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
        )
