"""How far predicted passes are from measured ones on this machine.

    python -m zbcompile.calibrate --output machine.toml
    python examples/benchmarks/predicted_passes.py machine.toml
    python examples/benchmarks/predicted_passes.py machine.toml resnet --operations

With `--operations` the time of each kind of operation is shown instead, over all passes, timed inside of the graphs.
F, B, W and BW of a stage in the middle of a GPT, a Llama, a Mixtral and a ResNet, in float32 on one thread; the fastest
of some blocks of runs, by the CPU time of the thread, so that a loaded machine does not count.
"""

import argparse
import math
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import zbcompile
from zbcompile.compiler.compile_example import compile_example
from zbcompile.compiler.synthetic_values import values_like
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.flops import count_flops
from zbcompile.passes.graph.roofline import node_seconds, seconds_of
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_private import FakeTensorMode, boxed
from zbcompile.prediction.calibration import run_seconds
from zbcompile.schedules import build

TEXT: dict[str, Any] = {"vocab_size": 2048, "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8}


def gpt() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=2048, n_embd=256, n_layer=2, n_head=8)), _text()


def llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, intermediate_size=688, num_key_value_heads=4)), _text()


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = TEXT | {"intermediate_size": 512, "num_key_value_heads": 4, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes)), _text()


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [2, 2], "layer_type": "basic"}
    inputs = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.zeros(8, dtype=torch.int64)}
    return ResNetForImageClassification(ResNetConfig(**sizes)), inputs


def _text() -> dict[str, Any]:
    tokens = torch.randint(2048, (4, 128))
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", metavar="FILE.toml")
    parser.add_argument("names", nargs="*", default=["gpt", "llama", "mixtral", "resnet"])
    parser.add_argument("--operations", action="store_true", help="the operations that differ most")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    hardware = zbcompile.Hardware.find(chosen.hardware)
    rows, errors = [], []
    for name in chosen.names:
        model, inputs = globals()[name]()
        program = compile_example(zbcompile.Example(model, (), inputs), build("zb-h1", 2, 4), Choices()).program
        if chosen.operations:
            pieces = [piece for stage in program.stages for piece in stage.pieces.values()]
            _show_operations(name, pieces, hardware)
            continue
        for stage in program.stages:
            for op, piece in stage.pieces.items():
                now, then = seconds_of(piece.module, hardware), _measured(piece)
                errors.append(now / then - 1)
                rows.append((name, stage.stage, op, f"{1e3 * now:.2f}", f"{1e3 * then:.2f}", f"{errors[-1]:+.1%}"))
    if chosen.operations:
        return
    print(tabulate(rows, ("model", "stage", "pass", "predicted ms", "measured ms", "off by"), disable_numparse=True))
    sizes = sorted(map(abs, errors))
    print(f"median {median(sizes):.1%}, largest {sizes[-1]:.1%}")


class _Timed(torch.fx.Interpreter):
    """Runs a graph, and takes the least time of every operation."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece.module)
        self.seconds: dict[torch.fx.Node, float] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        began = time.thread_time()
        value = super().run_node(n)
        self.seconds[n] = min(time.thread_time() - began, self.seconds.get(n, math.inf))
        return value


def _operations(piece: Piece, hardware: zbcompile.Hardware) -> Iterator[tuple[str, float, float]]:
    """The name of every operation, its predicted and its measured seconds."""
    timed, flops = _Timed(piece), count_flops(piece.module, FakeTensorMode(allow_non_fake_inputs=True))
    values = [values_like(node) for node in piece.module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        for _ in range(15):
            timed.run(*values)
    for node, seconds in timed.seconds.items():
        if node.op == "call_function":
            yield str(node.target), node_seconds(node, flops[node], hardware), seconds


def _show_operations(name: str, pieces: list[Piece], hardware: zbcompile.Hardware) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for operation, *pair in (each for piece in pieces for each in _operations(piece, hardware)):
        found.setdefault(operation, []).append((1e3 * pair[0], 1e3 * pair[1]))
    sums = [(o, len(f), *(sum(column) for column in zip(*f, strict=True))) for o, f in found.items()]
    sums.sort(key=lambda row: -abs(row[2] - row[3]))
    print(tabulate(sums[:20], (name, "times", "predicted ms", "measured ms"), floatfmt=".2f"))


def _measured(piece: Piece) -> float:
    run = boxed(piece.module)
    values = [values_like(node) for node in piece.module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        return run_seconds(lambda: run(list(values)), torch.device("cpu"))


if __name__ == "__main__":
    main()
