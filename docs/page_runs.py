"""Runs all commands and snippets of README, CONTRIBUTING and docs/, each page in a fresh clone.

    python -m docs.page_runs [docs/faq.md ...]

A command that takes more than five minutes is only begun: it may not fail in its first seconds.
A Python block with the mark `{file=NAME}` is written into the folder; the other blocks of a page
are one script, in one process (`{run}`, the front page), or with the names of `docs/page_names.py`
given beforehand.
"""

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

from tests.support.ports import free_port

ROOT = Path(__file__).parents[1]
DOCS = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
PAGES = ("README.md", "CONTRIBUTING.md", *DOCS)
FENCE = re.compile(r"^```(\w*)(?: \{(.*?)\})?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = r"(?:\w+=\S+; )?(?:\.venv/bin/)?(?:python3?|torchrun|pip|pytest|mkdocs|ruff|mypy)"
SPAN = re.compile(rf"(?<!`)`({PROGRAM} [^`]+|examples/[\w/]+\.py -[^`]+)`(?!`)")
FRONT_PAGE = "docs/index.md"  # all its Python is one script
INSTALLS = re.compile(r"^.*pip install [^&;]*(?:&&|;) ")  # what comes behind it runs without
MENTION = re.compile(r"python -m zbcompile[. ]\w+")  # names a tool
PLACEHOLDERS = {
    **{"TARGET": "examples/targets.py:gpt", "DIR": "checkpoints", "NAME": "zb-h1"},
    **{"FILE": "file.csv", "COMMAND": "true"},
}
TOOLS = ("pytest", "mkdocs", "ruff", "mypy")
RECORDED = ROOT / "tests" / "golden" / "recorded_gpt.json"  # a step.json of the target
NETWORK = "installs from a network"
NOT_RUN = {  # by a part of the command, which ends with "$"
    **dict.fromkeys(("pip install", "python -m build", "newcomer.py"), NETWORK),
    "HOST": "needs several machines",
    "gpu_hour.py": "needs a GPU",
    "page_runs": "runs the others",
    "mkdocs serve": "a server, which does not end",
}
LONG = re.compile(  # takes more than five minutes on two cores
    r"pytest|_sweep|baseline|(?:published_gpts|vs_torch|promise|inductor|split_tax)\.py|overlap_tp\.py$"
)
LIMIT, BEGUN = 300.0, 20.0  # seconds that a command, and a long one, may take
RANKS = {"composition": 8, "optimizer": 4, "training": 4, "checkpoints": 1, "programs": 1}
RANKS |= {"schedules": 1}  # processes that run a page's snippets, if not two
SCRIPT = """
import sys, traceback
names, before, failed = {"__name__": "__main__"}, {}, False
if with_names:
    from page_names import BEFORE as before, names_of
    names = names_of(page)
for line, text in blocks:
    try:
        for part, prepare in before.items():
            if part in text:
                prepare(names)
        exec(compile("\\n" * (line - 1) + text, page, "exec"), names)
    except Exception as error:
        print(f"--- {page}:{line}", file=sys.stderr)
        traceback.print_exc()
        failed |= getattr(error, "name", None) != "lightning"  # which need not be installed
sys.exit(int(failed))
"""


@dataclass(frozen=True)
class Command:
    line: int
    text: str

    @property
    def left_out(self) -> str | None:
        """Why it is not run, None if it is."""
        return next((reason for part, reason in NOT_RUN.items() if part in f"{self.shell}$"), None)

    @property
    def shell(self) -> str:
        text = re.sub(r" \[--[^]]*\]", "", INSTALLS.sub("", self.text))
        text = re.sub(rf"\b(?:{'|'.join(PLACEHOLDERS)})\b", lambda at: PLACEHOLDERS[at[0]], text)
        if text.startswith("examples/"):
            return f"python {text}"
        return f"{text} --help" if MENTION.fullmatch(text) else text


@dataclass(frozen=True)
class Snippet:
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
            snippets.append(Snippet(line, block, "run" in mark or page == FRONT_PAGE))
        elif language == "bash":
            commands += (Command(line, command) for command in _commands(block))
        elif prompts := re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            commands += (Command(line, prompt) for prompt in prompts)
    prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for span in SPAN.finditer(prose):
        commands.append(Command(prose[: span.start()].count("\n") + 1, " ".join(span[1].split())))
    return sorted(commands, key=lambda command: command.line), snippets, files


def _commands(block: str) -> Iterator[str]:
    """The block as a whole if it has processes in the background, else line by line."""
    if re.search(r"&$", block, re.MULTILINE):
        yield block
        return
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if command := re.sub(r"\s{2,}#.*| # .*", "", line).strip():
            yield command


def run_page(page: str, folder: Path) -> dict[str, bool]:
    """Runs what a page shows in `folder`. Returns the titles of all runs, and which went well."""
    commands, snippets, files = read(page)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    results = {}
    for with_names in (False, True):
        chosen = [part for part in snippets if part.in_page_script is not with_names]
        if chosen:
            ranks = RANKS.get(Path(page).stem, 2) if with_names else 1
            lines = ", ".join(str(part.line) for part in chosen)
            title = f"{page}: Python at line {lines}, in {ranks} process(es)"
            blocks = [(part.line, part.text) for part in chosen]
            script = f"page, with_names, blocks = {page!r}, {with_names}, {blocks!r}\n{SCRIPT}"
            (folder / "snippets_of_page.py").write_text(script, encoding="utf-8")
            shutil.copy(Path(__file__).with_name("page_names.py"), folder)
            start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [sys.executable, *start[: 4 * (ranks > 1)], "snippets_of_page.py"]
            results[title] = _run(command, folder, title, LIMIT)
    for item in {item.shell: item for item in commands if not item.left_out}.values():
        if "step.json" in item.shell:
            shutil.copy(RECORDED, folder / "step.json")
        title, long = f"{page}:{item.line}: {item.shell}", bool(LONG.search(item.shell))
        command = ["bash", "-euc", item.shell]
        results[title] = _run(command, folder, title, BEGUN if long else LIMIT, begun=long)
    return results


def _run(command: list[str], folder: Path, title: str, limit: float, begun: bool = False) -> bool:
    """Returns whether a command ended well, or, if `begun`, still ran after `limit` seconds."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RANK"))} | {
        "PATH": f"{folder}/.venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{ROOT}",
        **{"OMP_NUM_THREADS": "1", "PORT": str(free_port()), "HF_HUB_OFFLINE": "1"},
    }
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        options = {"stdout": said, "stderr": said, "start_new_session": True}
        run = subprocess.Popen(command, cwd=folder, env=environment, **options)
        try:
            good = run.wait(limit) == 0
        except subprocess.TimeoutExpired:
            good = begun
        finally:  # with what it has started, also after Ctrl-C
            _end_group(run)
        verdict = "ok" if good else "FAILED"
        print(f"{verdict:6} {time.monotonic() - started:5.0f} s  {title}", flush=True)
        if not good:
            said.seek(0)
            print(re.split(r"(?m)^[WE]\d{4} .*elastic", said.read())[0][-3000:], flush=True)
    return good


def _end_group(run: subprocess.Popen[bytes]) -> None:
    """Ends a command's processes. torchrun, if asked, ends its workers in other sessions."""
    for ask in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, ask)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(timeout=20)


def _clone(folder: Path) -> None:
    """The checkout, with this interpreter and its programs under .venv/bin."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    modules = {"python": "", "torchrun": "-m torch.distributed.run"}
    for name, start in (modules | {n: f"-m {n}" for n in TOOLS}).items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n')
        (programs / name).chmod(0o755)


def main(pages: list[str]) -> int:
    results = {}
    for page in pages or PAGES:
        with tempfile.TemporaryDirectory() as root:
            _clone(Path(root) / "zbcompile")
            results |= run_page(page, Path(root) / "zbcompile")
    failures = [title for title, good in results.items() if not good]
    print(f"{len(results)} runs, {len(failures)} failed", *failures, sep="\n  ")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
