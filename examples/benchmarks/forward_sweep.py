"""Evaluation of every model that the tests train, against the unsplit model, and 200 steps in turn
with evaluations:

    python examples/benchmarks/forward_sweep.py [--problems llama bert ...] [--ranks 2 4] [--microbatches 1 3 8]

Linear and V placements, in one process, on a copy in which nothing trains: only forwards are
compiled. Says whether every tensor of the output is bitwise equal to eager's, or by how much it
differs: rows of a microbatch are computed with fewer others, so a product of matrices may round
differently. Beside it stands what is alive at most while a second evaluation runs, parameters and
inputs apart, and what is predicted: one microbatch in its largest stage, and messages and outputs.
"""

import argparse
import sys
import time
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.live_storages import Alive, forward_bytes
from tests.support.zoo import ZOO
from zbcompile.torch_private import pytree

PLACEMENTS = ("1f1b", "zb-v")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--problems", nargs="*", default=sorted(ZOO))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 3, 8])
    parser.add_argument("--alternations", type=int, default=200)
    return parser.parse_args()


def difference(problem: str, schedule: str, ranks: int, microbatches: int) -> str:
    """Compares the output bit by bit, and counts the memory."""
    batch, model = ZOO[problem].batches(1, 8)[0], ZOO[problem].model().requires_grad_(False)
    kwargs: dict[str, Any] = dict(batch.kwargs)
    if hasattr(getattr(model, "config", None), "use_cache"):
        kwargs["use_cache"] = False
    pipe = zbcompile.pipeline(model, schedule=schedule, ranks=ranks)
    ours = tensors(pipe.eval(*batch.args, microbatches=microbatches, **kwargs))
    existing = [*model.parameters(), *model.buffers(), *tensors((batch.args, kwargs))]
    program = list(pipe._compiled.evaluations.plans.values())[-1].program
    with Alive([], [*existing, *program.model.constants.values()]) as alive:
        pipe.eval(*batch.args, microbatches=microbatches, **kwargs)
    inside, messages = forward_bytes(program)
    memory = f"; {alive.most:,} bytes at most, predicted {inside:,} and at most {messages:,}"
    if alive.most > inside + messages:
        raise AssertionError(f"more is alive than was predicted{memory}")
    with torch.no_grad():
        theirs = tensors(model.eval()(*batch.args, **kwargs))
    pairs = list(zip(ours, theirs, strict=True))
    if all(map(torch.equal, ours, theirs)):
        return f"bitwise equal{memory}"
    return (
        "differs by"
        f" {max((a.float() - b.float()).abs().max().item() for a, b in pairs):.1e}{memory}"
    )


def tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def alternate(times: int) -> str:
    """Python's memory after a tenth of the alternations, and at their end."""
    torch.manual_seed(0)
    tokens = torch.randint(256, (8, 16))
    pipe = zbcompile.pipeline(
        GPT(2, 32, length=16), schedule="zb-v", microbatches=4, ranks=2, loss=next_byte_loss
    )
    tracemalloc.start()
    live_bytes = []
    for i in range(times):
        pipe.step(tokens, target=tokens)
        pipe.log_probs(tokens, labels=tokens)
        if i in (times // 10, times - 1):
            live_bytes.append(tracemalloc.get_traced_memory()[0] >> 10)
    return f"{live_bytes[0]:,} KiB after {times // 10} alternations, {live_bytes[-1]:,} KiB after {times}"


def main() -> int:
    torch.set_num_threads(1)
    chosen, failed = arguments(), 0
    for problem, *rest in product(chosen.problems, PLACEMENTS, chosen.ranks, chosen.microbatches):
        start = time.perf_counter()
        try:
            outcome = difference(problem, *rest)
        except Exception as error:
            outcome, failed = f"{type(error).__name__}: {str(error)[:200]}", failed + 1
        print(
            f"{time.perf_counter() - start:6.1f} s  {problem} {' '.join(map(str, rest))}: {outcome}",
            flush=True,
        )
    print(alternate(chosen.alternations))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
