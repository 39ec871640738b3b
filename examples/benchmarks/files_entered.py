"""How many of this package's files one compile, one warm step, one evaluation and one load enter,
in one process.

    python examples/benchmarks/files_entered.py [--list]

A reader of the code has to follow every hop between files.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import zbcompile

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, next_byte_loss

ROOMS = ("zbcompile", "passes", "schedules")


def files_of(call: Callable[[], Any]) -> list[str]:
    """The files of the package whose functions run during `call`."""
    root = Path(str(zbcompile.__file__)).resolve().parent.parent
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    paths = [Path(name).resolve() for name in found if not name.startswith("<")]
    inside = [path.relative_to(root) for path in paths if path.is_relative_to(root)]
    return sorted(str(path) for path in inside if path.parts[0] in ROOMS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the files, too")
    request = parser.parse_args()
    torch.manual_seed(0)
    tokens = torch.randint(256, (4, 33))
    inputs, target = tokens[:, :-1], tokens[:, 1:].contiguous()
    model = GPT(layers=2, width=32, heads=2, length=32)
    pipe = zbcompile.pipeline(model, schedule="zb-v", ranks=2, microbatches=4, loss=next_byte_loss)
    with tempfile.TemporaryDirectory() as folder:
        calls: dict[str, Callable[[], Any]] = {
            "compile": lambda: pipe.compile(inputs, target=target),
            "first step": lambda: pipe.step(inputs, target=target),
            "warm step": lambda: pipe.step(inputs, target=target),
            "evaluation": lambda: pipe.eval(inputs),
            "warm evaluation": lambda: pipe.eval(inputs),
            "save": lambda: pipe.program.save(folder),
            "load": lambda: zbcompile.load(folder, state_dict=pipe.state_dict(full=True)),
        }
        for name, call in calls.items():
            files = files_of(call)
            print(f"{name:16} {len(files):3} files")
            if request.list:
                print("\n".join(f"    {file}" for file in files))


if __name__ == "__main__":
    main()
