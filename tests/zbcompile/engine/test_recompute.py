"""Recomputing changes what waits between F and B, and never a bit of a gradient."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.training import (
    AsEager,
    Case,
    assert_same_tensors,
    compiled_once,
    gradients_of,
    reference,
)
from zbcompile.passes.compile_options import Recompute
from zbcompile.prediction.predict import predicted_costs
from zbcompile.schedules import simulate

OPTIONS: dict[str, Any] = {"schedule": "zb-h1", "ranks": 2}
BUDGET = 30_000  # bytes


@cache
def train(policy: Recompute) -> zbcompile.Pipeline:
    """One recorded step of a small GPT with dropout."""
    chosen = PROBLEMS["small-dropout"]
    options = OPTIONS | {"microbatches": 4, "exact": True, "recompute": policy}
    pipe = zbcompile.pipeline(chosen.model(), loss=chosen.loss, **options)
    pipe.record = True
    (batch,) = chosen.batches(1, 8)
    with compiled_once("small-dropout", exact=True, recompute=policy):
        pipe.step(*batch.args, target=batch.target)
    return pipe


def again(pipe: zbcompile.Pipeline) -> list[str]:
    """The operations that the backward passes make again."""
    nodes = [node for stage in pipe.program.stages for node in stage.pieces["B"].module.graph.nodes]
    return [str(n.target) for n in nodes if n.op == "call_function" and "recomputed" in n.meta]


@pytest.mark.slow
def test_gradients_keep_their_bits_and_memory_is_as_predicted() -> None:
    """To the byte; what waits for W is what it is without recomputing. Other policies than a budget
    are in test_combinations.py."""
    before, pipe, full = train("off"), train(BUDGET), train("full")
    theirs = reference(Case("small-dropout", "zb-h1", 2, 4, steps=1))
    assert_same_tensors(gradients_of(pipe), theirs.gradients[0], "gradient of")
    predicted = simulate(pipe.program.schedule, predicted_costs(pipe.program)).peak_memory
    assert predicted == tuple(pipe.last_step.peak_activation_bytes[rank] for rank in range(2))  # type: ignore[union-attr]
    stages = (before.program.stages, pipe.program.stages, full.program.stages)
    for plain, stage, smallest in zip(*stages, strict=True):
        assert stage.crossing.residue == plain.crossing.residue
        assert stage.crossing.kept <= max(BUDGET, smallest.crossing.kept)
        assert stage.flops["B"] == plain.flops["B"] + stage.recomputed.flops
    assert again(pipe)
    assert not [name for name in again(train("selective")) if "mm" in name]  # no products


def test_a_budget_that_cannot_be_met_names_the_smallest() -> None:
    least = train("full").program.stages[1].crossing.kept
    least_of = rf"stage 1 keeps at least {least:,} bytes per microbatch"
    with pytest.raises(zbcompile.CompileError, match=least_of):
        train(least - 1)


@pytest.mark.slow
def test_each_stage_recomputes_by_its_entry() -> None:
    """Equal work with the same entry is compiled once."""
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.GELU())))
    x, options = torch.ones(8, 16), {"schedule": "1f1b", "ranks": 4, "microbatches": 4}

    def compiled(recompute: Any) -> Any:
        pipe = zbcompile.pipeline(model, loss=nn.MSELoss(), recompute=recompute, **options)
        return pipe.compile(x, target=x).program

    stages = compiled(["full", "off", "off", 1.0]).stages
    made_again = [bool(stage.recomputed and stage.recomputed.operations) for stage in stages]
    assert made_again == [True, False, False, False]
    assert stages[1].original == stages[2].original
    refused = r"3 entries.*4 stages\. Give one entry for all"
    with pytest.raises(zbcompile.CompileError, match=refused):
        compiled(["full", "off", "off"])


class Block(nn.Sequential):
    """Batch norm, whose statistics a forward writes, and dropout, in a region of
    torch.utils.checkpoint or not."""

    def __init__(self, region: bool) -> None:
        layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 8)
        super().__init__(*layers)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        run = super().forward
        return x + (checkpoint(run, x, use_reentrant=False) if self.region else run(x))


@pytest.mark.slow
def test_checkpoint_regions_are_hints() -> None:
    """The model's checkpointed regions are recomputed by default, and nothing else; "off" keeps it
    all, "full" recomputes all. Statistics are written once, though they are read again."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(region=i > 0) for i in range(4))), torch.randn(32, 8)
    kept, made = {}, {}
    for policy in ("off", "hints", "full"):
        eager = copy.deepcopy(model)
        for block in eager:
            block.region = False  # there eager would write the statistics twice
        compared = AsEager(copy.deepcopy(model), 4, eager=eager, recompute=policy, **OPTIONS)
        compared.step(x, target=-x)
        kept[policy] = sum(stage.crossing.kept for stage in compared.pipe.program.stages)
        made[policy] = sum("gelu" in name for name in again(compared.pipe))
    assert made == {"off": 0, "hints": 3, "full": 4}
    assert kept["full"] <= kept["hints"] < kept["off"]


class Noise(nn.Linear):
    """Its inputs are scaled by random numbers, which torch draws without reading any tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x * torch.randn(x.shape)))


def test_random_numbers_are_not_drawn_again() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Noise(16, 16), Noise(16, 16)), torch.randn(8, 16)
    options = {"schedule": "zb-h1", "ranks": 1, "recompute": "full"}
    AsEager(model, 4, **options).step(x, target=-x)
