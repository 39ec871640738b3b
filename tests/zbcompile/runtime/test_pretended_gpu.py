"""The tests that need GPUs, run with pretended ones; and what the pretended GPU itself finds.

A torch without CUDA becomes one with it only in a process that begins so. Hence one test here starts another pytest; the
other tests run in that one alone. See `tests/support/pretended_gpu`.
"""

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.pretended_gpu.build import ROOT, built, environment, why_not

HERE = "pretended_gpu_in_torch" in sys.modules
pretended = pytest.mark.skipif(not HERE, reason="runs on the pretended GPU, in a process of its own")
FILES = (
    "tests/zbcompile/runtime/test_cuda.py",
    "tests/zbcompile/backends/test_cuda_graphs.py",
    "tests/zbcompile/runtime/test_pretended_gpu.py",
)
OF_GPUS = 26 + 7  # of the first two files


@pytest.mark.skipif(HERE, reason="is on the pretended GPU")
@pytest.mark.several_processes
@pytest.mark.timeout(1200)  # on a busy machine; the libraries may have to be built
def test_gpu_tests_on_the_pretended_gpu(tmp_path: Path) -> None:
    """All of them, each without a fault against CUDA's order."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    plugins = ["-p", "no:cacheprovider", "-p", "tests.support.pretended_gpu.checked"]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *plugins, "--timeout", "300", *FILES]
    given = environment(built(), faults=tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= OF_GPUS, done.stdout[-4000:]


@pytest.fixture
def device() -> Iterator[ModuleType]:
    """The compiled module; what a test plants on purpose is not said of it."""
    found: ModuleType = sys.modules["pretended_gpu_in_torch"].device  # type: ignore[attr-defined]
    found.forget()
    found.keep_faults(False)
    yield found
    torch.cuda.synchronize()
    found.forget()
    found.keep_faults(True)


def kinds(device: ModuleType) -> set[str]:
    return {fault.split(":")[0].split(" ")[0] for fault in device.faults()}


@pretended
@pytest.mark.parametrize("ordered", [False, True])
def test_a_read_without_an_event_is_found(device: ModuleType, ordered: bool) -> None:
    torch.cuda.synchronize()
    written, other = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    written.add_(1)
    if ordered:
        other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        kept = written * 2
    assert kinds(device) == (set() if ordered else {"RACE"})
    del kept


@pretended
@pytest.mark.parametrize("named", [False, True])
def test_memory_freed_too_early_is_found(device: ModuleType, named: bool) -> None:
    torch.cuda.synchronize()
    lent, other = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        kept = lent + 1
    if named:
        lent.record_stream(other)
    del lent
    torch.zeros(4, device="cuda")
    assert kinds(device) == (set() if named else {"REUSE"})
    del kept


@pretended
@pytest.mark.parametrize("wait", ["item", "mask", "copy to the host", "copy to the device"])
def test_a_host_that_waits_is_found(device: ModuleType, wait: str) -> None:
    tensor = torch.ones(4, device="cuda")
    waits = {
        "item": lambda: tensor.sum().item(),
        "mask": lambda: tensor[tensor > 0],
        "copy to the host": lambda: tensor.cpu(),
        "copy to the device": lambda: torch.ones(4).to("cuda"),
    }
    before = device.host_waits()
    waits[wait]()
    assert device.host_waits() > before
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            waits[wait]()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pretended
def test_a_launch_goes_to_the_device_of_its_tensors(device: ModuleType) -> None:
    """Whichever is current; two devices in one operation, or a tensor of the host, are refused."""
    own, others = torch.cuda.Stream(1), torch.cuda.Stream(0)
    tensor = torch.ones(4, device="cuda:1")
    own.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(own), torch.cuda.stream(others):
        assert torch.cuda.current_device() == 0
        tensor.exp()
        assert device.streams_of("aten::exp") == {(1 << 40) + own.stream_id}
    for other in (torch.ones(4, device="cuda:0"), torch.ones(4)):
        with pytest.raises(RuntimeError, match="on the same device"):
            tensor + other


@pretended
def test_a_graph_captured_on_another_device_is_empty() -> None:
    torch.cuda.synchronize(1)
    tensor, graph = torch.ones(4, device="cuda:1"), torch.cuda.CUDAGraph()
    with torch.cuda.device(0), torch.cuda.graph(graph):
        tensor.exp()
    assert len(graph.own) == 0


def send_and_receive(crossed: bool) -> bool:
    """Whether both messages arrive, if both ranks begin with the same or with another direction."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=3))
    own, its = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
    calls = [lambda: dist.isend(own, 1 - rank, group), lambda: dist.irecv(its, 1 - rank, group)]
    works = [call() for call in (calls if crossed or rank == 0 else reversed(calls))]
    try:
        for work in works:
            work.wait()
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return its.tolist() == [1.0 - rank] * 4


@pretended
@pytest.mark.parametrize("crossed", [True, False])
def test_messages_of_one_communicator_wait_for_each_other(pool: Pool, crossed: bool) -> None:
    """Two sends that are both posted before their receives stand still, as with NCCL; gloo would deliver them."""
    assert pool.run(send_and_receive, crossed, backend="nccl") == [not crossed] * 2
