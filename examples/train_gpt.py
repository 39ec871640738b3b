"""Train a byte-level GPT on the source of the Python standard library, as a zero-bubble pipeline.

    python examples/train_gpt.py                                                        all ranks in this process
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --schedule zb-h1     one process per rank
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --replicas 2 --zero 1    two replicas of two ranks

At the end it prints step time, bubble and activation memory of every rank, predicted and measured.
"""

import argparse
import copy
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

import stdlib_text
import zbcompile
from devices import add_device, device_of_rank, start_group
from gpt import GPT, next_byte_loss
from step_report import report
from zbcompile.program.step_record import StepRecord

WARM_UP = 2  # steps before the first one that is timed
# steps timed early on, which the prediction is made from, and as many at the end, to hold it
# against
RECORDED = 5


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--schedule",
        default="zb-v",
        help="a name from zbcompile.schedules.names() (default: %(default)s)",
    )
    add(
        "--ranks",
        type=int,
        help="ranks in this process (default: 2); under torchrun its number of processes",
    )
    add("--microbatches", type=int, default=4, help="equal parts of a batch (default: %(default)s)")
    add("--layers", type=int, default=4, help="transformer layers (default: %(default)s)")
    add(
        "--width", type=int, default=128, help="width of the residual stream (default: %(default)s)"
    )
    add("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    add("--sequence-length", type=int, default=64, help="bytes per sample (default: %(default)s)")
    add("--steps", type=int, default=500, help="optimizer steps (default: %(default)s)")
    add("--batch", type=int, default=16, help="samples per step (default: %(default)s)")
    add(
        "--lr",
        type=float,
        default=4e-3,
        help="highest learning rate of AdamW (default: %(default)s)",
    )
    add("--dropout", type=float, default=0.0, help="dropout probability (default: %(default)s)")
    add("--tied", action="store_true", help="one matrix as token embedding and as output head")
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of weights, batches and dropout (default: %(default)s)",
    )
    add(
        "--replicas",
        type=int,
        default=1,
        help="replicas of the pipeline, each with batches of its own, under torchrun",
    )
    add("--zero", type=int, default=0, help="1: divide the optimizer among replicas")
    add("--clip", type=float, help="the norm to which gradients are clipped (default: no limit)")
    add(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of the model (default: %(default)s)",
    )
    add(
        "--backend",
        default="fx",
        choices=("fx", "inductor"),
        help="what runs the passes (default: %(default)s)",
    )
    add("--cuda-graphs", action="store_true", help="every pass recorded as a CUDA graph")
    add_device(parser)
    add(
        "--verify",
        action="store_true",
        help="exact mode; compare the first step with eager gradient accumulation",
    )
    options = parser.parse_args(arguments)
    for name in ("microbatches", "layers", "width", "heads", "sequence_length", "batch"):
        if getattr(options, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(options, name)}; expected at least 1"
            )
    if options.steps < WARM_UP + 2 * RECORDED:
        parser.error(
            f"--steps is {options.steps}; the report needs at least {WARM_UP + 2 * RECORDED}"
        )
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not divisible by --heads {options.heads}")
    if options.verify and options.replicas > 1:
        parser.error("--verify compares with one process; leave --replicas out")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout is {options.dropout}; expected a probability below 1")
    return options


def build(options: argparse.Namespace, device: torch.device) -> tuple[GPT, zbcompile.Pipeline]:
    """The same model on every rank, and its pipeline."""
    torch.manual_seed(options.seed)
    model = GPT(
        options.layers,
        options.width,
        options.heads,
        options.sequence_length,
        options.dropout,
        options.tied,
    )
    model.to(device, getattr(torch, options.dtype))
    ranks = options.ranks if "RANK" in os.environ else options.ranks or 2
    if options.replicas > 1:
        ranks = None
    pipe = zbcompile.pipeline(
        model,
        schedule=options.schedule,
        microbatches=options.microbatches,
        ranks=ranks,
        mesh=mesh_of(options.replicas, device) if options.replicas > 1 else None,
        loss=next_byte_loss,
        exact=options.verify,
        backend=options.backend,
        cuda_graphs=options.cuda_graphs,
        seed=options.seed,
    )
    return model, pipe


def mesh_of(replicas: int, device: torch.device) -> DeviceMesh:
    """All processes as replicas of a pipeline."""
    start_group(device)
    return init_device_mesh(
        device.type, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("dp", "pp")
    )


def batches(options: argparse.Namespace, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless stream of batches, the same on every rank of a replica."""
    replica = (
        dist.get_rank() * options.replicas // dist.get_world_size() if options.replicas > 1 else 0
    )
    generator = torch.Generator().manual_seed(options.seed + replica)
    while True:
        yield stdlib_text.random_batch(text, options.batch, options.sequence_length, generator)


def validation_loss(pipe: zbcompile.Pipeline, text: Tensor, length: int) -> float:
    """Nats per byte over 512 windows of held-out files, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(8):
        inputs, targets = stdlib_text.random_batch(text, 64, length, generator)
        losses.append(next_byte_loss(pipe.eval(inputs), targets).item())
    return sum(losses) / len(losses)


def warm_up_then_cosine(step: int, steps: int) -> float:
    """The share of the highest learning rate: a tenth of the steps upwards, then down to a tenth of
    it."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


def train(
    pipe: zbcompile.Pipeline,
    options: argparse.Namespace,
    data: Iterator[tuple[Tensor, Tensor]],
    show: bool,
) -> list[StepRecord]:
    """Train, and return the records of `RECORDED` early steps and of the last ones."""
    more = {"zero": options.zero, "clip": options.clip}
    optimizer = pipe.optimizer(
        torch.optim.AdamW, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01, **more
    )
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_then_cosine(step, options.steps)
    )
    records: list[StepRecord] = []
    begin = time.perf_counter()
    progress = tqdm(range(options.steps), unit="step", disable=not show, mininterval=0.5)
    for step in progress:
        pipe.record = WARM_UP <= step < WARM_UP + RECORDED or step >= options.steps - RECORDED
        inputs, targets = next(data)
        loss = pipe.step(inputs, target=targets)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if pipe.record and pipe.last_step:
            records.append(pipe.last_step)
        speed = (step + 1) * inputs.numel() / (time.perf_counter() - begin)
        progress.set_postfix_str(f"loss {loss.item():.3f}, {speed:,.0f} tokens/s", refresh=False)
    return records


def eager_step(
    model: nn.Module, inputs: Tensor, targets: Tensor, options: argparse.Namespace
) -> Tensor:
    """The oracle: gradient accumulation in eager mode, seeded as the pipeline seeds its
    microbatches."""
    total = torch.zeros((), device=inputs.device)
    parts = zip(
        inputs.chunk(options.microbatches), targets.chunk(options.microbatches), strict=True
    )
    for index, (part, target) in enumerate(parts):
        torch.manual_seed(zbcompile.microbatch_seed(0, index, options.seed))
        loss = next_byte_loss(model(part), target) / options.microbatches
        loss.backward()
        total = total + loss.detach()
    return total


def verify(
    pipe: zbcompile.Pipeline,
    eager: nn.Module,
    batch: tuple[Tensor, Tensor],
    options: argparse.Namespace,
) -> str:
    """Run one step both ways and say how many gradients agree in every bit. Leaves no gradients
    behind."""
    expected_loss = eager_step(eager, *batch, options)
    loss = pipe.step(batch[0], target=batch[1])
    expected = {name: parameter.grad for name, parameter in eager.named_parameters()}
    equal = {
        name: _same(parameter.grad, expected[name]) for name, parameter in pipe.named_parameters()
    }
    for parameter in pipe.parameters():
        parameter.grad = None
    equal = _on_all_ranks(equal)
    verdict = (
        "equal"
        if torch.equal(loss, expected_loss)
        else f"NOT equal: {loss.item()!r}, {expected_loss.item()!r}"
    )
    wrong = [name for name, same in equal.items() if not same]
    differences = (
        f"loss bitwise {verdict}; {len(equal) - len(wrong)} of {len(expected)} gradients bitwise"
        " equal"
    )
    return (
        "first step against eager gradient accumulation:"
        f" {differences}{': not ' if wrong else ''}{', '.join(wrong)}"
    )


def _same(one: Tensor | None, expected: Tensor | None) -> bool:
    return one is expected if one is None or expected is None else torch.equal(one, expected)


def _on_all_ranks(equal: Mapping[str, bool]) -> dict[str, bool]:
    """The results of all ranks; a parameter that several ranks hold must be equal on each
    of them."""
    if not dist.is_initialized():
        return dict(equal)
    parts: list[Mapping[str, bool]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, equal)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: all(part.get(name, True) for part in parts) for name in names}


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(
        1
    )  # as torchrun does: every rank one thread, and equal bits however the ranks are run
    device = device_of_rank(options.device)
    text = stdlib_text.load(device)
    model, pipe = build(options, device)
    eager = copy.deepcopy(model) if options.verify else None
    data = batches(options, text.train)
    first = next(data)
    log = print if os.environ.get("RANK", "0") == "0" else lambda *_: None
    log(
        f"{len(text.train):,} bytes to train on, {sum(p.numel() for p in model.parameters()):,}"
        " parameters"
    )

    begin = time.perf_counter()
    pipe.compile(first[0], target=first[1])
    log(f"compiled in {time.perf_counter() - begin:.1f} s")
    if eager is not None:
        log(verify(pipe, eager, first, options))
    before = validation_loss(pipe, text.validation, options.sequence_length)
    records = train(pipe, options, data, show=log is print)
    after = validation_loss(pipe, text.validation, options.sequence_length)

    log(f"\n{report(pipe.program.schedule, records[:RECORDED], records[RECORDED:])}")
    log(
        f"\nvalidation loss: {before:.3f} before, {after:.3f} after {options.steps} steps (nats per"
        " byte)"
    )


def main() -> None:
    try:
        run(parse())
    except (zbcompile.PipelineError, zbcompile.CompileError, zbcompile.ScheduleError) as error:
        raise SystemExit(f"train_gpt: {error}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
