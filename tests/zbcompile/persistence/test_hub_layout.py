"""Folders as `save_pretrained` writes them: read into a pipeline without memory, and written again,
bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zbcompile
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
Error = zbcompile.PipelineError
INDEX = "model.safetensors.index.json"
TINY = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}


def mixtral() -> Any:
    """Its experts are one tensor in memory, and a tensor each in files, under another name."""
    sizes = {**TINY, "num_key_value_heads": 1, "num_hidden_layers": 2, "num_local_experts": 11}
    config = transformers.MixtralConfig(**sizes)
    config.experts_implementation = "batched_mm"
    return transformers.MixtralForCausalLM(config)


def gpt2() -> Any:
    """Its head is tied to the embedding."""
    sizes = {"vocab_size": 16, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]  # type: ignore[no-any-return]


def read_and_write(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """A model without memory, its weights read and written again: this rank's share, and how many
    elements it holds."""
    with accelerate.init_empty_weights():
        model = mixtral()
    pipe = zbcompile.pipeline(model, schedule="zb-h1", microbatches=2)
    ids = torch.arange(24).reshape(4, 6) % 16
    pipe.compile(input_ids=ids, labels=ids)
    zbcompile.load_weights(folder / "theirs", pipe)
    zbcompile.save_weights(folder / "ours", pipe)
    zbcompile.save_weights(folder / "single.safetensors", pipe)
    share = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return share, sum(item.numel() for item in model.parameters() if not item.is_meta)


def check_folder(model: Any, ours: Path) -> None:
    """`from_pretrained` reads it."""
    result, info = type(model).from_pretrained(ours, output_loading_info=True)
    assert not any(info.values())
    assert_same_tensors(dict(result.state_dict()), dict(model.state_dict()), "read back:")


@pytest.mark.slow
@pytest.mark.beyond_sample
def test_ranks_hold_their_own(pool: Pool, tmp_path: Path) -> None:
    """Of two ranks each has memory for its own share, fills that, and writes it."""
    torch.manual_seed(3)
    (model := mixtral()).save_pretrained(theirs := tmp_path / "theirs", max_shard_size="2KB")
    (first, one), (second, other) = pool.run(read_and_write, tmp_path)
    state = dict(model.state_dict())
    assert_same_tensors(first | second, state, "read:")
    full = sum(parameter.numel() for parameter in model.parameters())
    assert one + other == full
    assert max(one, other) < 0.7 * full
    ours = tmp_path / "ours"
    assert weight_map(ours).keys() == weight_map(theirs).keys()
    assert {path.name for path in ours.glob("*.safetensors")} == {*weight_map(ours).values()}
    assert (ours / "config.json").read_text() == (theirs / "config.json").read_text()
    check_folder(model, ours)
    assert load_file(tmp_path / "single.safetensors").keys() == weight_map(theirs).keys()
    lost = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    file = theirs / (rest := weight_map(theirs)).pop(lost)
    kept = {name: tensor for name, tensor in load_file(file).items() if name != lost}
    save_file(kept, file, {"format": "pt"})
    (theirs / INDEX).write_text(json.dumps({"weight_map": rest}))
    with pytest.raises(Error, match=r"experts\.gate_up_proj cannot be made of .*\(21 tensors\)"):
        zbcompile.load_weights(theirs, model)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_hidden_layers=1))
    with pytest.raises(Error, match="is of another model: missing"):
        zbcompile.load_weights(theirs, llama)


def test_weights_of_the_base_model(tmp_path: Path) -> None:
    """A folder of the model without its head: names without the prefix, and the head is tied. A
    folder, or one file, is written for transformers."""
    model, other = gpt2(), gpt2()
    model.transformer.save_pretrained(tmp_path, max_shard_size="2KB")
    assert not any(name.startswith("transformer.") for name in weight_map(tmp_path))
    zbcompile.load_weights(tmp_path, other)
    assert_same_tensors(dict(other.state_dict()), dict(model.state_dict()), "read:")
    for target in ("parts", "single/model.safetensors"):
        zbcompile.save_weights(tmp_path / target, other)
        folder = tmp_path / target.partition("/")[0]
        model.config.save_pretrained(folder)
        check_folder(model, folder)
