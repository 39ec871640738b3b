"""The pretended GPU put in the place of torch.cuda and of ProcessGroupNCCL; `device` is the
compiled module.

`startup/sitecustomize.py` runs this at the start of a process. PRETENDED_GPU names the folder of
the libraries, PRETENDED_GPU_DEVICES how many GPUs there are, PRETENDED_GPU_FAULTS a folder for the
faults that are found.
"""

import importlib.util
import os
import socket
import sys
import zlib
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

HERE = str(Path(__file__).resolve().parent)
DEVICES = int(os.environ.get("PRETENDED_GPU_DEVICES", "2"))
HOST = os.environ.get("PRETENDED_GPU_HOST", socket.gethostname())
TOTAL = 8 << 30
SYNC_MODES = {"default": 0, "warn": 1, "error": 2}


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "pretended_gpu", Path(os.environ["PRETENDED_GPU"], "pretended_gpu.so")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device = _load()


def _where() -> str:
    """The lines of the library or of a test that lead here, the innermost first."""
    frames: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < 5:
        name = frame.f_code.co_filename
        if not any(item in name for item in ("site-packages", "/lib/python3", HERE)):
            frames.append(
                f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
            )
        frame = frame.f_back
    return " <- ".join(frames)


def _index(inputs: Any = None) -> int:
    if inputs is None or (isinstance(inputs, int) and inputs < 0):
        return device.device()
    index = inputs if isinstance(inputs, int) else torch.device(inputs).index
    return device.device() if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **seen: Any) -> "Stream":
        if seen:
            return super().__new__(cls, **seen)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> "Event":
        return super().__new__(cls, device="cuda", enable_timing=True)

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, other: "Event") -> float:
        return device.milliseconds_between(self.event_id, other.event_id)

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)


def _current_stream(inputs: Any = None) -> Stream:
    result = torch.accelerator.current_stream(_index(inputs))
    return Stream(
        stream_id=result.stream_id, device_index=result.device_index, device_type=result.device_type
    )


class StreamContext:
    """As torch's own: inside, the stream's device is the current one too."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        if self.stream is not None:
            self.device = device.device()
            self.before = torch.accelerator.current_stream(self.stream.device_index)
            device.set_device(self.stream.device_index)
            torch.accelerator.set_stream(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)
            device.set_device(self.device)


class CUDAGraph:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.own = device.Graph()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.own.begin()

    def capture_end(self) -> None:
        self.own.end()

    def replay(self) -> None:
        self.own.replay()

    def reset(self) -> None:
        pass

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class GraphContext:
    """Captures on a stream of the current device, as torch.cuda.graph does."""

    def __init__(self, graph: CUDAGraph, pool: Any = None, stream: Any = None, **_: Any) -> None:
        self.graph, self.context = graph, StreamContext(stream or Stream())

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.context.__enter__()
        self.graph.capture_begin()

    def __exit__(self, *raised: object) -> None:
        try:
            self.graph.capture_end()
        finally:
            self.context.__exit__(*raised)


def _properties(inputs: Any = None) -> SimpleNamespace:
    kilo = 1 << 10
    return SimpleNamespace(
        **{"name": "pretended GPU", "major": 9, "minor": 0, "gcnArchName": "", "warp_size": 32},
        **{"total_memory": TOTAL, "multi_processor_count": 132, "L2_cache_size": 50 << 20},
        **{"max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 64 * kilo},
        **{"shared_memory_per_multiprocessor": 228 * kilo, "is_integrated": False},
        **{
            "shared_memory_per_block_optin": 227 * kilo,
            "uuid": f"pretended-{HOST}-{_index(inputs)}",
        },
    )


def _exchange(index: int) -> int:
    before = device.device()
    if index >= 0:
        device.set_device(index)
    return before


class _AnyBackend(type):
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch._C._distributed_c10d.Backend)


class ProcessGroupNCCL(metaclass=_AnyBackend):
    """Stands where the class of a CUDA build does."""

    made: ClassVar[list[Any]] = []  # the options of all groups, as a flight recorder names them

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout, self.group_name = dist.default_pg_timeout, ""
            self.global_ranks_in_group: list[int] = []

    def __new__(cls, store: dist.Store, rank: int, size: int, options: Any = None) -> Any:
        cls.made.append(options)
        patience = getattr(options, "_timeout", timedelta(seconds=300))
        inner = dist.ProcessGroupGloo(store, rank, size, patience)
        host = zlib.crc32(HOST.encode())
        return device.make_nccl(inner, rank, size, host, int(patience.total_seconds() * 1e3))


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """Torch's own refuses a storage on CUDA if it was built without."""
    if storage.device.type != "cuda":
        return super(torch.UntypedStorage, storage).resize_(size)
    device.resize_storage(storage, size)
    return storage


def _put(*modules: Any, **created: Any) -> None:
    for module in modules:
        for name, value in created.items():
            setattr(module, name, value)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _capacity(inputs: Any = None) -> tuple[int, int]:
    return TOTAL - _most(inputs), TOTAL


def _most(inputs: Any = None) -> int:
    return int(device.memory(_index(inputs))[1])


def _install() -> None:
    cuda, c = torch.cuda, torch._C
    device.set_devices(DEVICES)
    device.set_stack_function(_where)
    now: Any = {"current_device": device.device, "device_count": lambda: DEVICES}
    _put(cuda, _initialized=True, _lazy_init=_nothing, init=_nothing, is_initialized=lambda: True)
    _put(cuda, is_available=lambda: True, _is_in_bad_fork=lambda: False, **now)
    _put(cuda, set_device=lambda inputs: device.set_device(_index(inputs)))
    _put(cuda, _exchange_device=_exchange, _maybe_exchange_device=_exchange)
    _put(cuda, cuda.random, _lazy_call=lambda run, **_: run(), _lazy_init=_nothing)
    _put(cuda.random, **now)
    cuda.default_generators = tuple(map(device.default_generator, range(DEVICES)))
    _put(cuda, get_device_properties=_properties, is_bf16_supported=lambda *_, **__: True)
    _put(cuda, get_device_name=lambda inputs=None: _properties(inputs).name)
    _put(cuda, get_device_capability=lambda inputs=None: (9, 0))
    _put(cuda, set_sync_debug_mode=lambda mode: device.set_sync_mode(SYNC_MODES.get(mode, mode)))
    _put(cuda, get_sync_debug_mode=device.sync_mode)
    _put(torch.backends.cuda, is_built=lambda: True)
    # streams and graphs
    _put(cuda, cuda.streams, Stream=Stream, Event=Event)
    _put(cuda, current_stream=_current_stream, set_stream=torch.accelerator.set_stream)
    _put(cuda, stream=StreamContext, StreamContext=StreamContext)
    first: Any = {"stream_id": 0, "device_type": 1}
    _put(cuda, default_stream=lambda inputs=None: Stream(device_index=_index(inputs), **first))
    _put(cuda, synchronize=lambda inputs=None: torch.accelerator.synchronize(_index(inputs)))
    graphs: Any = {"CUDAGraph": CUDAGraph, "graph": GraphContext}
    _put(cuda, cuda.graphs, graph_pool_handle=lambda: (0, 1), **graphs)
    _put(cuda, cuda.graphs, is_current_stream_capturing=device.is_capturing)
    # memory: torch's allocator keeps what was freed, until its cache is emptied
    memory = cuda, cuda.memory
    _put(*memory, memory_allocated=lambda inputs=None: device.memory(_index(inputs))[0])
    _put(*memory, max_memory_allocated=_most, memory_reserved=_most, max_memory_reserved=_most)
    _put(*memory, reset_peak_memory_stats=lambda inputs=None: device.reset_peak(_index(inputs)))
    _put(*memory, mem_get_info=_capacity)
    _put(*memory, empty_cache=lambda: [device.reset_peak(index) for index in range(DEVICES)])
    _put(torch.UntypedStorage, resize_=_resize)
    # below
    _put(c, _cuda_getDeviceCount=lambda: DEVICES, _cuda_isInBadFork=lambda: False)
    _put(c, _cuda_getDevice=device.device, _cuda_setDevice=device.set_device, _cuda_init=_nothing)
    _put(c, _cuda_exchangeDevice=_exchange, _cuda_maybeExchangeDevice=_exchange)
    _put(c, _cuda_synchronize=torch.accelerator.synchronize)
    _put(c, _nccl_version=lambda: 2 << 32 | 27 << 16, _nccl_version_suffix=lambda: b"pretended")
    c._cuda_getCurrentRawStream = lambda index: torch.accelerator.current_stream(index).stream_id
    c._cuda_isCurrentStreamCapturing = device.is_capturing
    # groups
    d = dist.distributed_c10d
    _put(d, dist, ProcessGroupNCCL=ProcessGroupNCCL, is_nccl_available=lambda: True)
    _put(d, _NCCL_AVAILABLE=True, default_pg_nccl_timeout=d.default_pg_timeout)


_install()
if "PRETENDED_GPU_FAULTS" in os.environ:
    device.write_faults_to(str(Path(os.environ["PRETENDED_GPU_FAULTS"], str(os.getpid()))))
