"""Ranks that measure for themselves agree on one set of times, and so on the cuts."""

import torch
import torch.nn.functional as F

import zbcompile
from tests.support.oracle import MLP, WIDTH
from tests.support.pool import Pool


def _measured_cuts() -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Compile and run a step in this process, a rank of the group; returns where it was cut and by which loads."""
    torch.manual_seed(0)
    pipe = zbcompile.pipeline(MLP(), schedule="zb-h1", microbatches=4, loss=F.mse_loss, balance="measured")
    x = torch.randn(8, WIDTH)
    pipe.step(x, target=x)
    return pipe.program.cuts.after, pipe.program.cuts.loads


def test_all_ranks_cut_by_the_same_times(pool: Pool) -> None:
    one, other = pool.run(_measured_cuts, ranks=2)
    assert one == other
    assert min(one[1]) > 0
