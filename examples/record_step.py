"""Record one step of a model, for `python -m zbcompile.inspect TARGET --measured FILE` to compare
with the prediction.

    torchrun --standalone --nproc-per-node 4 examples/record_step.py examples/targets.py:gpt step.json
    python examples/record_step.py examples/targets.py:gpt step.json --ranks 2

TARGET returns a model and one microbatch (docs/inspect.md); the batch is that microbatch, repeated.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import zbcompile
from zbcompile.cli.target import load_example

WARM_UP = 3  # steps before the recorded one


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="TARGET", help="package.module:name or path/file.py:name")
    parser.add_argument("output", metavar="FILE", help="the record, JSON")
    parser.add_argument("--schedule", default="zb-v", help="default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--ranks", type=int, default=2, help="ranks in this process, without torchrun (default: 2)"
    )
    return parser.parse_args()


def repeated(value: Any, times: int) -> Any:
    """A batch of `times` equal microbatches."""
    if isinstance(value, torch.Tensor):
        return torch.cat([value] * times) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: repeated(item, times) for key, item in value.items()}
    return tuple(repeated(item, times) for item in value) if isinstance(value, tuple) else value


def record(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every rank builds the same model
    example = load_example(options.target)
    pipe = zbcompile.pipeline(
        example.model,
        schedule=options.schedule,
        microbatches=options.microbatches,
        loss=example.loss,
        ranks=None if "RANK" in os.environ else options.ranks,
    )
    args, kwargs, target = repeated(
        (example.args, example.kwargs, example.target), options.microbatches
    )
    keywords = kwargs if example.loss is None else {**kwargs, "target": target}
    for step in range(WARM_UP + 1):
        pipe.record = step == WARM_UP
        pipe.step(*args, **keywords)
    if pipe.is_first and pipe.last_step is not None:
        pipe.last_step.save(options.output)
        print(
            f"{options.output}: a step of {1e3 * pipe.last_step.step_time:.1f} ms on"
            f" {len(pipe.last_step.spans)} ranks"
        )


def main() -> None:
    try:
        record(parse())
    except (zbcompile.PipelineError, zbcompile.CompileError, zbcompile.ScheduleError) as error:
        raise SystemExit(f"record_step: {error}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
