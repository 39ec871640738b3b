"""Importing this trains a step: torch imports much when it first compiles, and processes forked
later have it all.

A forkserver tells nobody that it could not import a module, and does not take over this process's
`sys.path`.
"""

import gc
import sys
from pathlib import Path

gc.set_threshold(50_000, 20, 20)  # see `tests/conftest.py`
ROOT = Path(__file__).parents[2]
sys.path[:0] = [each for each in (str(ROOT), str(ROOT / "examples")) if each not in sys.path]

import torch  # noqa: E402

from tests.support.training import Case, pipelined  # noqa: E402

torch.set_num_threads(1)  # threads would not survive a fork
pipelined(Case("mlp", "1f1b", 1, 1, steps=1))
gc.collect()
gc.freeze()
