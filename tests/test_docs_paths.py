"""Every file, module and public name that README.md and docs/ mention exists."""

import re
from functools import reduce
from pathlib import Path

import pytest

import zbcompile
from zbcompile import schedules

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES)
FOLDERS = ("schedules", "passes", "zbcompile")

PATH = re.compile(
    r"(?<![\w/.-])(?:schedules|passes|zbcompile|tests|examples|docs)/[\w/.-]*\w(?:/(?!\w))?"
)
FILE = re.compile(r"`(\w+\.py)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
MODULE = re.compile(r"-m ((?:zbcompile|tests)(?:\.\w+)*)")
NAME = re.compile(r"(?<![\w./@-])zbcompile((?:\.[A-Za-z_]\w*)+)")
OF_SCHEDULES = re.compile(r"(?<![\w./])schedules\.([A-Za-z_]\w*)(?=\()")


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.name)
def document(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_paths_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = {path for path in PATH.findall(text) if not (ROOT / path).exists()}
    python_files = {
        file.name
        for folder in (*FOLDERS, "tests", "examples")
        for file in (ROOT / folder).rglob("*.py")
    }
    missing |= set(FILE.findall(text)) - python_files
    assert not missing


def test_links_lead_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text(encoding="utf-8"))
    assert not {link for link in links if not (document.parent / link).exists()}


def test_modules_exist(document: Path) -> None:
    modules = {
        name.replace(".", "/") for name in MODULE.findall(document.read_text(encoding="utf-8"))
    }
    assert not {name for name in modules if not _runs(name)}


def _runs(name: str) -> bool:
    return (ROOT / f"{name}.py").is_file() or (ROOT / name / "__main__.py").is_file()


def test_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    names = {name[1:] for name in NAME.findall(text)} | {
        f"schedules.{name}" for name in OF_SCHEDULES.findall(text)
    }
    assert not {name for name in names if not _exists(name)}


def _exists(name: str) -> bool:
    """Returns True if `zbcompile.NAME` is public, or a module. Nothing that needs torch is imported."""
    if name.startswith("schedules."):
        try:
            return reduce(getattr, name.split(".")[1:], schedules) is not None
        except AttributeError:
            return False
    first, _, rest = name.partition(".")
    if first == "integrations":
        return rest in ("", "__all__") or f'"{rest}"' in (
            ROOT / "zbcompile" / first / "__init__.py"
        ).read_text(encoding="utf-8")
    file = ROOT / "zbcompile" / name.replace(".", "/")
    return name.split(".")[0] in dir(zbcompile) or file.with_suffix(".py").is_file()


@pytest.mark.parametrize("top", FOLDERS)
def test_rooms_are_described_in_the_order_of_their_imports(top: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    described = re.findall(rf"^\| `{top}/(\w+)/` \|", text, re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / top).glob("*/__init__.py")}
    assert set(described) == folders - {"passes", "schedules"}  # links beside zbcompile/


def test_every_page_is_linked() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in PAGES} <= linked


TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_tests_exist(document: Path) -> None:
    named = TEST.findall(document.read_text(encoding="utf-8"))
    assert not [
        test
        for test in named
        if f"\ndef {test[1]}(" not in (ROOT / test[0]).read_text(encoding="utf-8")
    ]
    assert named or document.name != "faq.md"


QUESTIONS = re.split(
    r"^## ", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)[1:]


@pytest.mark.parametrize("text", QUESTIONS, ids=lambda text: text.partition("\n")[0])
def test_every_answer_names_a_test(text: str) -> None:
    assert TEST.search(text)
