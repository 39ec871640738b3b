"""Recomputing changes what waits between F and B, and never a bit of a gradient."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.training import (
    AsEager,
    Case,
    Trained,
    assert_same_tensors,
    gradients_of,
    reference,
)
from zbcompile.passes.compile_options import Recompute
from zbcompile.prediction.predict import predicted_costs
from zbcompile.schedules import simulate

MICROBATCHES = 4


@cache
def train(problem: str, policy: Recompute) -> tuple[Trained, zbcompile.Pipeline]:
    """One recorded step in this process."""
    chosen = PROBLEMS[problem]
    options = {
        "schedule": "zb-h1",
        "ranks": 2,
        "microbatches": MICROBATCHES,
        "exact": True,
        "recompute": policy,
    }
    pipe = zbcompile.pipeline(chosen.model(), loss=chosen.loss, **options)
    pipe.record = True
    (batch,) = chosen.batches(1, MICROBATCHES * 2)
    loss = pipe.step(*batch.args, target=batch.target)
    return Trained([loss], [gradients_of(pipe)], {}), pipe


@pytest.mark.slow
@pytest.mark.parametrize("policy", [30_000, ("full", 0.75)], ids=str)
def test_gradients_keep_their_bits(policy: Recompute) -> None:
    """With bytes and with a list; the other policies are in test_combinations.py."""
    ours, _ = train("small-dropout", policy)
    theirs = reference(Case("small-dropout", "zb-h1", 2, MICROBATCHES, steps=1))
    assert_same_tensors(ours.losses, theirs.losses, "loss of step")
    assert_same_tensors(ours.gradients[0], theirs.gradients[0], "gradient of")


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("policy", ["selective", "full", 30_000, 0.5])
def test_memory_is_as_predicted(policy: Recompute) -> None:
    """To the byte; what waits for W is what it is without recomputing."""
    (_, before), (_, pipe) = train("small-dropout", "off"), train("small-dropout", policy)
    assert pipe.last_step is not None
    predicted = simulate(pipe.program.schedule, predicted_costs(pipe.program)).peak_memory
    assert predicted == tuple(pipe.last_step.peak_activation_bytes[rank] for rank in range(2))
    smallest = [stage.crossing.kept for stage in train("small-dropout", "full")[1].program.stages]
    for plain, stage in zip(before.program.stages, pipe.program.stages, strict=True):
        assert stage.crossing.residue == plain.crossing.residue
        limit = policy if isinstance(policy, int) else plain.crossing.kept
        limit = policy * limit if isinstance(policy, float) else limit
        assert stage.crossing.kept <= max(limit, smallest[stage.stage])
        assert stage.recomputed is not None
        assert stage.flops["B"] == plain.flops["B"] + stage.recomputed.flops


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
    with pytest.raises(
        zbcompile.CompileError, match=r"3 entries.*4 stages\. Give one entry for all"
    ):
        compiled(["full", "off", "off"])


class Checkpointed(nn.Module):
    """Three of its four blocks in regions of torch.utils.checkpoint, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.slow
def test_checkpoint_regions_are_hints() -> None:
    """The model's checkpointed regions are recomputed by default, and nothing else; "off" keeps it all.
    Equal to eager."""
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(MICROBATCHES * 2, 16)
    saved = {}
    for policy in ("off", "hints"):
        options = {"schedule": "zb-h1", "ranks": 2, "recompute": policy}
        compared = AsEager(copy.deepcopy(model), MICROBATCHES, **options)
        compared.step(x, target=-x)
        stages = compared.pipe.program.stages
        saved[policy] = sum(stage.crossing.kept for stage in stages)
    again = [
        node for stage in stages for node in stage.pieces["B"].module.graph.nodes if _again(node)
    ]
    assert sum("gelu" in str(node.target) for node in again) == 3
    assert saved["hints"] < saved["off"]


def _again(node: Node) -> bool:
    return node.op == "call_function" and "recomputed" in node.meta


@pytest.mark.slow
def test_products_are_not_made_again_selectively() -> None:
    again = {
        str(node.target)
        for stage in train("small-dropout", "selective")[1].program.stages
        for node in stage.pieces["B"].module.graph.nodes
        if _again(node)
    }
    assert again
    assert not any("mm" in name for name in again)


class Normed(nn.Module):
    """Batch norms, whose statistics a forward writes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2))
                for _ in range(4)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


def test_statistics_are_written_once_though_they_are_read_again() -> None:
    torch.manual_seed(0)
    x, options = torch.randn(MICROBATCHES * 8, 8), {"schedule": "zb-h1", "ranks": 2}
    compared = AsEager(Normed(), MICROBATCHES, recompute="full", **options)
    compared.step(x, target=-x)
    stages = compared.pipe.program.stages
    assert any(_again(node) for stage in stages for node in stage.pieces["B"].module.graph.nodes)


class Region(nn.Module):
    """A batch norm and a dropout, which eager recomputes if `options` are given."""

    def __init__(self, options: dict[str, bool] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return F.dropout(torch.tanh(self.norm(self.first(y))))

        results = (
            region(x)
            if self.options is None
            else checkpoint(region, x, use_reentrant=False, **self.options)
        )
        return self.last(results)


@pytest.mark.slow
def test_a_checkpoint_changes_neither_statistics_nor_masks() -> None:
    """Eager updates the statistics of a region twice, and may draw another mask when it
    recomputes."""
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    eager = [
        Region(options)
        for options in (None, {"preserve_rng_state": True}, {"preserve_rng_state": False})
    ]
    for model in eager:
        torch.manual_seed(zbcompile.microbatch_seed(0, 0))
        F.mse_loss(model(x), y).backward()
    plain, saved, drawn = (dict(model.named_parameters()) for model in eager)
    assert torch.equal(plain["first.weight"].grad, saved["first.weight"].grad)  # type: ignore[arg-type]
    assert not torch.equal(plain["first.weight"].grad, drawn["first.weight"].grad)  # type: ignore[arg-type]
    assert [int(model.norm.num_batches_tracked) for model in eager] == [1, 2, 2]  # type: ignore[arg-type]
    ours = Region({"preserve_rng_state": False})
    pipe = zbcompile.pipeline(
        ours, schedule="zb-h1", ranks=1, microbatches=1, loss=F.mse_loss, exact=True
    )
    pipe.step(x, target=y)
    assert all(torch.equal(p.grad, plain[name].grad) for name, p in pipe.named_parameters())  # type: ignore[arg-type]
    assert all(
        torch.equal(value, eager[0].state_dict()[name]) for name, value in ours.state_dict().items()
    )


def test_a_budget_that_cannot_be_met_names_the_smallest() -> None:
    least = train("small-dropout", "full")[1].program.stages[1].crossing.kept
    with pytest.raises(
        zbcompile.CompileError, match=rf"stage 1 keeps at least {least:,} bytes per microbatch"
    ):
        train("small-dropout", least - 1)


class Noise(nn.Module):
    """A layer whose inputs are scaled by random numbers, which torch draws without reading any
    tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x * torch.randn(x.shape)))


def test_random_numbers_are_not_drawn_again() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Noise(), Noise()), torch.randn(MICROBATCHES * 2, 16)
    options = {"schedule": "zb-h1", "ranks": 1, "recompute": "full"}
    AsEager(model, MICROBATCHES, **options).step(x, target=-x)
