"""Tests of what ranks are predicted to hold, against an independent count of the storages that live in a
step."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.live_storages import Alive, leave_aside, living_tensors
from tests.support.pool import Pool
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.prediction.predict import predicted_costs
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.schedules import build


def counted_and_predicted(schedule: str, recompute: str) -> tuple[int, int]:
    """Bytes of gradients, activations and messages on this rank: the most that lived, and what was
    predicted. Of all steps the least counts: on a busy machine a message that leaves late is one
    more tensor that lives."""
    torch.manual_seed(0)
    model = GPT(layers=3, width=64, length=32, dropout=0.1, tied=True)
    tokens = torch.randint(256, (8, 33))
    tokens, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    before = leave_aside()
    options: dict[str, Any] = {"schedule": schedule, "microbatches": 4, "recompute": recompute}
    pipe = zbcompile.pipeline(model, loss=next_byte_loss, **options)
    pipe.step(tokens, target=target)
    gc.collect()
    lived = []
    for _ in range(4):
        with Alive(living_tensors(), before) as alive:
            pipe.step(tokens, target=target)
        lived.append(alive.most)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    ranks = rank_memories(pipe.program, predicted_costs(pipe.program), state)
    memory = ranks[torch.distributed.get_rank()]
    return min(lived), memory.peak - memory.parameters - memory.optimizer_state


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("1f1b", "hints"), ("zb-v", "hints"), ("zb-h1", "full"), ("zb-h2", "hints")],
)
def test_storages_that_live_in_a_step_are_predicted(
    pool: Pool, schedule: str, recompute: str
) -> None:
    """Under zb-v one rank has both stages of a tied parameter, and keeps a sum for each."""
    for lived, predicted in pool.run(counted_and_predicted, schedule, recompute):
        assert predicted == pytest.approx(lived, rel=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_gradients_and_state(dtype: torch.dtype) -> None:
    """Of the first of two ranks, which has one layer of 64 x 64."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(2)))
    x, size = torch.ones(4, 64, dtype=dtype), 64 * 64
    example = zbcompile.Example(model, (x,), loss=nn.MSELoss(), target=x)
    program = compile_example(example, build("1f1b", 2, 4), CompileOptions(balance=("1",))).program
    memory = rank_memories(program, predicted_costs(program), dict(model.named_parameters()))[0]
    assert (memory.parameters, memory.gradients) == (dtype.itemsize * size, 4 * size)
    assert memory.optimizer_state == (8 if dtype == torch.float32 else 12) * size
