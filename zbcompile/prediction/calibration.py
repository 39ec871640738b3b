"""The machine at hand, measured: products, kernels by their bytes, what starting an operation takes."""

import platform
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbcompile.compiler.measure_nodes import clock_of
from zbcompile.passes import gpu
from zbcompile.passes.graph.storage import storage_bytes, tensors_of
from zbcompile.passes.machine.hardware import Hardware, Product
from zbcompile.passes.torch_private import CPU_ATTENTION, CPU_ATTENTION_BACKWARD, TO_COPY

aten = torch.ops.aten
ENOUGH = 0.02  # seconds of runs of one kernel
BLOCKS = 5  # in which they are timed
ELEMENTS = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 21)
LARGEST = (32 << 20) - (1 << 16)  # bytes, the most that glibc looks at: once freed, it keeps all that is freed
ROUNDS = 3
COLD, MOST = 24 << 20, 64  # bytes that a kernel goes through before it comes back to the first, copies at most
WIDTH = 128
EDGES = (16, 64, 256, 1024)  # of products
BATCHES = ((8, 32, 32, 16), (8, 128, 128, 32), (16, 32, 64, 64), (32, 256, 64, 256), (8, 64, 512, 128))
IMAGES = (
    *((3, 64, 7, 32), (32, 64, 1, 8), (128, 128, 1, 8), (8, 16, 3, 32), (16, 16, 3, 32)),
    *((64, 64, 3, 16), (64, 128, 1, 16), (128, 128, 3, 8), (256, 64, 1, 8)),
)  # channels taken and made, edge of the window and of the image
LENGTHS = (16, 64, 256, 512)
POOL = ([3, 3], [2, 2], [1, 1])  # window, stride, padding, as convolutional networks begin

Call = Callable[[], Any]


class Kernel(NamedTuple):
    """An operator and the arguments to time it with."""

    operator: Any
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Bench:
    """Where kernels run, for how many seconds each, and on tensors of how many elements; which of several measured
    times counts. That is the fastest, as others are disturbed; the median where ranks measure together: they disturb
    each other as they do in a step."""

    device: torch.device
    enough: float = ENOUGH
    elements: Sequence[int] = ELEMENTS
    of: Callable[[Sequence[float]], float] = min

    def seconds(self, kernel: Kernel) -> float:
        """Seconds per call, on one copy of the arguments after the other, with as many results kept: as in a graph,
        what an operation reads and writes is no longer, or not yet, in a cache."""
        return run_seconds(_in_turn(kernel, min(MOST, COLD // _moved(kernel) + 1)), self)


def run_seconds(call: Call, bench: Bench) -> float:
    """Seconds per call: of the means of several blocks, the one that `bench.of` picks. On a CPU with one thread its own
    time counts, which nothing else on the machine prolongs."""
    device = bench.device
    clock = clock_of(device.type != "cpu")

    def block(count: int) -> float:
        gpu.synchronize(device)
        began = clock()
        for _ in range(count):
            call()
        gpu.synchronize(device)
        took = clock() - began
        return took / count if took > 0 else block(count)  # a thread's clock may stand still on a busy virtual machine

    block(2)
    count = max(1, int(bench.enough / BLOCKS / max(block(1), 1e-7)))
    return bench.of([block(min(count, 2000)) for _ in range(BLOCKS)])


def measure_machine(bench: Bench, rounds: int = ROUNDS, say: Callable[[str], None] = lambda text: None) -> Hardware:
    """Measure the device of `bench`, with the threads that torch has now, but no links, in some rounds: what disturbs a
    machine lasts longer than a few runs."""
    device, found = bench.device, []
    torch.empty(LARGEST, dtype=torch.uint8, device=device)
    with torch.no_grad():
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}")
            found.append((_starts(bench), _kernels(bench), _products(bench)))
    starts, kernels, products = (_joined(each, bench.of) for each in zip(*found, strict=True))
    best = max(2 * p.batch * p.m * p.n * p.k / p.seconds for p in products["product"])
    most, slowest = kernels["mul"][-1]
    return Hardware(
        name=f"{_name_of(device)}, {torch.get_num_threads()} threads" if device.type == "cpu" else _name_of(device),
        peak={"float32": best},
        bandwidth=most / slowest,
        launch=starts["launch"][0],
        viewing=starts["viewing"][0] if device.type == "cpu" else 0.0,
        products=products,
        operations={"": kernels["mul"], **kernels},
        spread=spread_of(found) if rounds > 1 else None,
        sources={"everything": f"python -m zbcompile.calibrate, torch {torch.__version__}"},
    )


def spread_of(rounds: Sequence[Sequence[Mapping[str, list[Any]]]]) -> float:
    """Half of how far the seconds of a sample lie apart between rounds, as a share of them, for the typical sample."""
    times = (
        [_seconds(each) for table in tables for samples in table.values() for each in samples] for tables in rounds
    )
    samples = zip(*times, strict=True)
    return median((max(seconds) - min(seconds)) / (2 * median(seconds)) for seconds in samples)


def _seconds(sample: Any) -> float:
    """The seconds of a sample, which is its seconds or ends with them."""
    return float(sample if isinstance(sample, float) else sample[-1])


def _joined(found: Sequence[Mapping[str, list[Any]]], of: Callable[[Sequence[float]], float]) -> dict[str, list[Any]]:
    """The rounds as one: of each sample, which is its seconds or ends with them, the seconds that `of` picks."""
    return {
        name: [_of_rounds(rows, of) for rows in zip(*(each[name] for each in found), strict=True)] for name in found[0]
    }


def _of_rounds(rows: Sequence[Any], of: Callable[[Sequence[float]], float]) -> Any:
    if isinstance(rows[0], float):
        return of(rows)
    joined = (*rows[0][:-1], of([*map(_seconds, rows)]))
    return Product(*joined) if isinstance(rows[0], Product) else joined


def _starts(bench: Bench) -> dict[str, list[float]]:
    small, view = torch.ones(1, device=bench.device), aten.view.default
    calls = {"launch": lambda: aten.mul.Tensor(small, 2.0), "viewing": lambda: view(small, [1, 1])}
    return {name: [run_seconds(call, bench)] for name, call in calls.items()}


def _kernels(bench: Bench) -> dict[str, list[Any]]:
    curves = {name: _curve(make, bench) for name, make in KERNELS.items()}
    return curves | {name: _attention(backward, bench) for name, backward in ATTENTION.items()}


def _products(bench: Bench) -> dict[str, list[Any]]:
    return {
        "product": [_product(*shape, bench) for shape in _shapes()],
        "convolution": [_convolution(*image, bench, backward=False) for image in IMAGES],
        "convolution_backward": [_convolution(*image, bench, backward=True) for image in IMAGES],
    }


def _name_of(device: torch.device) -> str:
    return gpu.device_name(device) if gpu.is_gpu(device) else platform.processor() or platform.machine()


def _shapes() -> Iterator[tuple[int, int, int, int]]:
    yield from ((1, m, n, k) for m, n, k in product(EDGES, repeat=3))
    yield from BATCHES


def _product(batch: int, m: int, n: int, k: int, bench: Bench) -> Product:
    """A measured product as a linear layer has it: the second factor is stored transposed."""
    one = torch.randn(batch, m, k, device=bench.device)
    other = torch.randn(batch, n, k, device=bench.device).transpose(1, 2)
    given = Kernel(aten.bmm, (one, other)) if batch > 1 else Kernel(aten.mm, (one[0], other[0]))
    return Product(batch, m, n, k, bench.seconds(given))


def _convolution(taken: int, made: int, edge: int, size: int, bench: Bench, backward: bool) -> Product:
    """A convolution of eight images; of a backward half the time, since it is two products."""
    x = torch.randn(8, taken, size, size, device=bench.device)
    weight = torch.randn(made, taken, edge, edge, device=bench.device)
    rest = ([1, 1], [edge // 2] * 2, [1, 1], False, [0, 0], 1)
    y = aten.convolution(x, weight, None, *rest)
    forward = Kernel(aten.convolution, (x, weight, None, *rest))
    both = Kernel(aten.convolution_backward, (y, x, weight, None, *rest, [True, True, False]))
    seconds = bench.seconds(both) / 2 if backward else bench.seconds(forward)
    return Product(1, 8 * size * size, made, taken * edge * edge, seconds)


def _curve(make: Callable[[Tensor], Kernel], bench: Bench) -> list[tuple[float, float]]:
    """Seconds by bytes moved, counted as a graph counts them."""
    found = []
    for count in bench.elements:
        kernel = make(torch.rand(max(1, count // WIDTH), min(count, WIDTH), device=bench.device))
        found.append((float(_moved(kernel)), bench.seconds(kernel)))
    return found


def _moved(kernel: Kernel) -> int:
    return storage_bytes(tensors_of(kernel.arguments)) + storage_bytes(tensors_of(kernel.operator(*kernel.arguments)))


def _in_turn(kernel: Kernel, count: int) -> Call:
    copies = [tuple(_copied(a) for a in kernel.arguments) for _ in range(count)]
    turns, results = cycle(copies), deque[Any](maxlen=count)
    return lambda: results.append(kernel.operator(*next(turns)))


def _copied(argument: Any) -> Any:
    """A copy with the same strides: the second factor of a linear layer is transposed."""
    return argument.clone(memory_format=torch.preserve_format) if isinstance(argument, Tensor) else argument


def _attention(backward: bool, bench: Bench) -> list[tuple[float, float]]:
    """Seconds of attention by FLOPs: its bytes say little."""
    return [_attend(length, backward, bench) for length in LENGTHS]


def _attend(length: int, backward: bool, bench: Bench) -> tuple[float, float]:
    q = torch.randn(2, 4, length, 32, device=bench.device)
    flops = 4 * 2 * 4 * length * length * 32
    if not backward:
        return flops, bench.seconds(Kernel(CPU_ATTENTION, (q, q.clone(), q.clone(), 0.0, True)))
    out, sums = CPU_ATTENTION(q, q, q, 0.0, True)
    given = (out.clone(), q, q.clone(), q.clone(), out, sums, 0.0, True)
    return 2.5 * flops, bench.seconds(Kernel(CPU_ATTENTION_BACKWARD, given))


ATTENTION = {CPU_ATTENTION.__name__: False, CPU_ATTENTION_BACKWARD.__name__: True}


def _unary(name: str, *rest: Any) -> Callable[[Tensor], Kernel]:
    return lambda x: Kernel(getattr(aten, name), (x, *rest))


def _binary(name: str, *rest: Any) -> Callable[[Tensor], Kernel]:
    return lambda x: Kernel(getattr(aten, name), (x, x.clone(), *rest))


def _rows(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _norm(x: Tensor) -> tuple[Any, ...]:
    return x, [x.shape[1]], torch.ones(x.shape[1], device=x.device), torch.zeros(x.shape[1], device=x.device)


def _norm_backward(x: Tensor) -> Kernel:
    _, mean, scale = aten.native_layer_norm(*_norm(x), 1e-5)
    _, size, weight, bias = _norm(x)
    return Kernel(aten.native_layer_norm_backward, (x, x, size, mean, scale, weight, bias, [True, True, True]))


def _image(x: Tensor) -> Tensor:
    """Eight images, channels first; one if there are few elements."""
    return x.reshape(8, -1, 8, 8) if x.numel() % 512 == 0 else x.reshape(1, 1, *x.shape)


def _pooled_backward(x: Tensor) -> Kernel:
    pooled, places = aten.max_pool2d_with_indices(_image(x), *POOL)
    return Kernel(aten.max_pool2d_with_indices_backward, (pooled, _image(x), *POOL, [1, 1], False, places))


def _batch_norm(x: Tensor) -> tuple[Tensor, ...]:
    image = _image(x)
    return image, *(torch.ones(image.shape[1], device=x.device) for _ in range(4))


def _batch_norm_backward(x: Tensor) -> Kernel:
    image, *four = _batch_norm(x)
    _, mean, scale = aten.native_batch_norm(image, *four, True, 0.1, 1e-5)
    rest = (four[0], four[1], four[2], mean, scale, True, 1e-5, [True, True, True])
    return Kernel(aten.native_batch_norm_backward, (image, image, *rest))


def _batch_norm_by(name: str) -> Callable[[Tensor], Kernel]:
    return lambda x: Kernel(getattr(aten, name), (*_batch_norm(x), True, 0.1, 1e-5))


def _half_heads(x: Tensor) -> Tensor:
    """Rows as short as rotary embeddings have them."""
    return x.reshape(-1, min(32, x.shape[1]))


def _loss(x: Tensor) -> tuple[Any, ...]:
    return x, torch.zeros(len(x), dtype=torch.int64, device=x.device), None, 1, -100


KERNELS: Mapping[str, Callable[[Tensor], Kernel]] = {
    **{name: _binary(name) for name in ("add", "mul", "sub", "div", "add_")},
    **{name: _unary(name) for name in ("neg", "rsqrt", "relu", "exp", "sigmoid", "silu", "gelu", "tanh", "cos", "sin")},
    **{name: _binary(name) for name in ("silu_backward", "gelu_backward", "tanh_backward")},
    "sigmoid_backward": _binary("sigmoid_backward"),
    "threshold_backward": _binary("threshold_backward", 0.0),
    "pow": _unary("pow", 2),
    "clone": lambda x: Kernel(aten.clone, (x.t(),)),
    TO_COPY.overloadpacket.__name__: lambda x: Kernel(lambda mask: TO_COPY(mask, dtype=torch.float32), (x > 0.5,)),
    "cat": lambda x: Kernel(lambda one, other: aten.cat([one, other], 1), (_half_heads(x), _half_heads(x).clone())),
    "sum": _unary("sum", [0]),
    "mean": _unary("mean", [1], True),
    "bernoulli": lambda x: Kernel(aten.bernoulli, (x > 0.5, 0.9)),
    "masked_fill": lambda x: Kernel(aten.masked_fill, (x, x > 0.5, 0.0)),
    "where": lambda x: Kernel(aten.where, (x > 0.5, x, x)),
    "_softmax": _unary("_softmax", 1, False),
    "_safe_softmax": _unary("_safe_softmax", 1),
    "_log_softmax": _unary("_log_softmax", 1, False),
    "_softmax_backward_data": _binary("_softmax_backward_data", 1, torch.float32),
    "_log_softmax_backward_data": _binary("_log_softmax_backward_data", 1, torch.float32),
    "native_layer_norm": lambda x: Kernel(aten.native_layer_norm, (*_norm(x), 1e-5)),
    "native_layer_norm_backward": _norm_backward,
    **{name: _batch_norm_by(name) for name in ("native_batch_norm", "_native_batch_norm_legit_functional")},
    "native_batch_norm_backward": _batch_norm_backward,
    "max_pool2d_with_indices": lambda x: Kernel(aten.max_pool2d_with_indices, (_image(x), *POOL)),
    "max_pool2d_with_indices_backward": _pooled_backward,
    "embedding": lambda x: Kernel(aten.embedding, (x, _rows(x))),
    "index": lambda x: Kernel(lambda t, i: aten.index(t, [i]), (x, _rows(x))),
    "index_put": lambda x: Kernel(lambda t, i, values: aten.index_put(t, [i], values, True), (x, _rows(x), x.clone())),
    "index_add_": lambda x: Kernel(aten.index_add_, (x.clone(), 0, _rows(x), x)),
    "nll_loss_forward": lambda x: Kernel(aten.nll_loss_forward, _loss(x)),
    "nll_loss_backward": lambda x: Kernel(
        aten.nll_loss_backward, (torch.ones((), device=x.device), *_loss(x), torch.ones((), device=x.device) * len(x))
    ),
    "slice_backward": lambda x: Kernel(aten.slice_backward, (x, [x.shape[0], 2 * x.shape[1]], 1, 0, x.shape[1], 1)),
    "topk": _unary("topk", 2),
}
