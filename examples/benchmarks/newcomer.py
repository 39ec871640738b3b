"""From nothing to a trained model of the Hub by the first page of the site alone: commands,
seconds, lines of output.

`python examples/benchmarks/newcomer.py` builds the wheel, makes a virtual environment elsewhere,
and then types what docs/index.md says. `--constraint 'torch==2.13.0+cpu'` has pip install that
instead of the newest torch.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)(?: \{(.*?)\})?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(folder: Path) -> list[str]:
    """Writes the files of the first page, and returns its commands that need no checkout."""
    commands = []
    for language, mark, text in BLOCK.findall(
        (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    ):
        if file := re.search(r"file=(\S+)", mark):
            (folder / file[1]).write_text(text, encoding="utf-8")
        elif language == "bash" and "examples/" not in text:  # those are for a checkout
            commands.append(text.strip())
    return commands


def timed(command: str, folder: Path, environment: dict[str, str]) -> None:
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    lines = (done.stdout + done.stderr).count("\n")
    print(f"{time.monotonic() - began:6.0f} s, {lines:4} lines  {command}", flush=True)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])


def main(constraint: str | None) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        wheel = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            root,
            str(ROOT),
        ]
        subprocess.run(wheel, check=True)
        (folder / "constraint.txt").write_text(constraint or "", encoding="utf-8")
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {
            **os.environ,
            "PATH": path,
            "PIP_CONSTRAINT": str(folder / "constraint.txt"),
            "PYTHONPATH": "",
        }
        commands = page(folder)
        for command in commands:
            timed(command, folder, environment)
        read = "from transformers import AutoModelForCausalLM as M; M.from_pretrained('trained')"
        timed(f'python -c "{read}"', folder, environment)
        print(
            f"{len(commands)} commands and {len(list(folder.glob('*.py')))} file; the last line is"
            " this script's check"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--constraint", help="such as 'torch==2.13.0+cpu'")
    main(parser.parse_args().constraint)
