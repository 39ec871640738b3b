"""Processes that share nothing compile the same programs, although their sets have another order:
ranks must."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zbcompile
from tests.support.oracle import PROBLEMS

ROOT = Path(__file__).parents[3]
SCRIPT = "from tests.zbcompile.compiler.test_hash_seeds import programs; print(programs())"


def programs() -> str:
    """The bytes of every file of a program."""
    torch.set_num_threads(1)
    (batch,), model = PROBLEMS["skips"].batches(1, 8), PROBLEMS["skips"].model()
    options: Any = {"schedule": "zb-v", "ranks": 2, "microbatches": 4, "loss": F.mse_loss}
    pipe = zbcompile.pipeline(model, **options).compile(*batch.args, target=batch.target)
    with tempfile.TemporaryDirectory() as folder:
        pipe.program.save(Path(folder, "program"))
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        lines = [f"{x.name} {hashlib.sha256(x.read_bytes()).hexdigest()}" for x in files]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.beyond_sample
def test_programs_do_not_depend_on_the_hash_seed() -> None:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "examples")))
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    run = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    assert run.stdout.decode().strip() == programs()
