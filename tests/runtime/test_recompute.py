"""Recomputing changes what waits between F and B, and never a bit of a gradient."""

from functools import cache

import pytest

import zbcompile
from tests.oracle import PROBLEMS
from tests.runtime.training import Case, Trained, assert_same_tensors, gradients_of, reference
from zbcompile.passes.choices import Recompute
from zbcompile.prediction import flop_costs, predict

MICROBATCHES = 4


@cache
def train(problem: str, policy: Recompute) -> tuple[Trained, zbcompile.Pipeline]:
    """One recorded step in this process."""
    chosen = PROBLEMS[problem]
    options = {"schedule": "zb-h1", "ranks": 2, "microbatches": MICROBATCHES, "exact": True, "recompute": policy}
    pipe = zbcompile.pipeline(chosen.model(), loss=chosen.loss, **options)
    pipe.record = True
    (batch,) = chosen.batches(1, MICROBATCHES * 2)
    loss = pipe.step(*batch.args, target=batch.target)
    return Trained([loss], [gradients_of(pipe)], {}), pipe


@pytest.mark.parametrize(
    ("problem", "policy"),
    [
        ("small-dropout", "none"),
        ("small-dropout", "selective"),
        ("small-dropout", "full"),
        ("small-dropout", 30_000),
        ("small-tied", "full"),
        ("skips", "full"),
    ],
)
def test_gradients_keep_their_bits(problem: str, policy: Recompute) -> None:
    """Dropout too: its masks are kept, not drawn again."""
    ours, _ = train(problem, policy)
    theirs = reference(Case(problem, "zb-h1", 2, MICROBATCHES, steps=1))
    assert_same_tensors(ours.losses, theirs.losses, "loss of step")
    assert_same_tensors(ours.gradients[0], theirs.gradients[0], "gradient of")


@pytest.mark.parametrize("policy", ["selective", "full", 30_000])
def test_memory_is_as_predicted(policy: Recompute) -> None:
    """To the byte, and what waits for W is what it is without recomputing."""
    _, without = train("small-dropout", "none")
    _, pipe = train("small-dropout", policy)
    assert pipe.last_step is not None
    peaks = pipe.last_step.peak_activation_bytes
    assert predict(pipe.program, flop_costs(pipe.program)).peak_memory == tuple(peaks[rank] for rank in range(2))
    for before, after in zip(without.program.stages, pipe.program.stages, strict=True):
        assert after.recomputed is not None
        assert after.crossing.residue == before.crossing.residue
        assert (before.crossing.kept, after.crossing.kept) == (
            after.recomputed.kept_before,
            after.recomputed.kept_after,
        )
        assert after.crossing.kept <= (policy if isinstance(policy, int) else before.crossing.kept)
        assert after.flops["B"] == before.flops["B"] + after.recomputed.flops
        assert [after.flops[name] for name in "FW"] == [before.flops[name] for name in "FW"]
