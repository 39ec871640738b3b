"""The examples in the docstrings of the graph passes and the runtime run; tests/schedules has its
own."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = [*(ROOT / "passes").rglob("*.py"), *(ROOT / "zbcompile").rglob("*.py")]


def has_examples(file: Path) -> bool:
    lines = file.read_text(encoding="utf-8").splitlines()
    return any(">>> " in line and "+SKIP" not in line for line in lines)


FILES = sorted(file for file in ROOMS if has_examples(file))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_examples(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts = file.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts if parts[0] == "zbcompile" else ("zbcompile", *parts))
    assert doctest.testmod(import_module(module)).failed == 0
