"""Train a byte-level Llama on the source of the Python standard library, over three dimensions of a
mesh: replicas, a pipeline, and tensor parallelism by PyTorch's own plans.

    torchrun --standalone --nproc-per-node 8 examples/train_llama.py --dp 2 --pp 2 --tp 2 --verify

Each replica has a batch of its own. `--verify` compares loss and gradients of the first step with
those of one process.
"""

import argparse
import os
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

import stdlib_text
import zbcompile
from devices import add_device, device_of_rank, start_group
from llama import Llama, next_byte_loss, parallelised

Batch = tuple[Tensor, Tensor]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dp", type=int, default=2, help="replicas (default: %(default)s)")
    add("--pp", type=int, default=2, help="ranks of each pipeline (default: %(default)s)")
    add("--tp", type=int, default=2, help="ranks that share each matrix (default: %(default)s)")
    add(
        "--schedule",
        default="zb-v",
        help="a name from zbcompile.schedules.names() (default: %(default)s)",
    )
    add("--microbatches", type=int, default=4, help="equal parts of a batch (default: %(default)s)")
    add("--layers", type=int, default=4, help="transformer layers (default: %(default)s)")
    add("--width", type=int, default=64, help="width of the residual stream (default: %(default)s)")
    add("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    add("--sequence-length", type=int, default=64, help="bytes per sample (default: %(default)s)")
    add("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    add("--batch", type=int, default=8, help="samples per step and replica (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="learning rate of AdamW (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    add_device(parser)
    add("--verify", action="store_true", help="compare the first step with one process")
    options = parser.parse_args(arguments)
    processes = (
        dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    )
    ranks = options.dp * options.pp * options.tp
    if ranks != processes:
        parser.error(
            f"--dp {options.dp} --pp {options.pp} --tp {options.tp} is for {ranks} processes, and"
            f" there are {processes}: torchrun --standalone --nproc-per-node {ranks}"
            " examples/train_llama.py ..."
        )
    if options.heads % options.tp or options.width % options.heads:
        parser.error(
            f"--heads {options.heads} must be divisible by --tp, and --width {options.width} by"
            " --heads"
        )
    return options


def unsplit_model(options: argparse.Namespace) -> Llama:
    """The same weights on every rank."""
    torch.manual_seed(options.seed)
    return Llama(options.layers, options.width, options.heads, options.sequence_length).to(
        device_of_rank(options.device)
    )


def pipeline_of(options: argparse.Namespace, mesh: DeviceMesh) -> zbcompile.Pipeline:
    model = unsplit_model(options)
    if options.tp > 1:
        model = parallelised(model, mesh["tp"])
    return zbcompile.pipeline(
        model,
        mesh=mesh,
        schedule=options.schedule,
        microbatches=options.microbatches,
        loss=next_byte_loss,
    )


class Batches:
    """The batches of each replica, step by step."""

    def __init__(self, options: argparse.Namespace, text: Tensor, replica: int) -> None:
        self.options, self.text = options, text
        self.generator = torch.Generator().manual_seed(options.seed * 1_000 + replica)

    def next(self) -> Batch:
        return stdlib_text.random_batch(
            self.text, self.options.batch, self.options.sequence_length, self.generator
        )


def verify(
    pipe: zbcompile.Pipeline, options: argparse.Namespace, text: Tensor, first_batch: Batch
) -> str:
    """A step of the pipeline against gradient accumulation over the batches of all replicas in this
    process."""
    model, expected = unsplit_model(options), torch.zeros((), device=text.device)
    count = options.dp * options.microbatches
    for replica in range(options.dp):
        parts = (
            tensor.chunk(options.microbatches) for tensor in Batches(options, text, replica).next()
        )
        for inputs, targets in zip(*parts, strict=True):
            loss = next_byte_loss(model(inputs), targets) / count
            loss.backward()
            expected = expected + loss.detach()
    ours = pipe.step(first_batch[0], target=first_batch[1])
    one = dict(model.named_parameters())
    far = torch.tensor([0.0, float((ours - expected).abs() / expected)], device=text.device)
    for name, parameter in pipe.named_parameters():
        far[0] = torch.maximum(far[0], _difference(parameter.grad, one[name].grad))
        parameter.grad = None
    dist.all_reduce(far, dist.ReduceOp.MAX)
    return (
        f"first step against one process: loss differs by {far[1]:.1e} of it, gradients by at most"
        f" {far[0]:.1e} of their largest entry ({len(one)} parameters)"
    )


def _difference(ours: Tensor | None, expected: Tensor | None) -> Tensor:
    assert ours is not None
    assert expected is not None
    ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
    return (ours - expected).abs().max() / expected.abs().max()


def validation_loss(pipe: zbcompile.Pipeline, text: Tensor, length: int) -> float:
    """Nats per byte over 256 windows of held-out files, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    batches = [stdlib_text.random_batch(text, 64, length, generator) for _ in range(4)]
    return sum(
        next_byte_loss(pipe.eval(inputs), targets).item() for inputs, targets in batches
    ) / len(batches)


def train(pipe: zbcompile.Pipeline, options: argparse.Namespace, data: Batches, show: bool) -> None:
    optimizer = torch.optim.AdamW(
        pipe.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    begin = time.perf_counter()
    progress = tqdm(range(options.steps), unit="step", disable=not show, mininterval=0.5)
    for step in progress:
        inputs, targets = data.next()
        loss = pipe.step(inputs, target=targets)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        speed = (step + 1) * inputs.numel() * options.dp / (time.perf_counter() - begin)
        progress.set_postfix_str(f"loss {loss.item():.3f}, {speed:,.0f} tokens/s", refresh=False)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    device = device_of_rank(options.device)
    if not dist.is_initialized():
        start_group(device)
    sizes = {"dp": options.dp, "pp": options.pp, "tp": options.tp}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    text = stdlib_text.load(device)
    data = Batches(options, text.train, mesh["dp"].get_local_rank())
    pipe = pipeline_of(options, mesh)
    log = print if pipe.is_first else lambda *_: None
    begin, first = time.perf_counter(), data.next()
    pipe.compile(first[0], target=first[1])
    log(f"{len(text.train):,} bytes to train on; compiled in {time.perf_counter() - begin:.1f} s")
    if options.verify:
        log(verify(pipe, options, text.train, first))
    before = validation_loss(pipe, text.validation, options.sequence_length)
    train(pipe, options, data, show=pipe.is_first)
    after = validation_loss(pipe, text.validation, options.sequence_length)
    log(
        f"validation loss: {before:.3f} before, {after:.3f} after {options.steps} steps (nats per"
        " byte)"
    )
    pipe.close()


def main() -> None:
    try:
        run(parse())
    except (zbcompile.PipelineError, zbcompile.CompileError, zbcompile.ScheduleError) as error:
        raise SystemExit(f"train_llama: {error}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
