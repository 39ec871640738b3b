"""Plants faults in a copy of the library, one at a time, and runs the tests that should find them.

    python -m tests.test_planted_faults            from the repository's root, all of them
    python -m tests.test_planted_faults dropped    those whose name contains "dropped"

Prints the test that found each fault. Ends with status 1 if one was not found. As a test it keeps the
list in step with the code.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("zbcompile", "passes", "schedules", "tests", "examples", "docs", "pyproject.toml")


@dataclass(frozen=True)
class PlantedFault:
    """A change of one place of the library: `old`, which occurs once in `file`, becomes `new`.
    `tests` are the files or folders that should find it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


SCHEDULES = (
    PlantedFault(
        "backwards go down the pipeline",
        "schedules/ir/dependencies.py",
        "DIRECTION = {F: 1, B: -1}",
        "DIRECTION = {F: 1, B: 1}",
        ("tests/schedules/generators",),
    ),
    PlantedFault(
        "a message of the wrong stage",
        "zbcompile/program/edges.py",
        "at, peer = (stage, route.source)",
        "at, peer = (route.stage, route.source)",
        ("tests/zbcompile/engine/test_edges.py", "tests/zbcompile/engine/test_combinations.py"),
    ),
    PlantedFault(
        "a receive is posted after the step that its message is for",
        "schedules/lowering/lower.py",
        "where = posts[peer], graph, run, peer, run.start[node]",
        "where = posts[peer], graph, run, peer, run.end[node] + 2",
        ("tests/schedules/lowering",),
    ),
    PlantedFault(
        "a hop costs what the opposite one costs",
        "schedules/execution/order_graph.py",
        "costs.hop(self.stage, self.source, self.destination)",
        "costs.hop(self.stage, self.destination, self.source)",
        ("tests/schedules/simulation", "tests/schedules/ir"),
    ),
    PlantedFault(
        "an update before the last weight gradient of its stage",
        "zbcompile/program/updates.py",
        "last = {action.stage: index for index, action in actions if W in work_of(action.op)}",
        "last = {action.stage: 0 for index, action in actions if W in work_of(action.op)}",
        ("tests/zbcompile/engine/test_updates.py",),
    ),
    PlantedFault(
        "a T that does not wait for the statistics of all shards",
        "schedules/ir/dependencies.py",
        "    needed |= {(T, shard): STATS if lowered else S for shard in schedule.shards}\n",
        "",
        ("tests/schedules",),
    ),
)
PERSISTENCE = (
    PlantedFault(
        "a tensor is saved at the wrong offset",
        "zbcompile/persistence/checkpoint_files.py",
        "list(item.tensor_data.chunk.offsets)",
        "[0] * len(item.tensor_data.chunk.offsets)",
        ("tests/zbcompile/persistence/test_round_trips.py",),
    ),
    PlantedFault(
        "a checkpoint gets its name before its index is written",
        "zbcompile/persistence/checkpoint_files.py",
        "            write_whole(partial / INDEX, with_digest(data).encode())\n"
        '            publish(partial, self.fields["keep"])\n',
        '            final = publish(partial, self.fields["keep"])\n'
        "            write_whole(final / INDEX, with_digest(data).encode())\n",
        ("tests/zbcompile/persistence/test_damage.py",),
    ),
    PlantedFault(
        "the newest checkpoints are dropped instead of the oldest",
        "zbcompile/persistence/checkpoint_directory.py",
        "[:-keep]",
        "[keep:]",
        ("tests/zbcompile/persistence/test_checkpoint.py",),
    ),
    PlantedFault(
        "lost generators: a resumed run draws other numbers",
        "zbcompile/persistence/checkpoint.py",
        "            restore_random_state(checkpoint.random, ranks.device)\n",
        "            pass\n",
        ("tests/zbcompile/persistence/test_checkpoint.py",),
    ),
)
PASSES = (
    PlantedFault(
        "a weight gradient in W although its product reaches activations",
        "passes/split/split_backward.py",
        "node for node in backward if _is_product(node) and ends[node]}",
        "node for node in backward if _is_product(node)}",
        ("tests/passes/stage/test_stages.py", "tests/zbcompile/engine/test_combinations.py"),
    ),
    PlantedFault(
        "gradients of the padding row of an embedding",
        "passes/stage/accumulate.py",
        "    if padding >= 0:  # type: ignore[operator]\n",
        "    if False:\n",
        ("tests/passes/stage/test_accumulate.py",),
    ),
    PlantedFault(
        "the backward reads buffers that later forwards have overwritten",
        "passes/compile_step.py",
        "    keep_updated_buffers(step, stages)\n",
        "",
        ("tests/passes/stage/test_stages.py", "tests/zbcompile/engine/test_changing_buffers.py"),
    ),
    PlantedFault(
        "recomputation draws random numbers again",
        "passes/recompute/recompute.py",
        "        or is_random(node)\n",
        "",
        ("tests/zbcompile/engine/test_recompute.py",),
    ),
    PlantedFault(
        "recomputation reads buffers that the step has changed",
        "passes/recompute/recompute.py",
        " or changing.intersection(node.all_input_nodes)",
        "",
        ("tests/zbcompile/engine/test_recompute.py",),
    ),
    PlantedFault(
        "a weight is cast once per use under autocast",
        "passes/compile_step.py",
        "    merge_autocast_casts(step)\n",
        "",
        ("tests/passes/capture/test_capture_autocast.py",),
    ),
    PlantedFault(
        "sums over ranks are deferred although the step is exact",
        "passes/compile_step.py",
        "    else:\n        defer_sums(step)\n",
        "    if step:\n        defer_sums(step)\n",
        ("tests/passes/test_dtensor.py", "tests/zbcompile/engine/test_dtensor.py"),
    ),
)
ENGINE = (
    PlantedFault(
        "a lost buffer update",
        "zbcompile/engine/stage.py",
        "self.stages[microbatch].resident[Slot(BUFFER, name)].copy_(value)",
        "pass",
        ("tests/zbcompile/engine",),
    ),
    PlantedFault(
        "all microbatches of a stage draw from one seed",
        "zbcompile/engine/stage.py",
        "seed_generators(self.seeds[microbatch], ",
        "seed_generators(self.seeds[0], ",
        ("tests/zbcompile/engine",),
    ),
    PlantedFault(
        "a gradient replaces the one before",
        "zbcompile/engine/gradients.py",
        "parameter.grad.add_(gradient)",
        "parameter.grad.copy_(gradient)",
        ("tests/zbcompile/engine/test_combinations.py",),
    ),
    PlantedFault(
        "the mean over replicas is one over microbatches",
        "zbcompile/engine/step.py",
        "loss_factor /= count * ranks.replicas.count",
        "loss_factor /= count",
        ("tests/zbcompile/engine/test_data_parallel.py", "tests/zbcompile/engine/test_mesh.py"),
    ),
    PlantedFault(
        "replicas keep their own buffers",
        "zbcompile/engine/step.py",
        "                broadcast([buffer], sums[name].group)\n",
        "                pass\n",
        ("tests/zbcompile/engine/test_data_parallel.py", "tests/zbcompile/engine/test_mesh.py"),
    ),
    PlantedFault(
        "gradients of tied parameters stay on their stages",
        "zbcompile/engine/step.py",
        "        if program.shared:\n",
        "        if False:\n",
        ("tests/zbcompile/engine/test_shared_parameters.py",),
    ),
    PlantedFault(
        "a gradient of earlier steps is counted on every rank",
        "zbcompile/engine/replicas.py",
        "                gradient.zero_()\n",
        "                pass\n",
        ("tests/zbcompile/engine/test_data_parallel.py",),
    ),
    PlantedFault(
        "a rank does not wait for the sums of its gradients",
        "zbcompile/engine/replicas.py",
        "            for bucket in self.buckets.pop(started, ()):\n                bucket.unpack()\n",
        "            self.buckets.pop(started, ())\n",
        ("tests/zbcompile/engine/test_data_parallel.py",),
    ),
    PlantedFault(
        "a forward takes the inputs of another microbatch",
        "zbcompile/engine/stage.py",
        "inputs = self.inputs[microbatch]",
        "inputs = self.inputs[0]",
        ("tests/zbcompile/engine/test_combinations.py",),
    ),
)
CACHE = (
    PlantedFault(
        "a stale cache hit after the model has changed",
        "zbcompile/program_cache/graph_cache.py",
        "return not self.change()",
        "return True",
        ("tests/zbcompile/program_cache/test_changing_python.py",),
    ),
    PlantedFault(
        "a stale cache hit under another autocast",
        "zbcompile/program_cache/graph_cache.py",
        "return TorchModes(dtype, kernels,",
        "return TorchModes(None, kernels,",
        ("tests/zbcompile/program_cache/test_changing_python.py",),
    ),
    PlantedFault(
        "the warm-up draws random numbers",
        "zbcompile/program_cache/warm_up.py",
        "with gpu.forked_generators(stage.device), torch.no_grad(), no_autocast:",
        "with torch.no_grad(), no_autocast:",
        ("tests/zbcompile/program_cache/test_warm_up.py",),
    ),
    PlantedFault(
        "outputs in the opposite order of the batch",
        "zbcompile/engine/executable.py",
        "return torch.cat(parts)\n",
        "return torch.cat(parts[::-1])\n",
        ("tests/zbcompile/program_cache/test_step_outputs.py",),
    ),
)
OPTIMIZER = (
    PlantedFault(
        "values written into parameters do not reach the masters",
        "zbcompile/engine/optimizer_parameters.py",
        "            entry.refresh_master()\n",
        "            pass\n",
        ("tests/zbcompile/optimizer/test_pipeline_optimizer.py",),
    ),
    PlantedFault(
        "the norm counts a parameter once for each of its copies",
        "zbcompile/api/model_state.py",
        " and is_first",
        "",
        ("tests/zbcompile/engine/test_mesh.py", "tests/zbcompile/engine/test_dtensor.py"),
    ),
    PlantedFault(
        "an update that was not valid is not taken back",
        "zbcompile/optimizer/post_validation.py",
        "            tensor.detach().copy_(value)\n",
        "            pass\n",
        ("tests/zbcompile/optimizer/test_post_validation.py",),
    ),
    PlantedFault(
        "only the first replica sends its updated values",
        "zbcompile/engine/zero1.py",
        "                for i, (b, e) in enumerate(pairwise(self.bounds))\n                if b < e\n",
        "                for i, (b, e) in enumerate(pairwise(self.bounds[:2]))\n",
        ("tests/zbcompile/optimizer/test_sharded_parameters.py",),
    ),
)
VOCABULARY = (
    PlantedFault(
        "labels below a shard's rows count as its own",
        "passes/vocabulary/shard.py",
        "inside = (local >= 0) & (local < self.words)",
        "inside = local < self.words",
        ("tests/passes/vocabulary",),
    ),
    PlantedFault(
        "sums of exponentials of different maxima are added",
        "passes/vocabulary/shard.py",
        "parts = sums * (maxima - maximum).exp()",
        "parts = sums",
        ("tests/passes/vocabulary",),
    ),
)
GPU = (
    PlantedFault(
        "a missing synchronization before the collectives of the output layer",
        "zbcompile/engine/vocabulary.py",
        "        self.stream.wait_stream(gpu.current_stream(self.device))\n",
        "",
        ("tests/zbcompile/engine/test_pretended_gpu.py",),
    ),
    PlantedFault(
        "the memory of a message is freed while it is sent",
        "zbcompile/distributed/transport.py",
        "        pending.append(sends)\n",
        "",
        ("tests/zbcompile/engine/test_pretended_gpu.py",),
    ),
    PlantedFault(
        "a recorded pass reads the inputs of its recording",
        "zbcompile/backends/cuda_graphs.py",
        "buffer.copy_(values[place])",
        "pass",
        ("tests/zbcompile/engine/test_pretended_gpu.py",),
    ),
    PlantedFault(
        "a message with other strides than its reader was traced for",
        "zbcompile/distributed/transport.py",
        "return _copied(value, once, spec.stride).expand(spec.shape)",
        "return value",
        ("tests/zbcompile/distributed/test_packing.py",),
    ),
)
FAULTS: tuple[PlantedFault, ...] = (
    *SCHEDULES,
    *PERSISTENCE,
    *PASSES,
    *ENGINE,
    *CACHE,
    *OPTIMIZER,
    *VOCABULARY,
    *GPU,
)


def main(parts: list[str]) -> int:
    """Plants the faults whose name contains one of `parts`, or all. Returns the exit status."""
    chosen = [fault for fault in FAULTS if not parts or any(part in fault.name for part in parts)]
    missed = 0
    for fault in chosen:
        finder = finding_test(fault)
        missed += finder is None
        print(f"{fault.name}: {finder or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return int(missed > 0)


def finding_test(fault: PlantedFault) -> str | None:
    """Returns the first test that fails with a fault; None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(source, copy / name)
        path = copy / fault.file
        path.write_text(planted(fault, path.read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "--tb=no", *fault.tests]
        run = subprocess.run(
            command,
            cwd=copy,
            env={**_environment(), "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    result = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if result is None and run.returncode != 0:
        return f"(pytest ended with status {run.returncode})"
    return result and result[1]


def planted(fault: PlantedFault, text: str) -> str:
    """Returns the text of a file with the fault. Raises ValueError if its place is not there."""
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}"
        )
    return text.replace(fault.old, fault.new)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_place_of_a_fault_exists_once(fault: PlantedFault) -> None:
    assert planted(fault, (ROOT / fault.file).read_text(encoding="utf-8"))
    assert all((ROOT / test).exists() for test in fault.tests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
