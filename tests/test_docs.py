"""README, CONTRIBUTING and docs/: what they name exists, what they show runs, and the site builds.

`python -m docs.page_runs` runs all of it, as users do.
"""

import contextlib
import doctest
import html
import io
import os
import re
import subprocess
import sys
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

import zbcompile
from docs import page_runs
from tests.support.warm_torchrun import warm_torchrun
from zbcompile import schedules

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
FOLDERS = ("schedules", "passes", "zbcompile")
TEXTS = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}

PATH = re.compile(
    r"(?<![\w/.-])(?:schedules|passes|zbcompile|tests|examples|docs)/[\w/.-]*\w(?:/(?!\w))?"
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
MODULE = re.compile(r"-m ((?:zbcompile|tests)(?:\.\w+)*)")
NAME = re.compile(r"(?<![\w./@-])zbcompile\.([A-Za-z_][\w.]*\w)")
OF_SCHEDULES = re.compile(r"(?<![\w./])(schedules\.[A-Za-z_]\w*)(?=\()")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_page_names_exists(document: Path) -> None:
    """Paths, files, links, modules, public names and tests."""
    text, tops = TEXTS[document], (*FOLDERS, "tests", "examples")
    missing = {path for path in PATH.findall(text) if not (ROOT / path).exists()}
    files = {file.name for top in tops for file in (ROOT / top).rglob("*.py")}
    missing |= set(re.findall(r"`(\w+\.py)`", text)) - files
    missing |= {link for link in LINK.findall(text) if not (document.parent / link).exists()}
    for name in MODULE.findall(text):
        ends = (f"{name.replace('.', '/')}{end}" for end in (".py", "/__main__.py"))
        missing |= set() if any((ROOT / path).is_file() for path in ends) else {name}
    names = (*NAME.findall(text), *OF_SCHEDULES.findall(text))
    missing |= {name for name in names if not exists(name)}
    tests = {test: (ROOT / file).read_text(encoding="utf-8") for file, test in TEST.findall(text)}
    missing |= {test for test, source in tests.items() if f"\ndef {test}(" not in source}
    assert not missing


def exists(name: str) -> bool:
    """Returns True if `zbcompile.NAME` is public, or a module."""
    first, _, rest = name.partition(".")
    if first == "schedules" and rest:
        return hasattr(reduce(getattr, rest.split(".")[:-1], schedules), rest.split(".")[-1])
    if first == "integrations":
        names = (ROOT / "zbcompile/integrations/__init__.py").read_text(encoding="utf-8")
        return rest in ("", "__all__") or f'"{rest}"' in names
    module = ROOT / "zbcompile" / f"{name.replace('.', '/')}.py"
    return first in dir(zbcompile) or module.is_file()


def test_answers_name_tests_and_pages_and_rooms_are_listed() -> None:
    answers = re.split(r"^## ", TEXTS[ROOT / "docs" / "faq.md"], flags=re.M)[1:]
    assert not [answer.partition("\n")[0] for answer in answers if not TEST.search(answer)]
    assert {f"docs/{page.name}" for page in PAGES} <= set(LINK.findall(TEXTS[ROOT / "README.md"]))
    architecture = TEXTS[ROOT / "docs" / "architecture.md"]
    for top in FOLDERS:
        folders = {path.parent.name for path in (ROOT / top).glob("*/__init__.py")}
        assert {*re.findall(rf"^\| `{top}/(\w+)/` \|", architecture, re.M)} == folders - {*FOLDERS}


FILES = [
    file
    for top in ("passes", "zbcompile")
    for file in sorted((ROOT / top).rglob("*.py"))
    if re.search(r">>> (?!.*\+SKIP)", file.read_text(encoding="utf-8"))
]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_examples_of_docstrings(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doctests of schedules run in tests/schedules."""
    monkeypatch.chdir(tmp_path)
    parts = file.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts if parts[0] == "zbcompile" else ("zbcompile", *parts))
    assert doctest.testmod(import_module(module)).failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/training.md", "docs/checkpoints.md"])
def test_the_script_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for part in page_runs.read(page)[1]:
        if part.in_page_script:
            exec(compile("\n" * (part.line - 1) + part.text, page, "exec"), names)


@pytest.mark.slow
def test_torchrun_prints_the_loss_of_one_process(tmp_path: Path) -> None:
    """The first script of README: to the last bit, as README says."""
    script = tmp_path / "first.py"
    script.write_text(page_runs.read("README.md")[2]["first.py"].replace("range(20)", "range(3)"))
    with contextlib.redirect_stdout(io.StringIO()) as alone:
        exec(compile(script.read_text(), script, "exec"), {"__name__": "__main__"})
    command = warm_torchrun("import zbcompile", "--standalone", "--nproc-per-node=2", str(script))
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stdout) == (0, alone.getvalue()), run.stderr
    assert float(run.stdout) > 0


@pytest.mark.beyond_sample
@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/index.md", "docs/faults.md", "docs/huggingface.md"])
def test_the_commands_of_a_page_run(page: str) -> None:
    assert page_runs.main([page]) == 0


def test_what_page_runs_reads() -> None:
    commands = [command for page in page_runs.PAGES for command in page_runs.read(page)[0]]
    unused = [
        part for part in page_runs.NOT_RUN if not any(part in f"{c.shell}$" for c in commands)
    ]
    assert (len(commands) > 70, unused) == (True, [])
    assert {
        "python first.py",
        "torchrun --standalone --nproc-per-node 2 train.py",
        "python -m zbcompile.compile --help",  # the name of a tool alone
        ".venv/bin/python examples/train_gpt.py",  # what stands behind an installation
    } <= {command.shell for command in commands if not command.left_out}


PAGE = """
```python {run file=shown.py}
assert __name__ == "__main__"
```

```python {run}
names = 1
```

```python {run}
assert names == 2, "a snippet that is wrong"
```

```bash
python shown.py       # a comment
python -c \\
    'raise SystemExit(3)'
```

Call `python -c pass`, or `pip install 'zbcompile[huggingface]'`.
"""


def test_page_runs_tells_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(page_runs, "ROOT", tmp_path)
    assert page_runs.run_page("page.md", tmp_path) == {
        "page.md: Python at line 7, 11, in 1 process(es)": False,
        "page.md:15: python shown.py": True,
        "page.md:15: python -c 'raise SystemExit(3)'": False,
        "page.md:20: python -c pass": True,
    }
    assert "a snippet that is wrong" in capfd.readouterr().out


AS_TEXT = re.compile(
    r"```.*|>>> .*|\{(?:run|file=.*)\}|^\s*(?:[*-]|\d+\.) \S.*|\|---.*|.*\]\([^)]*\)|.*::$"
    r"|# doctest:.*|`[^`]+`|\*\*\w.*",
    re.M,
)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links lead somewhere; no Markdown is left as text, or an example taken for a quote."""
    pytest.importorskip("mkdocstrings_handlers.python", reason="needs pip install -e '.[dev]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    options = {"cwd": ROOT, "env": ENVIRONMENT, "capture_output": True, "timeout": 300}
    built = subprocess.run(command, text=True, **options)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    for path in tmp_path.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        prose = re.sub(r"<(pre|code|script|style)\b.*?</\1>|<[^>]+>", "", text, flags=re.S)
        assert not AS_TEXT.findall(html.unescape(prose)), path.name
        assert "<blockquote" not in text, path.name
        links = re.findall(r'(?:href|src)="([^"#?:]+)(?:[#?][^"]*)?"', text)
        tops = {link: tmp_path if link[0] == "/" else path.parent for link in links}
        assert not [link for link, top in tops.items() if not (top / link.lstrip("/")).exists()]
    for name in schedules.names():
        page = (tmp_path / "schedules" / f"{name}.html").read_text(encoding="utf-8")
        assert not [part for part in (f'src="{name}.svg"', 'id="closed-form"') if part not in page]
    pages = (tmp_path / "reference.html").read_text(encoding="utf-8")
    assert 'id="zbcompile.pipeline"' in pages
    assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="https?:', pages), "from elsewhere"
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert '<span class="kn">import</span>' in front
    assert 'href="code.css"' in front
    assert ".codehilite .kn { color" in (tmp_path / "code.css").read_text(encoding="utf-8")
