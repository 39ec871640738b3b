"""Measures what a change of the compiler must not make worse, and compares two such measurements.

    python examples/benchmarks/baseline.py --output now.json
    python examples/benchmarks/baseline.py --compare examples/benchmarks/baseline_331c9846.json now.json

A measurement holds, for the checkout of the script or for the one that `--checkout` names:

* bits: how forty tiny architectures of transformers differ from eager after a step under zb-v with
  exact=True;
* compile: CPU seconds and peak memory of compiling a GPT, a Llama and a Mixtral, and of `inspect
  --fake` of a 70B Llama; the bytes that one microbatch keeps for B and for W, summed over the
  stages of each;
* step: seconds of a step relative to the fastest of torch's schedules, and CPU seconds relative to
  eager (vs_torch.py).

CPU seconds also stand relative to those of an export by torch alone, which a slow or busy machine
affects alike. The clock's ratios need as many idle cores as ranks; `load` says how busy the machine
was.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

import zbcompile

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("bits", "compile", "step")
MODELS = ("gpt", "llama", "mixtral")
RANKS, MICROBATCHES = 4, 8
INSPECT = ("-m", "zbcompile.inspect", "--json", "--fake", "--ranks", "8", "--schedule", "zb-v")
BYTES = ("keeps", "residue")  # what `inspect --json` calls the bytes kept for B and for W

TORCH_ALONE = """
import torch
from torch import nn
layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0), 8, enable_nested_tensor=False)
torch.export.export(layers.train(), (torch.randn(4, 2, 32),)).run_decompositions()
"""
COMPILE = f"""
import importlib.util, json, sys, time
import torch
import zbcompile
spec = importlib.util.spec_from_file_location("baseline", sys.argv[1])
baseline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(baseline)
torch.set_num_threads(1)
example = getattr(baseline, sys.argv[2])()
repeated = lambda tensor: torch.cat([tensor] * {MICROBATCHES})
pipe = zbcompile.pipeline(
    example.model, schedule="zb-v", ranks={RANKS}, microbatches={MICROBATCHES}, loss=example.loss
)
target = {{}} if example.target is None else {{"target": repeated(example.target)}}
begin = time.process_time()
pipe.compile(*map(repeated, example.args), **{{k: repeated(v) for k, v in example.kwargs.items()}}, **target)
seconds = time.process_time() - begin
kept = [(stage.crossing.kept, stage.crossing.residue) for stage in pipe.program.stages]
print(json.dumps([seconds, *map(sum, zip(*kept))]))
"""
SAMPLE_OUTCOMES = """
import json, sys, warnings
import torch
from benchmarks.eager_comparison import outcome_of
from benchmarks.transformers_models import entries, problem_of
warnings.simplefilter("ignore")
torch.set_num_threads(1)
found = {entry.name: entry for entry in entries()}
outcomes = {name: outcome_of(problem_of(found[name]), ("zb-v",)).kind for name in sys.argv[1:]}
print(json.dumps(outcomes))
"""


def gpt() -> zbcompile.Example:
    """A byte-level GPT of eight layers."""
    from gpt import GPT, next_byte_loss

    tokens = torch.randint(256, (2, 129))
    model = GPT(layers=8, width=256, heads=8, length=128)
    return zbcompile.Example(
        model, (tokens[:, :-1],), loss=next_byte_loss, target=tokens[:, 1:].contiguous()
    )


def llama() -> zbcompile.Example:
    """A Llama of transformers with eight layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _causal(LlamaForCausalLM(LlamaConfig(**_sizes(), num_key_value_heads=2)))


def mixtral() -> zbcompile.Example:
    """A Mixtral of transformers with eight layers of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(**_sizes(), num_key_value_heads=2, num_local_experts=4)
    )
    model.set_experts_implementation("batched_mm")
    return _causal(model)


def _sizes() -> dict[str, Any]:
    layers = {"num_hidden_layers": 8, "num_attention_heads": 4}
    return {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, **layers}


def _causal(model: Any) -> zbcompile.Example:
    tokens = torch.randint(256, (2, 64))
    return zbcompile.Example(model, (), {"input_ids": tokens, "labels": tokens})


class Finished(NamedTuple):
    """Output, CPU seconds and peak memory in GB of a process."""

    text: str
    seconds: float
    gigabytes: float


def run(checkout: Path, *arguments: str, environment: dict[str, str] | None = None) -> Finished:
    """Runs Python in `checkout` to its end. Raises CalledProcessError if it fails."""
    paths = os.pathsep.join([str(checkout), str(checkout / "examples")])
    command = [sys.executable, *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=checkout,
            stdout=output,
            env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, text)
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    return Finished(text, used.ru_utime + used.ru_stime, peak)


def measure_bits(checkout: Path) -> dict[str, Any]:
    """How each architecture of the tests' sample differs from eager; "bitwise" if it does not."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.transformers_models import SAMPLE

    outcomes = json.loads(run(checkout, "-c", SAMPLE_OUTCOMES, *SAMPLE).text.splitlines()[-1])
    not_bitwise = {name: kind for name, kind in outcomes.items() if kind != "bitwise"}
    return {
        "architectures": len(outcomes),
        "bitwise": len(outcomes) - len(not_bitwise),
        "other": not_bitwise,
    }


def measure_compile(checkout: Path) -> dict[str, Any]:
    """CPU seconds, also relative to an export by torch alone, peak memory, and bytes kept for B and
    W, by model."""
    results: dict[str, Any] = {}
    for name in MODELS:
        alone = run(checkout, "-c", TORCH_ALONE).seconds
        done = run(checkout, "-c", COMPILE, str(Path(__file__).resolve()), name)
        seconds, *saved_bytes = json.loads(done.text.splitlines()[-1])
        results[name] = _costs(seconds, alone, done.gigabytes, saved_bytes)
    alone = run(checkout, "-c", TORCH_ALONE).seconds
    done = run(checkout, *INSPECT, f"{checkout / 'examples' / 'targets.py'}:llama_70b")
    rows = json.loads(done.text)["stages"]
    saved_bytes = [sum(row[name] for row in rows) for name in BYTES]
    return results | {"llama_70b": _costs(done.seconds, alone, done.gigabytes, saved_bytes)}


def _costs(
    seconds: float, alone: float, gigabytes: float, saved_bytes: list[int]
) -> dict[str, Any]:
    ratio = {"CPU s": round(seconds, 1), "CPU s / torch's export": round(seconds / alone, 2)}
    return {
        **ratio,
        "peak GB": round(gigabytes, 2),
        "bytes for B": saved_bytes[0],
        "bytes for W": saved_bytes[1],
    }


def measure_step(checkout: Path, rounds: int) -> dict[str, Any]:
    """The last three columns of vs_torch.py for two ranks, by contender."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = str(checkout / "examples" / "benchmarks" / "vs_torch.py")
    text = run(
        checkout, *launch, script, "--rounds", str(rounds), environment={"OMP_NUM_THREADS": "1"}
    ).text
    rows = re.findall(r"^(\S.*?) {2,}([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
    heads = ("CPU s / eager's", "time / torch's fastest", "peak MB held")
    return {name: dict(zip(heads, map(float, values), strict=True)) for name, _, *values in rows}


def measure(checkout: Path, parts: list[str], rounds: int) -> dict[str, Any]:
    """Everything that `parts` name, with the commit and the machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True
    ).stdout.strip()
    results: dict[str, Any] = {
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[2], 1),
    }
    if "bits" in parts:
        results["bits"] = measure_bits(checkout)
    if "compile" in parts:
        results["compile"] = measure_compile(checkout)
    if "step" in parts:
        results["step"] = measure_step(checkout, rounds)
    return results


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The numbers and texts of a measurement by their path."""
    if not isinstance(value, dict):
        return {path: value}
    return {
        name: number
        for key, inner in value.items()
        for name, number in flat(inner, f"{path}{key}, ").items()
    }


def comparison(before: dict[str, Any], after: dict[str, Any]) -> str:
    """A table of what stands in either measurement, with the ratio of numbers."""
    old, new, rows = flat(before), flat(after), []
    for path in dict.fromkeys([*old, *new]):
        if path.startswith("note"):
            continue
        a, b = old.get(path), new.get(path)
        numbers = isinstance(a, int | float) and isinstance(b, int | float) and bool(a)
        rows.append([path.rstrip(", "), a, b, f"{b / a:.2f}" if numbers else ""])  # type: ignore[operator]
    return tabulate(rows, ("", "before", "after", "after / before"), disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("baseline.json"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="what to measure (default: this checkout)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument(
        "--rounds", type=int, default=25, help="of vs_torch.py (default: %(default)s)"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar="FILE",
        help="print two measurements, and run nothing",
    )
    options = parser.parse_args()
    if options.compare:
        print(comparison(*(json.loads(file.read_text()) for file in options.compare)))
        return
    earlier = json.loads(options.output.read_text()) if options.output.exists() else {}
    results = earlier | measure(options.checkout.resolve(), options.parts, options.rounds)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(options.output.read_text())


if __name__ == "__main__":
    main()
