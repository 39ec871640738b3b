"""All refusals of captures stand in one table, and docs/models.md shows it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zbcompile.passes.capture_refusals import Refusal, explanation

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
SECTION = "## What is refused\n"


def table() -> str:
    """The refusals as the page has them: what is found, with the names that it has there in italics, and the remedy."""
    texts = (f"| {each.found} | {each.remedy} |".replace("}{", "} {") for each in Refusal)  # Markdown reads no *a**b*
    rows = (re.sub(r"{(\w+)}", r"*\1*", text) for text in texts)
    return "\n".join(["| what | remedy |", "|---|---|", *rows, ""])


def test_the_page_has_every_refusal(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin = text.index("| what |", text.index(SECTION))
    end = text.find("\n\n", begin) + 1 or len(text)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text[:begin] + table() + text[end:], encoding="utf-8")
        return
    assert text[begin:end] == table(), "docs/models.md is not the table of refusals: pytest --update-golden"


def test_refusals_differ_and_say_what_to_do() -> None:
    assert len({each.found for each in Refusal}) == len(Refusal.__members__)
    assert all(each.remedy.endswith((".", ".)", "}")) for each in Refusal)


def test_names_are_filled_in() -> None:
    error = Refusal.INPUT_WRITTEN.error(name="x", kind="unused")
    assert str(error) == "forward changes its input x in place, and with it the batch. Work on a copy: x.clone()."


def test_errors_of_torch_are_explained() -> None:
    assert explanation(ValueError("\n  odd\nmore")) == "(ValueError: odd)"
    assert explanation(RuntimeError("no fake impl")).startswith("calls an operator whose shapes torch cannot infer. ")


def test_nobody_else_words_a_refusal() -> None:
    """What raises CaptureError takes the words of the table, or what another one has said."""
    files = [file for file in (ROOT / "passes").rglob("*.py") if file.name != "capture_refusals.py"]
    assert [f"{file.name}:{line}" for file in files for line in _own_words(file)] == []


def _own_words(file: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and isinstance(called, ast.Name) and called.id == "CaptureError":
            yield from (node.lineno for text in node.args if isinstance(text, ast.JoinedStr | ast.Constant))
