"""All refusals of a capture stand in one table, and docs/models.md shows it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zbcompile.passes.capture import unsupported

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
SECTION = "## What is refused\n"
REFUSALS = {
    name: text
    for name, text in vars(unsupported).items()
    if isinstance(text, str) and re.fullmatch(r"[A-Z]+(_[A-Z]+)*", name) and " " in text
}


def table() -> str:
    """The refusals as the page has them, with what differs from one to the other in italics."""
    remedy = unsupported.static(())
    texts = (
        text.replace("{at}", " ({line})").replace("{static}", remedy).replace("}{", "} {")
        for text in REFUSALS.values()
    )
    rows = (re.sub(r"{(\w+)(?:!r)?}", r"*\1*", text).replace("|", "\\|") for text in texts)
    return "\n".join(
        ["| what is refused, and what to do |", "|---|", *(f"| {row} |" for row in rows), ""]
    )


def test_the_page_has_every_refusal(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin = text.index("| what ", text.index(SECTION))
    end = text.find("\n\n", begin) + 1 or len(text)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text[:begin] + table() + text[end:], encoding="utf-8")
        return
    assert text[begin:end] == table(), (
        "docs/models.md is not the table of refusals: pytest --update-golden"
    )


def test_refusals_differ_and_are_sentences() -> None:
    assert len(set(REFUSALS.values())) == len(REFUSALS) > 40
    assert [name for name, text in REFUSALS.items() if not text.endswith((".", ".)", "}"))] == []


def test_nobody_else_words_a_refusal() -> None:
    """What raises CaptureError takes the words of the table, or what another one has said."""
    files = [file for file in (ROOT / "passes").rglob("*.py") if file.name != "unsupported.py"]
    assert [f"{file.name}:{line}" for file in files for line in _own_words(file)] == []


def test_every_refusal_is_used() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "passes").rglob("*.py")]
    used = {
        name
        for name in REFUSALS
        if sum(len(re.findall(rf"\b{name}\b", text)) for text in texts) > 1
    }
    assert sorted(REFUSALS.keys() - used) == []


def _own_words(file: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        called = node.func if isinstance(node, ast.Call) else None
        if (
            isinstance(node, ast.Call)
            and isinstance(called, ast.Name)
            and called.id == "CaptureError"
        ):
            yield from (
                node.lineno for text in node.args if isinstance(text, ast.JoinedStr | ast.Constant)
            )
