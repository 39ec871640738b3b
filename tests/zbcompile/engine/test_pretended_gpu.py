"""The tests that need GPUs, run with pretended ones; and what the pretended GPU itself finds.

A torch without CUDA becomes one with it only in a process that begins so. Hence one test here
starts another pytest; the other tests run in that one alone. See `tests/support/pretended_gpu`.
"""

import copy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import Batch, eager_step
from tests.support.pool import Pool
from tests.support.pretended_gpu.build import ROOT, built, environment, why_not
from zbcompile.model.seeds import Relay

HERE = "pretended_gpu_in_torch" in sys.modules
pretended = pytest.mark.skipif(
    not HERE, reason="runs on the pretended GPU, in a process of its own"
)
ENGINE = "tests/zbcompile/engine"
NAMES = ("test_cuda.py", "test_cuda_composition.py", "test_pretended_gpu.py")
FILES = [*(f"{ENGINE}/{name}" for name in NAMES), "tests/zbcompile/backends/test_cuda_graphs.py"]


@pytest.mark.skipif(HERE, reason="is on the pretended GPU")
@pytest.mark.slow
@pytest.mark.timeout(1200)  # on a busy machine; the libraries may have to be built
def test_gpu_tests_on_the_pretended_gpu(tmp_path: Path) -> None:
    """Each without a fault against CUDA's order. `python -m tests.support.pretended_gpu.build
    --devices 4` before another command of pytest runs that one so."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    plugins = ["-p", "no:cacheprovider", "-p", "tests.support.pretended_gpu.checked"]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *plugins, "--timeout", "300", *FILES]
    arguments = environment(built(), devices=4, faults=tmp_path)
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 1100}
    done = subprocess.run(command, env=arguments, **options)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 20, done.stdout[-4000:]


@pytest.fixture
def device() -> Iterator[ModuleType]:
    """The compiled module; what a test plants on purpose is not said of it."""
    results: ModuleType = sys.modules["pretended_gpu_in_torch"].device  # type: ignore[attr-defined]
    results.forget()
    results.keep_faults(False)
    yield results
    torch.cuda.synchronize()
    results.forget()
    results.keep_faults(True)


def kinds(device: ModuleType) -> set[str]:
    return {fault.split(":")[0].split(" ")[0] for fault in device.faults()}


@pretended
@pytest.mark.parametrize("right", [False, True])
def test_a_read_without_an_event_and_memory_freed_too_early_are_found(
    device: ModuleType, right: bool
) -> None:
    torch.cuda.synchronize()
    written, second = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    written.add_(1)
    if right:
        second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(second):
        saved = [written * 2]
    assert kinds(device) == (set() if right else {"RACE"})
    torch.cuda.synchronize()
    device.forget()
    lent = torch.zeros(4, device="cuda")
    second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(second):
        saved.append(lent + 1)
    if right:
        lent.record_stream(second)
    del lent
    torch.zeros(4, device="cuda")
    assert kinds(device) == (set() if right else {"REUSE"})
    del saved


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
def test_generators_of_the_script_are_left_alone() -> None:
    """Their state is copied to the device once, as long as the offset is the same. Measuring draws
    from none; the model's GPU is not the current one."""
    relay = Relay(torch.device("cuda", 1))
    torch.cuda.set_rng_state(torch.tensor([5, 8]).view(torch.uint8), 1)
    left = relay.leave()
    assert left.view(torch.int64).tolist() == [5, 8]
    torch.cuda.set_rng_state(torch.tensor([6, 8]).view(torch.uint8), 1)
    assert relay.leave() is left
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to("cuda:1")
    options = {"loss": nn.functional.mse_loss, "schedule": "auto", "ranks": 2, "microbatches": 2}
    x = torch.ones(4, 8, device="cuda:1")
    with torch.cuda.device(0):
        zbcompile.pipeline(model, **options).compile(x, target=x).close()
    assert torch.cuda.get_rng_state(1).view(torch.int64).tolist() == [6, 8]


class Masked(nn.Linear):
    """Its backward makes tensors: the graphs name the device."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = torch.where(y > 0, y, 0.5)
        return x + y[:, torch.arange(x.shape[1], device=x.device).flip(0)]


def squared(result: Tensor, target: Tensor) -> Tensor:
    return ((result - target) ** 2).mean()


def steps_as_eager(rank: int | None) -> float:
    """How far two steps are from eager's, on GPU 1 of one process (None), recorded as graphs, or on
    a GPU for each rank."""
    device, alone = torch.device("cuda", 1 if rank is None else rank), rank is None
    torch.manual_seed(0)
    model = nn.Sequential(Masked(8, 8), Masked(8, 8)).to(device)
    twin, far = copy.deepcopy(model), 0.0
    options = {"schedule": "zb-h1", "microbatches": 4, "ranks": 2 if alone else None}
    pipe = zbcompile.pipeline(model, loss=squared, cuda_graphs=alone, **options)
    for step in range(2):
        x, target = torch.randn(2, 8, 4, 8, device=device)
        loss = eager_step(twin, squared, Batch((x,), {}, target), 4, step)
        far = max(far, abs(float(pipe.step(x, target=target) - loss)))
    if not alone:
        time.sleep(1.1)  # the thread that watches over the ranks looks at the device
    pipe.close()
    return far


def with_another_current_device() -> tuple[float, set[int], int, list[str]]:
    """Differences from eager, devices that this process used, how often the other GPU's generator
    was seeded, and what its groups are called in dumps of the flight recorder."""
    device = sys.modules["pretended_gpu_in_torch"].device  # type: ignore[attr-defined]
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    device.forget()
    rank = dist.get_rank()
    before = device.times_seeded(1 - rank)
    results = steps_as_eager(rank)
    by_eager = 1 + 2 * 4  # torch.manual_seed: once, and before each of the microbatches
    names = [str(options.group_name) for options in dist.ProcessGroupNCCL.made]
    return results, device.contexts(), device.times_seeded(1 - rank) - before - by_eager, names


@pretended
def test_ranks_whose_scripts_only_moved_the_model(pool: Pool) -> None:
    """Nothing of theirs is on GPU 0 but what belongs there, whichever device was current; the other
    GPU's generator is left alone, and graphs that name their devices are one program."""
    outcomes = pool.run(with_another_current_device, backend="nccl")
    for rank, (far, used, seeded, names) in enumerate(outcomes):
        assert far < 1e-5
        assert used == {rank}
        assert seeded == 0
        assert {"zbcompile 0>1", "zbcompile 1>0"} <= set(names)


@pretended
def test_graphs_are_recorded_on_the_device_of_the_model() -> None:
    """The current one is another: what is recorded there would be empty, and replays would return
    old results."""
    with torch.cuda.device(0):
        assert steps_as_eager(None) < 1e-5
