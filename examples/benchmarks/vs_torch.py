"""Compares our step with torch's pipeline schedules and with one eager process.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/vs_torch.py

GPT of 8 layers, width 256, sequence 128, 8 microbatches of 2, AdamW; one thread per rank. In every
round each contender takes one step, in a new random order, so that drift of the machine and the
caches left by the previous contender affect all alike. Prints medians over the rounds of seconds
per step, of CPU seconds summed over the ranks relative to the eager process, and of each
contender's time relative to torch's fastest in the same round; and the peak of bytes that wait for
a backward on any rank, counted by storage without parameters (torch's by saved-tensor hooks). The
eager step is also run on all ranks at the same time: cores that work at the same time share caches and
memory, and no schedule is to blame for that. With more ranks than cores only CPU seconds mean
anything. Targets: CPU seconds of our zb-v <= 1.03; every one of ours ahead of every one of torch's,
holding less.
"""

import argparse
import copy
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules as torch_schedules

import zbcompile
from zbcompile.schedules import build

sys.path.insert(0, str(Path(__file__).parents[1]))
from devices import add_device, device_of_rank, start_group
from gpt import GPT, next_byte_loss

OURS = ("1f1b", "zb-h1", "zb-v", "dualpipe-v")
TORCH = {  # by the name of ours with the same placement
    "Schedule1F1B": "1f1b",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
}
ALONE = "eager, one process"
MICROBATCHES, ROWS, LENGTH, WIDTH, LAYERS = 8, 2, 128, 256, 8


class Part(nn.Module):
    """Some consecutive layers of the GPT, with the embeddings in the first part and the head in the
    last."""

    def __init__(self, model: GPT, part: int, parts: int) -> None:
        super().__init__()
        blocks = list(model.blocks)
        bounds = [round(i * len(blocks) / parts) for i in range(parts + 1)]
        self.blocks = nn.ModuleList(blocks[bounds[part] : bounds[part + 1]])
        self.embed = _Embed(model) if part == 0 else None
        self.head = nn.Sequential(model.norm, model.head) if part == parts - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class _Embed(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Contender:
    """One way to take a step, its optimizer, and what was measured; `copies` ranks take the whole
    step."""

    def __init__(
        self,
        step: Callable[[], Any],
        parameters: Iterator[nn.Parameter],
        saved_bytes: Callable[[], int],
        copies: int = 1,
    ) -> None:
        self.step, self.saved_bytes, self.copies = step, saved_bytes, copies
        self.optimizer = torch.optim.AdamW(parameters)
        self.device = self.optimizer.param_groups[0]["params"][0].device
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def measure(self) -> None:
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        self.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        spent = torch.tensor([time.process_time() - cpu], dtype=torch.float64, device=self.device)
        torch.get_device_module(self.device).synchronize()
        dist.barrier()
        self.seconds.append(time.perf_counter() - begin)
        dist.all_reduce(spent)
        self.cpu.append(float(spent) / self.copies)


def ours(
    name: str, model: nn.Module, inputs: Tensor, targets: Tensor, backend: str = "fx"
) -> Contender:
    pipe = zbcompile.pipeline(
        model, schedule=name, microbatches=MICROBATCHES, loss=next_byte_loss, backend=backend
    )
    pipe.compile(inputs, target=targets)

    def saved_bytes() -> int:
        pipe.record = True
        pipe.step(inputs, target=targets)
        pipe.record = False
        return max(pipe.last_step.peak_activation_bytes.values())  # type: ignore[union-attr]

    return Contender(lambda: pipe.step(inputs, target=targets), pipe.parameters(), saved_bytes)


def torchs(
    name: str, model: GPT, inputs: Tensor, targets: Tensor, compiled: bool = False
) -> Contender:
    rank, placement = (
        dist.get_rank(),
        build(TORCH[name], dist.get_world_size(), MICROBATCHES).placement,
    )
    count = placement.stages
    parts = {i: Part(model, i, count) for i in placement.stages_of(rank)}
    tokens = torch.zeros_like(inputs[:ROWS])
    hidden, logits = (
        tokens.new_zeros(ROWS, LENGTH, n, dtype=torch.float32).requires_grad_()
        for n in (WIDTH, 256)
    )
    stages = []
    for i, part in parts.items():
        example = tokens if i == 0 else hidden
        module: Any = torch.compile(part, dynamic=False) if compiled else part
        result = logits if i == count - 1 else hidden
        stages.append(
            PipelineStage(
                module, i, count, inputs.device, input_args=(example,), output_args=(result,)
            )
        )
    kind = getattr(torch_schedules, name)
    single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, MICROBATCHES, loss_fn=next_byte_loss)

    def step() -> None:
        schedule.step(
            *((inputs,) if 0 in parts else ()),
            **({"target": targets} if count - 1 in parts else {}),
        )

    parameters = [p for part in parts.values() for p in part.parameters()]
    return Contender(step, iter(parameters), lambda: _peak_of(step, parameters))


def _peak_of(step: Callable[[], None], parameters: list[nn.Parameter]) -> int:
    """Peak bytes that autograd saves during a step, the maximum over ranks."""
    with counted({p.untyped_storage().data_ptr() for p in parameters}) as peak:
        step()
    most = torch.tensor([peak()], device=parameters[0].device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


@contextmanager
def counted(without: set[int]) -> Iterator[Callable[[], int]]:
    """Count the distinct storages that are saved for a backward and not yet freed."""
    users: dict[int, list[int]] = {}
    live, most = 0, 0

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal live, most
            self.tensor, storage = tensor, tensor.untyped_storage()
            self.key, size = storage.data_ptr(), storage.nbytes()
            entry = users.setdefault(self.key, [0, 0 if self.key in without else size])
            live += entry[1] if entry[0] == 0 else 0
            entry[0] += 1
            most = max(most, live)

        def __del__(self) -> None:
            nonlocal live
            entry = users[self.key]
            entry[0] -= 1
            if entry[0] == 0:
                live -= entry[1]
                del users[self.key]

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        yield lambda: most


def eager(model: nn.Module, inputs: Tensor, targets: Tensor, copies: int) -> Contender:
    """The whole step on each of the first ranks."""

    def step() -> None:
        if dist.get_rank() < copies:
            for part, target in zip(
                inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True
            ):
                (next_byte_loss(model(part), target) / MICROBATCHES).backward()

    return Contender(step, model.parameters(), lambda: 0, copies)


def case(layers: int, device: torch.device) -> tuple[GPT, Tensor, Tensor]:
    """The model, its inputs and targets, the same on every rank."""
    torch.manual_seed(0)
    model = GPT(layers=layers, width=WIDTH, heads=8, length=LENGTH).to(device)
    inputs, targets = torch.randint(256, (2, ROWS * MICROBATCHES, LENGTH)).to(device).unbind()
    return model, inputs, targets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=25, help="paired rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--ours", default=",".join(OURS), help="our schedules (default: %(default)s)"
    )
    parser.add_argument(
        "--torch", default=",".join(TORCH), help="torch's classes (default: %(default)s)"
    )
    add_device(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = device_of_rank(options.device)
    start_group(device)
    model, inputs, targets = case(LAYERS, device)
    contenders = {ALONE: eager(copy.deepcopy(model), inputs, targets, 1)}
    contenders["eager, on every rank"] = eager(
        copy.deepcopy(model), inputs, targets, dist.get_world_size()
    )
    contenders |= {
        name: ours(name, copy.deepcopy(model), inputs, targets) for name in options.ours.split(",")
    }
    for name in options.torch.split(","):
        contenders[f"torch {name}"] = torchs(name, copy.deepcopy(model), inputs, targets)
    chance = random.Random(0)  # the same on every rank
    for _ in range(options.rounds + 1):  # the first round warms up
        for contender in chance.sample(list(contenders.values()), len(contenders)):
            contender.measure()
    saved_bytes = {name: contender.saved_bytes() for name, contender in contenders.items()}
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, median of {options.rounds} rounds")
        print(
            tabulate(rows(contenders, saved_bytes), HEAD, floatfmt=("", ".3f", ".3f", ".3f", ".2f"))
        )
    dist.destroy_process_group()


HEAD = ["", "s/step", "CPU s / eager's", "time / torch's fastest", "peak MB held"]


def rows(contenders: dict[str, Contender], saved_bytes: dict[str, int]) -> list[list[Any]]:
    base = contenders[ALONE].cpu[1:]
    theirs = [c.seconds[1:] for name, c in contenders.items() if name.startswith("torch ")]
    fastest = [min(times) for times in zip(*theirs, strict=True)]
    return [
        [
            name,
            median(c.seconds[1:]),
            median(value / eager for value, eager in zip(c.cpu[1:], base, strict=True)),
            median(value / best for value, best in zip(c.seconds[1:], fastest, strict=True)),
            saved_bytes[name] / 1e6,
        ]
        for name, c in contenders.items()
    ]


if __name__ == "__main__":
    main()
