"""The site builds without a warning, shows no Markdown that was left as text, and the scripts of
its pages run."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.page_runs import FENCE
from tests.support.ports import free_port
from tests.support.warm_torchrun import install
from zbcompile.schedules import names

pytestmark = pytest.mark.several_processes

ROOT = Path(__file__).parent.parent
FRONT = ROOT / "docs" / "index.md"  # all its Python runs
PAGES = [
    path
    for path in sorted((ROOT / "docs").glob("*.md"))
    if "{run" in path.read_text(encoding="utf-8")
]


def page_case(page: Path) -> Any:
    """Returns a page as a case; the suite leaves out two whose commands take long."""
    marks = [pytest.mark.beyond_sample] if page.stem in ("faults", "huggingface") else []
    return pytest.param(page, id=page.stem, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("page", map(page_case, PAGES))
def test_pages_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for language, mark, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if file := re.search(r"file=(\S+)", mark):
            (tmp_path / file[1]).write_text(text, encoding="utf-8")
            install(
                tmp_path / "bin", "\n".join(re.findall(r"^(?:import|from) .*$", text, re.MULTILINE))
            )
        if language == "python" and ("run" in mark or (page == FRONT and not file)):
            exec(compile(text, page.name, "exec"), names)
            ran += 1
        elif language == "bash" and "run" in mark:
            path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
            environment = {"PATH": path, "PORT": str(free_port())}
            subprocess.run(
                ["bash", "-euc", text], check=True, timeout=240, env={**os.environ, **environment}
            )
            ran += 1
    assert ran


AS_TEXT = re.compile(
    r"```.*|>>> .*|\{(?:run|file=.*)\}|^\s*(?:[*-]|\d+\.) \S.*|\|---.*|.*\]\([^)]*\)|.*::$"
    r"|# doctest:.*|`[^`]+`|\*\*\w.*",
    re.MULTILINE,
)


class PageText(HTMLParser):
    """The text of a page outside of code, as `prose`, and the names of its elements, as `tags`."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.prose, self.tags, self._within = "", set[str](), 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._within += tag in ("pre", "code", "script", "style")
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        self._within -= tag in ("pre", "code", "script", "style")

    def handle_data(self, data: str) -> None:
        self.prose += "" if self._within else data


def broken_links(site: Path) -> set[str]:
    """Returns links and pictures of pages that the site does not have."""
    broken = set()
    for path in site.rglob("*.html"):
        for link in re.findall(
            r'(?:href|src)="([^"#?:]+)(?:[#?][^"]*)?"', path.read_text(encoding="utf-8")
        ):
            target = site / link[1:] if link.startswith("/") else path.parent / link
            if not target.exists():
                broken.add(link)
    return broken


def assert_pages_are_rendered(site: Path) -> None:
    """No page shows Markdown as text or a quote (an example that was taken for one), and code has
    colours."""
    for path in sorted(site.rglob("*.html")):
        page = PageText(path.read_text(encoding="utf-8"))
        assert not AS_TEXT.findall(page.prose), path.name
        assert "blockquote" not in page.tags, path.name
    assert '<span class="kn">import</span>' in (site / "index.html").read_text(encoding="utf-8")
    assert ".codehilite .kn { color" in (site / "code.css").read_text(encoding="utf-8")
    assert 'href="code.css"' in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip(
        "mkdocstrings_handlers.python", reason="the site needs pip install -e '.[dev]'"
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    pages = (tmp_path / "reference.html").read_text(encoding="utf-8")
    assert 'id="zbcompile.pipeline"' in pages
    for name in names():
        page = (tmp_path / "schedules" / f"{name}.html").read_text(encoding="utf-8")
        assert all(
            part in page for part in (f'src="{name}.svg"', 'id="closed-form"', "When to use it")
        )
    assert_pages_are_rendered(tmp_path)
    assert not broken_links(tmp_path)
    assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="https?:', pages), (
        "a page fetches from elsewhere"
    )
