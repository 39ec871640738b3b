"""Processes that share nothing compile the same programs, although their sets have another order:
ranks must."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.support.training import Case, pipeline_of, problem_of

ROOT = Path(__file__).parents[3]
CASES = (Case("skips", "zb-v", 2, 4),)
SCRIPT = "from tests.zbcompile.compiler.test_hash_seeds import programs; print(programs())"


def programs() -> str:
    """The bytes of every file of the programs, and all values in their graphs."""
    torch.set_num_threads(1)
    lines = []
    for case in CASES:
        batch = problem_of(case.problem).batches(1, 2 * case.microbatches)[0]
        program = pipeline_of(case).compile(*batch.args, target=batch.target).program
        pieces = [piece for stage in program.stages for piece in stage.pieces.values()]
        nodes = [node for piece in pieces for node in piece.module.graph.nodes]
        with tempfile.TemporaryDirectory() as folder:
            program.save(Path(folder, "program"))
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            lines += [f"{x.name} {hashlib.sha256(x.read_bytes()).hexdigest()}" for x in files]
        lines += [str(node.meta["val"]) for node in nodes if "val" in node.meta]
    return "\n".join(lines)


@pytest.mark.slow
def test_programs_do_not_depend_on_the_hash_seed() -> None:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "examples")))
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    run = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    assert run.stdout.decode().strip() == programs()
