"""Runs every command and every snippet of README, CONTRIBUTING and docs/, as the pages show them: in clones, or
next to a wheel.

    python -m tests.support.page_runs                          each page in a fresh clone, with this interpreter
    python -m tests.support.page_runs --wheel ENV/bin/python   in empty folders, by an environment that has the wheel
    python -m tests.support.page_runs --list docs/faq.md          what would run, and why the others do not

A command that takes more than five minutes is only begun: it may not fail in its first seconds.

A Python block with the mark `{file=NAME}` is written into the folder; the other blocks of a page
are one script, in one process (`{run}`, the front page), or with the names of
`tests/support/page_names.py` given beforehand.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import page_names
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
)
FENCE = re.compile(r"^```(\w*)(?: \{(.*?)\})?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = r"(?:\w+=\S+; )?(?:\.venv/bin/)?(?:python3?|torchrun|pip|pytest|mkdocs|ruff|mypy)"
SPAN = re.compile(rf"(?<!`)`({PROGRAM} [^`]+|examples/[\w/]+\.py -[^`]+)`(?!`)")
FRONT_PAGE = "docs/index.md"  # all its Python is one script
INSTALLS = re.compile(r"^.*pip install [^&;]*(?:&&|;) ")  # what comes behind it runs without
MENTION = re.compile(r"python -m zbcompile[. ]\w+")  # names a tool
PLACEHOLDERS = {
    "TARGET": "examples/targets.py:gpt",
    "DIR": "checkpoints",
    "NAME": "zb-h1",
    "FILE": "file.csv",
    "COMMAND": "true",
}
RECORDED = ROOT / "tests" / "golden" / "recorded_gpt.json"  # a step.json of the target

NETWORK = "installs from a network"
NOT_RUN = {  # by a part of the command, which ends with "$"
    "pip install": NETWORK,
    "python -m build": NETWORK,
    "newcomer.py": NETWORK,
    "HOST": "needs several machines",
    "gpu_hour.py": "needs a GPU",
    "page_runs": "runs the others",
    "mkdocs serve": "a server, which does not end",
}
LONG = re.compile(  # takes more than five minutes on two cores
    r"pytest|_sweep|tests\.support\.(?:damage|killed_saves|hostile_programs|soak)"
    r"|baseline|(?:published_gpts|vs_torch|promise|inductor|split_tax)\.py|overlap_tp\.py$"
)
RANKS = {  # processes that run a page's snippets, if not two
    "docs/checkpoints.md": 1,
    "docs/composition.md": 8,
    "docs/optimizer.md": 4,
    "docs/programs.md": 1,
    "docs/schedules.md": 1,
    "docs/training.md": 4,
}


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    text: str

    @property
    def left_out(self) -> str | None:
        """Why it is not run, None if it is."""
        return next((reason for part, reason in NOT_RUN.items() if part in f"{self.shell}$"), None)

    @property
    def long(self) -> bool:
        return LONG.search(self.shell) is not None

    @property
    def needs_checkout(self) -> bool:
        makes_it = self.page == "README.md" and "DIR" in self.text  # by a target in examples/
        return makes_it or bool(
            re.search(r"examples/|tests[/.]|docs/|\.venv/|pytest|mkdocs|ruff|mypy", self.shell)
        )

    @property
    def shell(self) -> str:
        text = re.sub(r" \[--[^]]*\]", "", INSTALLS.sub("", self.text))
        text = re.sub(
            rf"\b(?:{'|'.join(PLACEHOLDERS)})\b", lambda result: PLACEHOLDERS[result[0]], text
        )
        if text.startswith("examples/"):
            return f"python {text}"
        return f"{text} --help" if MENTION.fullmatch(text) else text


@dataclass(frozen=True)
class Snippet:
    page: str
    line: int
    text: str
    in_page_script: bool  # a part of the page's own script


def read(page: str) -> tuple[list[Command], list[Snippet], dict[str, str]]:
    """A page's commands, its snippets, and the files that it shows."""
    text = (ROOT / page).read_text(encoding="utf-8")
    commands, snippets, files = [], [], {}
    for fence in FENCE.finditer(text):
        language, mark, block = fence[1], fence[2] or "", fence[3]
        line = text[: fence.start()].count("\n") + 2
        if file := re.search(r"file=(\S+)", mark):
            files[file[1]] = block
        elif language == "python":
            snippets.append(Snippet(page, line, block, "run" in mark or page == FRONT_PAGE))
        elif language == "bash":
            commands += (Command(page, line, command) for command in _commands(block))
        elif prompts := re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            commands += (Command(page, line, prompt) for prompt in prompts)
    prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    spans = (
        (prose[: span.start()].count("\n") + 1, " ".join(span[1].split()))
        for span in SPAN.finditer(prose)
    )
    commands += (Command(page, line, item) for line, item in spans)
    return sorted(commands, key=lambda command: command.line), snippets, files


def _commands(block: str) -> Iterator[str]:
    """The block as a whole if it has processes in the background, else line by line."""
    if re.search(r"&$", block, re.MULTILINE):
        yield block
        return
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if command := re.sub(r"\s{2,}#.*| # .*", "", line).strip():
            yield command


class Runner:
    """Runs pages with one interpreter; `failures` has what went wrong so far."""

    def __init__(
        self, interpreter: Path, wheel: bool, limit: float, taste: float, only: str = ""
    ) -> None:
        self.interpreter, self.wheel, self.limit, self.taste = interpreter, wheel, limit, taste
        self.only = re.compile(only)
        self.ran, self.failures = 0, list[str]()

    def page(self, page: str) -> None:
        commands, snippets, files = read(page)
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root) / "zbcompile"
            self._furnish(folder)
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")
            self._snippets(
                page,
                [snippet for snippet in snippets if snippet.in_page_script],
                folder,
                ranks=1,
                with_names=False,
            )
            self._snippets(
                page,
                [snippet for snippet in snippets if not snippet.in_page_script],
                folder,
                ranks=RANKS.get(page, 2),
                with_names=True,
            )
            for command in {command.shell: command for command in commands}.values():
                if command.left_out or (self.wheel and command.needs_checkout):
                    continue
                if "step.json" in command.shell:
                    shutil.copy(RECORDED, folder / "step.json")
                title = f"{page}:{command.line}: {command.shell}"
                self._run(
                    ["bash", "-euc", command.shell],
                    folder,
                    title,
                    self.taste if command.long else None,
                )

    def _furnish(self, folder: Path) -> None:
        if self.wheel:
            folder.mkdir()
            return
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        (folder / ".venv" / "bin").mkdir(parents=True)
        for program in ("python", "torchrun", "pytest", "mkdocs", "ruff", "mypy"):
            start = (
                ""
                if program == "python"
                else f"-m {'torch.distributed.run' if program == 'torchrun' else program}"
            )
            file = folder / ".venv" / "bin" / program
            file.write_text(f'#!/bin/sh\nexec {self.interpreter} {start} "$@"\n', encoding="utf-8")
            file.chmod(0o755)

    def _snippets(
        self, page: str, snippets: list[Snippet], folder: Path, ranks: int, with_names: bool
    ) -> None:
        if not snippets:
            return
        source = Path(page_names.__file__).read_text(encoding="utf-8")
        (folder / "page_names.py").write_text(source, encoding="utf-8")
        blocks = [(snippet.line, snippet.text) for snippet in snippets]
        script = f"import page_names\npage_names.run({page!r}, {blocks!r}, {with_names})\n"
        (folder / "snippets_of_page.py").write_text(script, encoding="utf-8")
        start = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            if ranks > 1
            else []
        )
        lines = ", ".join(str(snippet.line) for snippet in snippets)
        command = [str(self.interpreter), *start, "snippets_of_page.py"]
        self._run(command, folder, f"{page}: Python at line {lines}, in {ranks} process(es)")

    def _run(
        self, command: list[str], folder: Path, title: str, taste: float | None = None
    ) -> None:
        """A command that is only tasted may still run after `taste` seconds."""
        if not self.only.search(title):
            return
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as said:
            run = subprocess.Popen(
                command,
                cwd=folder,
                env=self._environment(folder),
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                status = "ok" if run.wait(taste or self.limit) == 0 else "FAILED"
            except subprocess.TimeoutExpired:
                status = "begins" if taste else "LONG"
            finally:  # with what it has started, also after Ctrl-C
                end_group(run)
            self.ran += 1
            print(f"{status:6} {time.monotonic() - began:5.0f} s  {title}", flush=True)
            if status not in ("ok", "begins"):
                self.failures.append(title)
                said.seek(0)
                output = re.split(
                    r"^[WE]\d{4} .*elastic", said.read(), maxsplit=1, flags=re.MULTILINE
                )[0]
                print(output[-3000:], flush=True)

    def _environment(self, folder: Path) -> dict[str, str]:
        path = ":".join(
            map(str, (folder / ".venv" / "bin", self.interpreter.parent, os.environ["PATH"]))
        )
        names = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "RANK"))
        }
        names |= {
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            "PORT": str(free_port()),
            "HF_HUB_OFFLINE": "1",
        }
        return names if self.wheel else names | {"PYTHONPATH": str(folder)}


def end_group(run: subprocess.Popen[bytes]) -> None:
    """End a command's processes: torchrun ends its workers, which are in sessions of their own, if
    asked to."""
    for ask in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, ask)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(timeout=20)


def listing(pages: list[str]) -> None:
    for page in pages:
        commands, snippets, files = read(page)
        for name in files:
            print(f"{page}: file {name}")
        for snippet in snippets:
            print(
                f"{page}:{snippet.line}: Python, {'script of the page' if snippet.in_page_script else 'with names given'}"
            )
        for command in commands:
            print(
                f"{page}:{command.line}:"
                f" {command.left_out or ('begun' if command.long else 'run')}: {command.shell}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", default=PAGES, help="such as README.md (default: all)")
    parser.add_argument(
        "--wheel", type=Path, metavar="PYTHON", help="an interpreter that has the wheel"
    )
    parser.add_argument(
        "--limit", type=float, default=300, help="seconds for each command (default: %(default)g)"
    )
    parser.add_argument(
        "--taste", type=float, default=20, help="seconds for each long one (default: %(default)g)"
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="runs only what has this in its line of output"
    )
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.list:
        listing(options.pages)
        return 0
    interpreter, wheel = options.wheel or Path(sys.executable), options.wheel is not None
    runner = Runner(interpreter, wheel, options.limit, options.taste, options.only)
    for page in options.pages:
        runner.page(page)
    print(f"{runner.ran} runs, {len(runner.failures)} failed", *runner.failures, sep="\n  ")
    return bool(runner.failures)


if __name__ == "__main__":
    sys.exit(main())
