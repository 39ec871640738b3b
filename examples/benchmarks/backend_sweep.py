"""How far a backend's gradients are from eager's, for four models whose source the ranks cannot
import; in a checkout:

    python examples/benchmarks/backend_sweep.py [--backend inductor] [--models llama vit]

A GPT with tied embeddings, transformers' Llama and ViT, and a U-Net, all tiny, are compiled here
and run by fresh processes, at two ranks under zb-v and at four under zb-h1: one step each. Prints
the largest difference of a gradient, relative to its largest entry. Bound: 2e-6; for fx, with
`exact=True`, 0. inductor compiles for half an hour.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch
from tabulate import tabulate

from tests.support.training import worst_difference
from tests.zbcompile.persistence.fresh_processes import MODELS, expected, run_alone

BOUND = {"fx": 0.0, "inductor": 2e-6}
# gradients below this share of the largest are zero but for rounding: ViT's key biases
ROUNDING = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--backend", choices=list(BOUND), default="inductor", help="default: %(default)s"
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        worst_ = run_alone(Path(folder), options.models, options.backend)
    worst = {key: worst_difference(ours, expected(*key), ROUNDING) for key, ours in worst_.items()}
    rows = [[*key, *values] for key, values in worst.items()]
    print(f"{options.backend}: {time.perf_counter() - begin:.0f} s")
    print(
        tabulate(
            rows, ["model", "ranks", "worst, of its largest entry", "gradient"], floatfmt=".1e"
        )
    )
    return int(any(difference > BOUND[options.backend] for difference, _ in worst.values()))


if __name__ == "__main__":
    sys.exit(main())
