"""torch.autograd.Function in a model: loss and gradients are eager's, bit by bit, wherever the model is cut."""

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.functions import WAYS, WIDTH, Ways
from tests.support.oracle import Batch, eager_step
from tests.support.training import assert_same_tensors, gradients_of
from zbcompile.compiler.compile_model import Drawn, draw_step
from zbcompile.model.batch import flatten_batch

ROWS, MICROBATCHES = 16, 8


def as_eager(model: nn.Module, batch: Tensor, **options: Any) -> None:
    eager, target = copy.deepcopy(model), torch.ones(len(batch), WIDTH)
    options = {"ranks": 1, "microbatches": MICROBATCHES, **options}
    pipe = zbcompile.pipeline(model, loss=F.mse_loss, exact=True, **options)
    loss = pipe.step(batch, target=target)
    wanted = eager_step(eager, F.mse_loss, Batch((batch,), {}, target), options["microbatches"], 0)
    assert torch.equal(loss, wanted)
    assert_same_tensors(gradients_of(pipe), {n: p.grad for n, p in eager.named_parameters()}, "gradient")
    assert not any("zbcompile" in str(node.target) for node in nodes_of(pipe))


def nodes_of(pipe: zbcompile.Pipeline) -> Iterator[torch.fx.Node]:
    for stage in pipe.program.stages:
        for piece in stage.pieces.values():
            yield from piece.module.graph.nodes


@pytest.fixture(scope="module")
def all_ways() -> tuple[Ways, Drawn]:
    """A model of all ways, captured once: what is cut and scheduled differently is the same graph."""
    torch.manual_seed(0)
    model, rows = Ways(*WAYS), torch.ones(ROWS, WIDTH)
    return model, draw_step(model, flatten_batch((rows,), {}, rows, None).microbatch(0, MICROBATCHES), F.mse_loss)


SCHEDULES = {"1f1b": (11, 4), "zb-h1": (10, 4), "interleaved-1f1b": (1, 8), "zb-v": (2, 8), "dualpipe-v": (3, 8)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ways_cut_at_each(schedule: str, all_ways: tuple[Ways, Drawn]) -> None:
    """Every way is the first of a stage or the last of one, under one schedule at least."""
    model, drawn = all_ways
    first, stages = SCHEDULES[schedule]
    cuts = [f"{'steps' if i % 2 else 'norms'}.{first + i * len(WAYS) // stages}" for i in range(stages - 1)]
    with mock.patch("zbcompile.frontend.executables.draw_step", return_value=drawn):
        as_eager(copy.deepcopy(model), torch.randn(ROWS, WIDTH), schedule=schedule, ranks=4, balance=cuts)


def test_all_ways_on_one_stage(all_ways: tuple[Ways, Drawn]) -> None:
    model, drawn = all_ways
    with mock.patch("zbcompile.frontend.executables.draw_step", return_value=drawn):
        as_eager(copy.deepcopy(model), torch.randn(ROWS, WIDTH), schedule="1f1b")
