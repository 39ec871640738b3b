"""The engine for the ranks of a process."""

from zbcompile.distributed.ranks import GroupRanks, LocalRanks, Ranks
from zbcompile.runtime.distributed_engine import DistributedEngine
from zbcompile.runtime.engine import Engine
from zbcompile.runtime.in_process_engine import InProcess


def make_engine(ranks: Ranks) -> Engine:
    """The engine that runs the steps of `ranks`."""
    if isinstance(ranks, GroupRanks):
        return DistributedEngine(ranks)
    assert isinstance(ranks, LocalRanks)
    return InProcess(ranks)
