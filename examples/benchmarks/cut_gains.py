"""What cuts moved together with the order gain, predicted: a Llama of bfloat16 on H100s, by its operations.

    python examples/benchmarks/cut_gains.py                                   # 4 and 8 ranks, about 30 minutes
    python examples/benchmarks/cut_gains.py --ranks 4 --heads 4 --memory 1 .6 --seconds 5

Six layers a rank, and an output layer whose vocabulary makes it take as long as `--heads` layers; a step has two
microbatches a rank. The model is captured (of fake tensors), and within each limit of memory two layouts are searched:

* equal: cuts that balance the time of the ranks or, if that is shorter, what they hold, and the best order for them,
  found in `--seconds`;
* moved: what `schedule="auto"` finds in as many seconds, cuts and order together.

`--memory` is what a rank has for activations, beside those of the pass that runs: 1 is what a microbatch keeps on all
ranks together, which is what 1F1B needs if they keep equally much; 0 is no limit. "whole": cuts between layers only;
"inside": wherever the captured step can be cut. "gain" is the share of the step that moved cuts
save; "at least": what they save of the bound for equal cuts, so of any order for these, found or not.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from tabulate import tabulate

import zbcompile
from zbcompile.cli.fake_models import fake_models
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import lay_out_step
from zbcompile.compiler.prices import LinePrices
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.planning.fastest_layouts import fastest_layouts
from zbcompile.planning.layouts import LayoutSearch
from zbcompile.planning.planner import PricedStep
from zbcompile.program.choice import Choice
from zbcompile.schedules import ScheduleError

LAYERS, ROWS, LENGTH = 6, 4, 1024  # layers a rank; rows of a microbatch, and their words
WORDS = 21_100  # of a vocabulary that takes as long as a layer
CHOICES = Choices(hardware=zbcompile.Hardware.find("h100-sxm"))


def captured(layers: int, head: int) -> LinePrices:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    config = LlamaConfig(vocab_size=WORDS * head, num_hidden_layers=layers, tie_word_embeddings=False, **sizes)
    with fake_models():
        model, tokens = LlamaForCausalLM(config).bfloat16(), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    example = zbcompile.Example(model, (), {"input_ids": tokens, "labels": tokens})
    laid_out = lay_out_step(model, one_microbatch(example), example.loss, CHOICES)
    return PricedStep(laid_out, CHOICES).costs(1)["off"]


def between_layers(costs: LinePrices, layers: int) -> LinePrices:
    """The same, but only whole layers can be moved."""
    edges = edges_named(costs.line, [f"model.layers.{i}" for i in range(1, layers)], layers)
    allowed = tuple(place + 1 in edges for place in range(len(costs.line.nodes)))
    return replace(costs, line=replace(costs.line, allowed=allowed))


def limit(search: LayoutSearch, share: float) -> int | None:
    """Bytes of a rank for so large a share."""
    prices, layout = search.lines["off"], search.layout("linear")
    edges = search.equal_cuts(layout) or []
    kept = prices.costs(edges).activation
    return round(max(prices.held_by_any_order(layout.parsed, edges)) + share * sum(kept)) if share else None


def with_equal_cuts(search: LayoutSearch, seconds: float) -> Choice:
    """The shortest step on any placement, with equal cuts or, under a limit, with those that hold least."""
    found, errors = [], []
    for placement in search.placements:
        layout = search.layout(placement)
        for cuts in (search.equal_cuts, search.lean_cuts)[: 1 if search.choices.memory is None else 2]:
            try:
                cut = replace(layout, edges=tuple(cuts(layout) or ()))
                found.append(search.lay_out(cut, seconds / len(search.placements)))
            except (PartitionError, ScheduleError) as error:
                errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=lambda choice: choice.seconds)


def rows(options: argparse.Namespace, ranks: int, head: int) -> Iterator[list[object]]:
    inside = captured(LAYERS * ranks, head)
    for name, prices in (("whole", between_layers(inside, LAYERS * ranks)), ("inside", inside)):
        free = LayoutSearch({"off": prices}, ranks, 2 * ranks, CHOICES, chunks=options.chunks)
        for share in options.memory:
            search = replace(free, choices=replace(CHOICES, memory=limit(free, share), recompute="off"))
            try:
                equal = with_equal_cuts(search, options.seconds)
            except (PartitionError, ScheduleError):
                yield [ranks, head, name, share or "-", "does not fit"]
                continue
            moved = fastest_layouts(search, options.seconds)[0]
            gains = [1 - moved.seconds / each for each in (equal.seconds, equal.bound)]
            times = 1e3 * equal.seconds, 1e3 * moved.seconds
            on = equal.layout.placement, moved.layout.placement
            yield [ranks, head, name, share or "-", *on, *times, *gains]


HEADERS = ("ranks", "head", "cuts", "memory", "equal on", "moved on", "equal ms", "moved ms", "gain", "at least")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 3, 4], help="in layers (default: 1 2 3 4)")
    parser.add_argument("--memory", type=float, nargs="+", default=[0, 1, 0.8, 0.6], help="default: 0 1 .8 .6")
    parser.add_argument("--chunks", type=int, default=1, help="stages a rank; 0: any number (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="for each search (default: %(default)s)")
    options = parser.parse_args()
    options.chunks = options.chunks or None
    torch.set_num_threads(1)
    for ranks in options.ranks:
        for head in options.heads:
            found = list(rows(options, ranks, head))
            print(tabulate(found, HEADERS, floatfmt=("",) * 6 + (".2f",) * 2 + (".1%",) * 2), flush=True)


if __name__ == "__main__":
    main()
