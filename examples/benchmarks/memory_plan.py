"""A step's memory as a plan: the block that holds what a rank makes in a step, against what is predicted of it.

`planned` is the block of the fullest rank, `alive` the most bytes of it that are alive at one moment (no plan can be
smaller), `predicted` the peak that `python -m zbcompile.inspect` states of activations and messages. Everything follows
from the graphs: nothing runs.

    python examples/benchmarks/memory_plan.py --ranks 2 --microbatches 8
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import zbcompile

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, VOCABULARY, next_byte_loss
from llama import Llama
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import Choices
from zbcompile.prediction.predict import predicted_costs
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.program.program import Program
from zbcompile.runtime.memory_plan import MemoryPlan, plan_memory
from zbcompile.runtime.rank_plan import instructions_of
from zbcompile.schedules import build
from zbcompile.schedules.ir.actions import Action

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "dualpipe-v")
HEADERS = ("model", "schedule", "values", "planned", "alive", "predicted", "planned / predicted")


def main() -> None:
    """Print one line per model and schedule."""
    given = _arguments()
    lines = [_line(given, *each) for each in _examples(given)]
    print(tabulate(lines, HEADERS, tablefmt="github", disable_numparse=True))


def _examples(given: argparse.Namespace) -> Iterator[tuple[str, str, zbcompile.Example]]:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (given.rows, given.length + 1))
    inputs, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    size = {"layers": given.layers, "width": given.width, "length": given.length}
    models = {"GPT": GPT(**size, tied=True), "Llama": Llama(**size, heads=4), "MoE": _mixture(given)}
    for name, model in models.items():
        for schedule in SCHEDULES:
            if name == "MoE":
                yield name, schedule, zbcompile.Example(model, (), {"input_ids": inputs, "labels": inputs})
            else:
                yield name, schedule, zbcompile.Example(model, (inputs,), loss=next_byte_loss, target=target)


def _mixture(given: argparse.Namespace) -> nn.Module:
    """transformers' Mixtral: two of four experts for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=given.width,
        intermediate_size=2 * given.width,
        num_hidden_layers=given.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return MixtralForCausalLM(config)


def _line(given: argparse.Namespace, name: str, schedule: str, example: zbcompile.Example) -> list[str]:
    order = build(schedule, ranks=given.ranks, microbatches=given.microbatches)
    program = compile_example(example, order, Choices()).program
    plans = [_plan(program, rank) for rank in range(given.ranks)]
    planned, alive = max(plan.size for plan in plans), max(plan.least for plan in plans)
    predicted = max(memory.peak for memory in rank_memories(program, predicted_costs(program), {}))
    values = max(map(_count, plans))
    figures = [f"{each:,}" for each in (values, planned, alive, predicted)]
    return [name, schedule, *figures, f"{planned / predicted:.4f}"]


def _plan(program: Program, rank: int) -> MemoryPlan:
    def stage_of(action: Action) -> Any:
        stage = program.stages[action.stage]
        return SimpleNamespace(program=stage, device=torch.device("cpu"), generator_arrives=False)

    instructions = instructions_of(program, rank, stage_of)
    return plan_memory(instructions, lambda action: program.stages[action.stage], program.shared)


def _count(plan: MemoryPlan) -> int:
    return sum(len(made) for action in plan.results.values() for made in action.values())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"ranks": 2, "microbatches": 8, "layers": 8, "width": 256, "rows": 2, "length": 128}
    for option, default in sizes.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
