"""The parts of a real training run in one script: a model of the Hub's kind, autocast,
accumulation, clipping, a rate schedule, metrics, evaluation before the first step, checkpoints,
export and generation.

    python examples/train_everything.py                      two ranks in this process
    torchrun --standalone --nproc-per-node 4 examples/train_everything.py --steps 60

The second command resumes from the checkpoint of the first one, with one process per rank.

Needs transformers: `pip install 'zbcompile[huggingface]'`.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import stdlib_text
import zbcompile

CALLS = 2  # calls of `pipe.step` that add up to one update
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    use_cache=False,
)


def loss_and_metrics(output: Any, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = output.logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    return loss / CALLS, {"accuracy": (logits.argmax(-1) == labels).float().mean()}


def perplexity(pipe: zbcompile.Pipeline, text: Tensor) -> float:
    inputs, labels = stdlib_text.random_batch(text, 32, 64, torch.Generator().manual_seed(0))
    return pipe.log_probs(input_ids=inputs, labels=labels).mean().neg().exp().item()


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)  # every process builds the same model
    model = AutoModelForCausalLM.from_config(CONFIG)
    ranks = None if "RANK" in os.environ else 2  # under torchrun: a rank per process
    pipe = zbcompile.pipeline(
        model, schedule="zb-h1", microbatches=4, ranks=ranks, loss=loss_and_metrics
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=3e-3, weight_decay=0.01, clip=1.0)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    log = print if os.environ.get("RANK", "0") == "0" else lambda *_: None  # one process speaks

    text = stdlib_text.load()
    inputs, labels = stdlib_text.random_batch(text.train, 16, 64, torch.Generator())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.compile(input_ids=inputs, target=labels, return_metrics=True)
    at = zbcompile.load_checkpoint(options.folder / "checkpoints", pipe, optimizer, required=False)
    if at.path is not None:
        rate.load_state_dict(at.extra["rate"])
    first = at.step // CALLS  # a checkpoint counts calls of `pipe.step`
    log(f"perplexity before update {first}: {perplexity(pipe, text.validation):.1f}")

    for update in range(first, options.steps):
        generator = torch.Generator().manual_seed(update)  # every rank draws the same batches
        for _ in range(CALLS):
            inputs, labels = stdlib_text.random_batch(text.train, 16, 64, generator)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, metrics = pipe.step(input_ids=inputs, target=labels, return_metrics=True)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if (update + 1) % 10 == 0:
            log(
                f"update {update + 1}: loss {CALLS * loss.item():.3f}, accuracy"
                f" {metrics['accuracy'].item():.3f}"
            )
            extra = {"rate": rate.state_dict()}
            zbcompile.save_checkpoint(
                options.folder / "checkpoints", pipe, optimizer, extra=extra, keep=2
            )

    log(f"perplexity after update {options.steps}: {perplexity(pipe, text.validation):.1f}")
    zbcompile.save_weights(options.folder / "trained", pipe)  # what from_pretrained reads
    pipe.close()
    if log is print:
        trained: Any = AutoModelForCausalLM.from_pretrained(options.folder / "trained")
        tokens = trained.generate(torch.tensor([list(b"def ")]), max_new_tokens=40, do_sample=False)
        log(bytes(tokens[0].tolist()))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=30,
        help="updates in all, resumed ones too (default: %(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("everything"), help="of checkpoints and weights"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
