"""Runs an ordered list of items in the first hour with a GPU, each with a limit of time, and writes
one report.

    python examples/gpu_hour.py --list
    python examples/gpu_hour.py --output report            # report/report.json, report/index.html, and a log per item
    python examples/gpu_hour.py --only tests,train --minutes 10
    python examples/gpu_hour.py --pretended --minutes 10   # without a GPU: does every item run?

Every item is a process of its own, with those that it starts; at its limit all are ended, and the
next item begins. Items that need more GPUs than there are, or more minutes than are left, are
listed as not run. With --pretended the GPU is that of tests/support/pretended_gpu, whose times mean
nothing: items are made short, and the report says so on top.
"""

import argparse
import html
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
GRACE = 10.0  # seconds between the request to end and the end
TAIL_LINES = 60  # lines of an item's output in the report
NOT_RUN = "not run"


@dataclass(frozen=True)
class Item:
    """`arguments` are those of Python; with a pretended GPU `shorter` ones are appended. `{output}`
    is the report's folder. `seconds` are its limit."""

    name: str
    shows: str
    seconds: int
    arguments: tuple[str, ...]
    shorter: tuple[str, ...] = ()
    gpus: int = 1


@dataclass(frozen=True)
class Result:
    """How an item ended ("passed", "failed", "over time" or "not run"), after how many seconds, and
    its last lines."""

    name: str
    shows: str
    command: str
    ended: str
    seconds: float
    output: str


TRAIN = ("examples/train_gpt.py", "--device", "cuda", "--steps", "40", "--layers", "8")
SMALL = (
    "--steps",
    "12",
    "--layers",
    "4",
    "--width",
    "32",
    "--sequence-length",
    "16",
    "--batch",
    "8",
)
BENCHMARKS = "examples/benchmarks"
GPU_TESTS = (
    "tests/zbcompile/engine/test_cuda.py",
    "tests/zbcompile/engine/test_cuda_composition.py",
    "tests/zbcompile/backends/test_cuda_graphs.py",
)
ITEMS = (
    Item("machine", "what the machine has", 60, ("-m", "torch.utils.collect_env")),
    Item(
        "tests",
        "the tests that need a GPU",
        600,
        ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *GPU_TESTS),
    ),
    Item("train", "steps in exact mode against eager", 120, (*TRAIN, "--verify"), SMALL),
    Item(
        "dropout",
        "the same, and dropout's masks",
        120,
        (*TRAIN, "--verify", "--dropout", "0.1"),
        SMALL,
    ),
    Item(
        "bfloat16",
        "bfloat16, and with it flash attention",
        120,
        (*TRAIN, "--verify", "--dtype", "bfloat16"),
        SMALL,
    ),
    Item(
        "inductor",
        "passes compiled by inductor",
        300,
        (*TRAIN, "--backend", "inductor"),
        (*SMALL, "--backend", "fx"),
    ),
    Item(
        "cuda-graphs",
        "passes recorded as CUDA graphs",
        120,
        (*TRAIN, "--verify", "--cuda-graphs"),
        SMALL,
    ),
    Item(
        "waits",
        "whether the host waits in a step",
        180,
        (f"{BENCHMARKS}/host_waits.py",),
        ("--small",),
    ),
    Item("nccl", "NCCL alone, with one rank", 60, (f"{BENCHMARKS}/nccl_alone.py",)),
    Item(
        *("split-tax", "what splitting a backward costs", 300),
        (
            f"{BENCHMARKS}/split_tax.py",
            "--device",
            "cuda",
            "--dtype",
            "bfloat16",
            "--width",
            "2048",
            "--length",
            "1024",
        ),
        (
            "--width",
            "32",
            "--length",
            "16",
            "--rounds",
            "1",
            "--models",
            "gpt",
            "--dtype",
            "float32",
        ),
    ),
    Item(
        *("loop-overhead", "the host's microseconds per action", 180),
        (f"{BENCHMARKS}/loop_overhead.py", "--device", "cuda"),
        ("--rounds", "2", "--schedules", "zb-h1"),
    ),
    Item(
        *("loop-graphs", "the same with CUDA graphs", 180),
        (f"{BENCHMARKS}/loop_overhead.py", "--device", "cuda", "--cuda-graphs"),
        ("--rounds", "2", "--schedules", "zb-h1"),
    ),
    Item(
        *("one-gpu", "two processes on one GPU, messages staged through the host", 120),
        (*TORCHRUN, f"{BENCHMARKS}/one_gpu.py", *TRAIN[1:], "--verify"),
        SMALL,
    ),
    Item("two", "two processes over NCCL", 120, (*TORCHRUN, *TRAIN, "--verify"), SMALL, gpus=2),
    Item(
        *("vs-torch", "steps beside those of torch's schedules", 300),
        (*TORCHRUN, f"{BENCHMARKS}/vs_torch.py", "--device", "cuda"),
        ("--rounds", "1", "--ours", "zb-v", "--torch", "ScheduleZBVZeroBubble"),
        gpus=2,
    ),
)


def run_item(
    item: Item, output: Path, pretended: bool, seconds: float, environment: Mapping[str, str]
) -> Result:
    """Runs an item for at most `seconds` and writes its output into a log."""
    arguments = (*item.arguments, *(item.shorter if pretended else ()))
    command = [sys.executable, *(argument.format(output=output) for argument in arguments)]
    log, began = output / f"{item.name}.log", time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = "failed" if process.wait(seconds) else "passed"
        except subprocess.TimeoutExpired:
            ended = "over time"
        finally:
            end_group(process)
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return Result(
        item.name,
        item.shows,
        " ".join(["python", *command[1:]]),
        ended,
        time.monotonic() - began,
        "\n".join(lines),
    )


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it has started: asked to first, and whatever is left after GRACE
    seconds."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def run_all(items: Sequence[Item], options: argparse.Namespace) -> list[Result]:
    """The items in turn, a line of progress for each; the report is written after each."""
    environment = surroundings(options.pretended)
    gpus = 2 if options.pretended else torch.cuda.device_count()
    end, results = time.monotonic() + 60 * options.minutes, list[Result]()
    for number, item in enumerate(items, 1):
        left = end - time.monotonic()
        print(f"{number:2} of {len(items)}  {item.name:14} ", end="", flush=True)
        if item.gpus > gpus or left < 1:
            why = f"needs {item.gpus} GPUs, found {gpus}" if item.gpus > gpus else "no time left"
            results.append(Result(item.name, item.shows, "", NOT_RUN, 0.0, why))
        else:
            limit = min(item.seconds, left)
            results.append(run_item(item, options.output, options.pretended, limit, environment))
        print(f"{results[-1].ended:10} {results[-1].seconds:6.0f} s   {item.shows}", flush=True)
        write_report(results, options)
    return results


def surroundings(pretended: bool) -> dict[str, str]:
    """The environment of items."""
    sys.path.insert(0, str(ROOT))
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if not pretended:
        return {**os.environ, "PYTHONPATH": paths}
    from tests.support.pretended_gpu.build import built, environment, why_not

    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    return environment(built(), devices=2)


def machine(pretended: bool) -> dict[str, str]:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    gpus = (
        "PRETENDED: the figures say nothing of any GPU" if pretended else ", ".join(names) or "none"
    )
    return {
        "GPUs": gpus,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "host": platform.node(),
    }


def write_report(results: Sequence[Result], options: argparse.Namespace) -> None:
    about = machine(options.pretended)
    data = {
        "pretended": options.pretended,
        "machine": about,
        "items": [asdict(result) for result in results],
    }
    (options.output / "report.json").write_text(json.dumps(data, indent=2))
    (options.output / "index.html").write_text(page(about, results))


def page(about: Mapping[str, str], results: Sequence[Result]) -> str:
    said = "".join(
        f"<dt>{html.escape(name)}<dd>{html.escape(value)}" for name, value in about.items()
    )
    parts = "".join(
        f"<details{' open' * (result.ended != 'passed')}><summary><b>{result.name}</b>"
        f" {result.ended}, "
        f"{result.seconds:.0f} s:"
        f" {html.escape(result.shows)}</summary><code>{html.escape(result.command)}</code>"
        f"<pre>{html.escape(result.output)}</pre></details>"
        for result in results
    )
    style = (
        "body{font:15px sans-serif;max-width:70em;margin:2em"
        " auto}pre{background:#eee;padding:1em;overflow:auto}"
    )
    return (
        "<!doctype html><meta charset=utf-8><title>GPU"
        f" hour</title><style>{style}</style><dl>{said}</dl>{parts}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the items with their limits")
    parser.add_argument("--only", metavar="NAME,NAME", help="these items, in the order of the list")
    parser.add_argument(
        "--minutes", type=float, default=60, help="for all items (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("gpu-hour"), help="of the report (default: %(default)s)"
    )
    parser.add_argument("--pretended", action="store_true", help="on a pretended GPU")
    options = parser.parse_args(arguments)
    names = [item.name for item in ITEMS]
    selected = options.only.split(",") if options.only else names
    if unknown := [name for name in selected if name not in names]:
        parser.error(f"--only {','.join(unknown)}: expected {', '.join(names)}")
    if not (options.list or options.pretended or torch.cuda.is_available()):
        parser.error(
            "torch finds no GPU on this machine; --pretended runs the items on a pretended one"
        )
    options.items = [item for item in ITEMS if item.name in selected]
    return options


def main() -> int:
    options = parse()
    if options.list:
        print(
            "\n".join(f"{item.name:14} {item.seconds:4} s   {item.shows}" for item in options.items)
        )
        return 0
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    results = run_all(options.items, options)
    print(options.output / "index.html")
    return int(any(result.ended not in ("passed", NOT_RUN) for result in results))


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # the item at hand ends as well
    sys.exit(main())
