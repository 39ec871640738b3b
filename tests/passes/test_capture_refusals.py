"""All refusals of a capture stand in one table."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from zbcompile.passes.capture import unsupported

ROOT = Path(__file__).parents[2]
REFUSALS = {
    name: text
    for name, text in vars(unsupported).items()
    if isinstance(text, str) and re.fullmatch(r"[A-Z]+(_[A-Z]+)*", name) and " " in text
}


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
