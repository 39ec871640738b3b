"""The script that runs what README and docs/ show: it reads all of it, runs a page, and tells what
fails."""

from pathlib import Path

import pytest

from tests.support import page_runs


def test_every_page_is_read() -> None:
    commands = [command for page in page_runs.PAGES for command in page_runs.read(page)[0]]
    snippets = [snippet for page in page_runs.PAGES for snippet in page_runs.read(page)[1]]
    assert len(commands) > 70
    assert len(snippets) > 50
    for reason in page_runs.NOT_RUN:
        assert any(reason in f"{command.shell}$" for command in commands), (
            f"no command has {reason}"
        )
    run = [command.shell for command in commands if not command.left_out]
    assert "python first.py" in run
    assert "torchrun --standalone --nproc-per-node 2 train.py" in run
    assert "python -m zbcompile.compile --help" in run  # the name of a tool alone
    assert ".venv/bin/python examples/train_gpt.py" in run  # what stands behind an installation


def test_what_a_page_says_of_installing_is_left_out() -> None:
    left = [
        command.text
        for command in page_runs.read("README.md")[0]
        if command.left_out == page_runs.NETWORK
    ]
    assert any(command.startswith("pip install torch ") for command in left)


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


def test_what_fails_is_told(
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
