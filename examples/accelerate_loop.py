"""A loop by Accelerate around a pipeline: its data loaders, mixed precision, accumulation and
trackers.

In one process, `python examples/accelerate_loop.py --ranks 2`; a process per rank,
`torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py`.
"""

import argparse

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import zbcompile
from stdlib_text import load
from zbcompile.integrations import PipelineAccelerator

LENGTH, BATCH = 32, 8


def loader(sequences: int) -> DataLoader[dict[str, torch.Tensor]]:
    """Bytes of the standard library's source, in a new order every epoch."""
    text = load().train[: sequences * LENGTH].view(-1, LENGTH)
    data = [{"input_ids": part, "labels": part} for part in text]
    return DataLoader(data, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]


def tiny_model() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def train(
    ranks: int | None, updates: int, accumulate: int = 2, precision: str = "no"
) -> list[float]:
    """The loss of every batch."""
    set_seed(0)
    accelerator = PipelineAccelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
        # without it Accelerate does not see torchrun's other processes on the CPU
        cpu=not torch.cuda.is_available(),
    )
    pipe = zbcompile.pipeline(
        tiny_model(),
        schedule="zb-v",
        microbatches=4,
        ranks=ranks,
        loss=lambda output, target: (
            output.loss / accumulate
        ),  # there is no accelerator.backward, which divides
    )
    accelerator.pipe = pipe  # says which processes are one pipeline, so before a loader is prepared
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=3e-3, clip=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, total_iters=updates
    )  # not prepared: a step is a step
    optimizer, batches = accelerator.prepare(optimizer, loader(updates * accumulate * BATCH))
    losses = []
    for batch in batches:
        with accelerator.accumulate(pipe):
            with accelerator.autocast():  # of the forward; no accelerator.backward
                losses.append(accumulate * pipe.step(**batch).item())
            optimizer.step()  # only every `accumulate` batches, as Accelerate has it
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {losses[-1]:.4f}")
    pipe.close()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", type=int, help="ranks in this process; under torchrun there is one per process"
    )
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--precision", default="no", choices=("no", "bf16"))
    options = parser.parse_args()
    train(options.ranks, options.updates, precision=options.precision)
