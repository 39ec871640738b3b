"""`debug_nan` on graphs that communicate."""

import time

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor

from tests.support.pool import Pool
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import make_fx
from zbcompile.profiling.pass_checks import checked


def gathered_late() -> torch.Tensor:
    """Returns what a rank gathers whose neighbour comes late, in memory that is NaN before."""
    x = torch.full((4,), float(dist.get_rank()))
    module = make_fx(lambda x: (all_gather_tensor(x, 0, dist.group.WORLD) + 0.0,))(x)
    check = checked(
        0, PassGraph(0, "F", module, (Slot("activation", "x"),), (Slot("activation", "y"),))
    )
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        time.sleep(0.3 * dist.get_rank())
        return check([x])[0]
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_a_collective_returns_is_looked_at_once_it_has_arrived(pool: Pool) -> None:
    for result in pool.run(gathered_late):
        assert result.tolist() == [0.0] * 4 + [1.0] * 4
