"""Meshes of the processes of a test."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
import torch.distributed.tensor._redistribute as redistribute
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


def mesh_of(**sizes: int) -> DeviceMesh:
    """A mesh of all processes. DTensor takes equal parts of meshes for the same one: what it has
    planned for an earlier test would use that test's groups, so it forgets it."""
    _clear_sharding_prop_cache()
    redistribute.clear_redistribute_planner_cache()
    redistribute._gen_transform_infos.cache_clear()
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextlib.contextmanager
def group_without_peers(size: int) -> Iterator[None]:
    """Inside, this process is the first of a group of that size, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
