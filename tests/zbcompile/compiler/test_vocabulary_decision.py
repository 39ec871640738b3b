"""Tests of what is decided for a sharded output layer: whether it is sharded at all, and whether its logits
wait."""

import pytest
import torch
from torch import nn

from gpt import GPT, next_byte_loss
from zbcompile.compiler.vocabulary_sharding import WORTH, choose_sharding, predict_steps
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.schedules import build


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(("words", "layers", "shards"), [(2048, 2, True), (16, 4, False)])
def test_auto_shards_where_that_makes_the_step_shorter(
    words: int, layers: int, shards: bool
) -> None:
    """An output layer of many layers' cost cannot be balanced by moving layers; of a small one too
    little is gained."""
    tokens, schedule = torch.zeros(4, 16, dtype=torch.int64), build("1f1b", 2, 8)
    model = GPT(layers=layers, width=16, heads=2, length=16)
    model.token, model.head = nn.Embedding(words, 16), nn.Linear(16, words, bias=False)
    step = export_training_step(model, (tokens,), {}, tokens, next_byte_loss)
    requested = choose_sharding(step.copy(), schedule, CompileOptions(vocab=1))
    assert requested is not None
    redistributed, sharded = predict_steps(requested, schedule, Hardware.find("cpu-core"))
    assert (sharded < WORTH * redistributed) == shards
    assert (choose_sharding(step, schedule, CompileOptions(vocab="auto")) is not None) == shards
