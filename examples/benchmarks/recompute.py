"""Memory and time of recompute, predicted and measured: one GPT, no recompute and four budgets.

Each line is the same pipelined step. Memory is the peak of what waits for B and W on any rank;
predicted and measured must be equal to the byte. Under 1f1b all of it waits for the backward; under
zero-bubble schedules most of it may wait for W, which recompute does not reduce (--schedule zb-h1).
Time is CPU seconds of the whole step relative to that without recompute, the median over
interleaved rounds; FLOPs are the predicted ratio.

    python examples/benchmarks/recompute.py --layers 4 --width 256 --rounds 9
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate

import zbcompile

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, VOCABULARY, next_byte_loss
from zbcompile.passes.compile_options import Recompute
from zbcompile.prediction.predict import predicted_costs
from zbcompile.schedules import simulate

SHARES = (0.75, 0.5, 0.25, 0.1)  # of the bytes that a stage keeps without recomputing


@dataclass(frozen=True)
class Run:
    """One way to train, ready to run, and the CPU seconds of its steps."""

    name: str
    pipe: zbcompile.Pipeline
    seconds: list[float]

    @property
    def flops(self) -> int:
        """FLOPs of one microbatch on all stages."""
        return sum(stage.flops[name] for stage in self.pipe.program.stages for name in "FBW")

    @property
    def saved_bytes(self) -> int:
        return max(stage.crossing.kept for stage in self.pipe.program.stages)


def main() -> None:
    """Print one line per budget."""
    options = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (options.microbatches * options.rows, options.length + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    make = partial(_pipeline, options, inputs, targets)
    base = make("off", "off")
    smallest = max(stage.crossing.kept for stage in make("full", "full").pipe.program.stages)
    budgets = [max(smallest, int(base.saved_bytes * share)) for share in SHARES]
    runs = [
        base,
        *(make(f"{budget:,}", budget) for budget in budgets),
        make("selective", "selective"),
        make("full", "full"),
    ]
    for _ in range(options.rounds):
        for run in runs:
            start = time.process_time()
            run.pipe.step(inputs, target=targets)
            run.seconds.append(time.process_time() - start)
    print(
        tabulate(
            [_line(run, base) for run in runs], HEADERS, tablefmt="simple", disable_numparse=True
        )
    )


HEADERS = ("recompute", "kept F..B", "peak predicted", "measured", "FLOPs", "CPU time")


def _line(run: Run, base: Run) -> Sequence[str]:
    record = run.pipe.last_step
    assert record is not None
    predicted = max(
        simulate(run.pipe.program.schedule, predicted_costs(run.pipe.program)).peak_memory
    )
    measured = max(record.peak_activation_bytes.values())
    ratio = statistics.median(
        seconds_ / base_seconds
        for seconds_, base_seconds in zip(run.seconds[1:], base.seconds[1:], strict=True)
    )
    return (
        run.name,
        f"{run.saved_bytes:,}",
        f"{int(predicted):,}",
        f"{measured:,}",
        f"{run.flops / base.flops:.3f}",
        f"{ratio:.3f}",
    )


def _pipeline(
    options: argparse.Namespace,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    name: str,
    policy: Recompute,
) -> Run:
    torch.manual_seed(0)
    model = GPT(
        layers=options.layers,
        width=options.width,
        heads=4,
        length=options.length,
        dropout=options.dropout,
    )
    pipe = zbcompile.pipeline(
        model,
        schedule=options.schedule,
        ranks=2,
        microbatches=options.microbatches,
        loss=next_byte_loss,
        recompute=policy,
    )
    pipe.record = True
    return Run(name, pipe.compile(inputs, target=targets), [])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", default="1f1b")
    for name, default in (
        ("layers", 4),
        ("width", 256),
        ("length", 128),
        ("rows", 2),
        ("microbatches", 4),
        ("rounds", 9),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
