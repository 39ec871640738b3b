"""Processes that share nothing compile the same programs, although their sets and dictionaries of objects have another
order: ranks must."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
import hashlib, pathlib, sys, tempfile
import torch
from tests.support.training import Case, pipeline_of, problem_of

torch.set_num_threads(1)
for case in (Case("skips", "zb-v", 2, 4), Case("gpt-tied", "interleaved-zb", 2, 4)):
    pipe = pipeline_of(case)
    batch = problem_of(case.problem).batches(1, 2 * case.microbatches)[0]
    program = pipe.compile(*batch.args, **batch.kwargs, target=batch.target).program
    with tempfile.TemporaryDirectory() as folder:
        program.save(pathlib.Path(folder) / "program")
        files = sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file())
        print(case, [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])
    print([str(node.meta["val"]) for s in program.stages for p in s.pieces.values() for node in p.module.graph.nodes
           if "val" in node.meta])
"""


@pytest.mark.slow
def test_programs_do_not_depend_on_the_hash_seed() -> None:
    said = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join((str(ROOT), "examples"))}
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
        said.append(subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True))
    assert said[0].stdout
    assert said[0].stdout == said[1].stdout
