"""Does the host wait for the GPU within a step, and within the optimizer's? By optimizer, from the
second step on.

python examples/benchmarks/host_waits.py
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import zbcompile

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, VOCABULARY, next_byte_loss

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-3),
}
STEPS = 3


def waits(work: Callable[[], object]) -> str:
    """The first operation of `work` that makes the host wait, "" if there is none."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def row(name: str, clip: float | None, small: bool) -> list[str]:
    torch.manual_seed(0)
    width = 32 if small else 512
    model = GPT(4, width, 4, 32, dropout=0.1).to("cuda")
    pipe = zbcompile.pipeline(model, schedule="zb-v", ranks=2, microbatches=4, loss=next_byte_loss)
    tokens = torch.randint(VOCABULARY, (8, 33), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    pipe.compile(inputs, target=targets)
    kind = OPTIMIZERS[name]
    optimizer = pipe.optimizer(kind.func, clip=clip, **kind.keywords)  # type: ignore[attr-defined]
    waits_of: list[str] = []
    for step in range(STEPS):
        parts: tuple[Callable[[], object], ...]
        parts = (partial(pipe.step, inputs, target=targets), optimizer.step, optimizer.zero_grad)
        if step == 0:
            for part in parts:
                part()
        elif not any(waits_of):
            waits_of = [waits(part) for part in parts]
    pipe.close()
    return [name, str(clip or ""), *(text or "no" for text in waits_of[:2])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small", action="store_true", help="a small model, and two of the optimizers"
    )
    options = parser.parse_args()
    names = ["SGD", "AdamW"] if options.small else list(OPTIMIZERS)
    rows = [row(name, clip, options.small) for name in names for clip in (None, 1.0)]
    print(tabulate(rows, ["optimizer", "clip", "waits in a step", "waits in optimizer.step"]))


if __name__ == "__main__":
    main()
