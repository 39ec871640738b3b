"""What is decided for a sharded output layer: whether it is sharded at all, and whether its logits
wait."""

from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.oracle import Batch
from zbcompile.compiler.vocabulary_sharding import WORTH, choose_sharding, predict_steps
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.errors import CompileError
from zbcompile.schedules import build

MICROBATCHES, LENGTH = 4, 16
MANY = 8192


def model_of(words: int, layers: int = 2) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(layers=layers, width=16, heads=2, length=LENGTH)
        model.token, model.head = nn.Embedding(words, 16), nn.Linear(16, words, bias=False)
    return model


def batch_of(words: int, rows: int) -> Batch:
    tokens = torch.randint(0, words, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return Batch((tokens[:, :-1].contiguous(),), {}, tokens[:, 1:].contiguous())


def compiled(**options: Any) -> zbcompile.Pipeline:
    choices: dict[str, Any] = {
        "schedule": "1f1b",
        "microbatches": MICROBATCHES,
        "loss": next_byte_loss,
        "ranks": 2,
    }
    batch = batch_of(MANY, 4 * MICROBATCHES)
    return zbcompile.pipeline(model_of(MANY), vocab=1, **choices, **options).compile(
        *batch.args, target=batch.target
    )


@pytest.mark.slow
def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(CompileError, match=r"memory=1,048,576 bytes per rank is too small"):
        compiled(memory=1 << 20)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize(("words", "layers", "shards"), [(2048, 2, True), (16, 4, False)])
def test_auto_shards_where_that_makes_the_step_shorter(
    words: int, layers: int, shards: bool
) -> None:
    """An output layer of many layers' cost cannot be balanced by moving layers; of a small one too
    little is gained."""
    batch, schedule = batch_of(words, 4), build("1f1b", 2, 8)
    model = model_of(words, layers)
    step = export_training_step(model, batch.args, {}, batch.target, next_byte_loss)
    requested = choose_sharding(step.copy(), schedule, CompileOptions(vocab=1))
    assert requested is not None
    redistributed, sharded = predict_steps(requested, schedule, Hardware.find("cpu-core"))
    assert (sharded < WORTH * redistributed) == shards
    assert (choose_sharding(step, schedule, CompileOptions(vocab="auto")) is not None) == shards
