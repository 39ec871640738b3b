"""The accelerator's vocabulary: all that this library asks of torch.cuda. Another kind of
accelerator is another such file.

`torch.accelerator` has no generators, no graphs, and no counters of memory that 2.11 to 2.15 share.
"""

import contextlib
from typing import Any

import torch

KIND = "cuda"
BACKEND = "nccl"  # of torch.distributed, which moves its tensors

Stream = torch.cuda.Stream
Event = torch.cuda.Event
Graph = torch.cuda.CUDAGraph


def is_gpu(device: torch.device) -> bool:
    return device.type == KIND


def is_available() -> bool:
    return torch.cuda.is_available()


def device_count() -> int:
    return torch.cuda.device_count()


def current_device() -> torch.device:
    return torch.device(KIND, torch.cuda.current_device())


def make_current(device: torch.device) -> None:
    """Make a device the current one of this thread, if it is an accelerator."""
    if is_gpu(device):
        torch.cuda.set_device(device)


def as_current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, a device is the current one, if it is an accelerator."""
    return torch.cuda.device(device) if is_gpu(device) else contextlib.nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device. One that is no accelerator works while its host waits."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def identity(device: torch.device) -> str:
    """Returns the name of a device, which no other device of any machine has."""
    return str(torch.cuda.get_device_properties(device).uuid)


def current_stream(device: torch.device) -> Any:
    """A stream also of the CPU, where streams order nothing: code for two of them runs on both."""
    return torch.get_device_module(device).current_stream(device)


def new_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return (
        torch.cpu.stream(stream)
        if isinstance(stream, torch.cpu.Stream)
        else torch.cuda.stream(stream)
    )


def seed(device: torch.device, value: int) -> None:
    """Seed the default generator of this device alone; torch.manual_seed seeds every one that it
    sees."""
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.default_generators[index].manual_seed(value)


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator of any device, on the host, which does not wait: of a GPU,
    two words of 8 bytes, its seed and its offset."""
    return torch.cuda.get_rng_state(device) if is_gpu(device) else torch.get_rng_state()


def restore_generator(device: torch.device, state: torch.Tensor) -> None:
    """Sets the default generator to a state that `generator_state` has returned."""
    torch.cuda.set_rng_state(state, device) if is_gpu(device) else torch.set_rng_state(state)


def set_generator(device: torch.device, seed: int, offset: int) -> None:
    restore_generator(device, torch.tensor([seed, offset], device="cpu").view(torch.uint8))


def forked_generators(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Inside, draws advance neither the CPU's generator nor that of `device`."""
    return torch.random.fork_rng(devices=[device] if is_gpu(device) else [], device_type=KIND)


def graph_pool() -> Any:
    """Memory that recorded graphs share."""
    return torch.cuda.graph_pool_handle()


@contextlib.contextmanager
def recorded(graph: Graph, pool: Any) -> Any:
    """Context in which the work that this thread submits to the current device becomes `graph`.
    Other threads, such as those of process groups, may use the device. The allocator's cache is not
    emptied, as `torch.cuda.graph` would for each graph.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(aside)
