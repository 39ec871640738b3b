"""What all tests share: golden files (output that a person would look at, compared as text), one
torch thread, and processes that play the ranks."""

import difflib
import gc
import importlib
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.pool import Pool

GOLDEN = Path(__file__).parent / "golden"

# Graphs, and what imports make, are many small objects, most of which live on: collections are made
# rarer.
gc.set_threshold(50_000, 20, 20)

# A generated case may take as long as it does: a busy machine is no failure. Every run generates
# the same ones; others, and five times as many, with `--hypothesis-profile new-cases`.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("zbcompile", UNHURRIED, derandomize=True, database=None)
settings.register_profile("new-cases", UNHURRIED, max_examples=500)
settings.load_profile("zbcompile")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the files in tests/golden anew"
    )
    parser.addoption(
        "--every-case",
        action="store_true",
        help="also the cases beyond the samples of `mostly_slow`",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        # xdist would begin with the groups of most tests, however short
        config.option.loadscopereorder = False
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.TemporaryDirectory()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
            folder.name
        )  # not the user's, which other runs have filled
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(tryfirst=True)  # before pytest and xdist read the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_slow_cases(items)
    if not config.getoption("--every-case") and not any(
        "::" in argument for argument in config.args
    ):
        _leave_out_cases(config, items)
    if config.pluginmanager.hasplugin("xdist"):
        _group_for_workers(items)


def _mark_slow_cases(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("mostly_slow")
        test = item.nodeid.partition("[")[0]
        if mark is not None:
            daily = mark.kwargs["every"]
            suite = mark.kwargs.get("suite", daily)
            assert daily % suite == 0, f"{test}: daily work takes a part of the suite's cases"
            if seen[test] % daily:
                item.add_marker(pytest.mark.slow)
            if seen[test] % suite:
                item.add_marker(pytest.mark.beyond_sample)
        seen[test] += 1


def _leave_out_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.get_closest_marker("beyond_sample")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("beyond_sample")]


def _group_for_workers(items: list[pytest.Item]) -> None:
    """With `-n N --dist loadgroup`: one worker per file, for its fixtures, and one for all that
    start ranks. It begins; then come the files with the most slow tests."""
    groups = {
        item: "ranks" if "pool" in getattr(item, "fixturenames", ()) else item.path.name
        for item in items
    }
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    slow = Counter(groups[item] for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (groups[item] != "ranks", -slow[groups[item]]))


def pytest_collection_finish() -> None:
    """Freezes all objects that exist by now: a garbage collection need not walk through it again
    and again. torch writes graphs down for whoever listens to its trace, as pytest does with every
    logger that does not propagate.
    """
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """At the end pytest collects garbage to report finalizers that fail: seconds, with millions of
    objects, and nothing here needs it."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums and norms change their bits with the number of threads. Tests that do without torch go
    on doing so."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pool() -> "Iterator[Pool]":
    """Worker processes for the whole session; see `tests/support/pool.py`. Here, as pytest 9.1 does
    not find a fixture of a folder whose files are named before and behind one of another folder."""
    with importlib.import_module("tests.support.pool").open_pool() as started:
        yield started


@pytest.fixture(scope="session")
def small_program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The model of `tests/support/checkpointing.py` compiled for a schedule and a number of ranks,
    once."""
    root = tmp_path_factory.mktemp("programs")

    def make(schedule: str, ranks: int) -> Path:
        directory = root / f"{schedule}-{ranks}"
        if not directory.exists():
            importlib.import_module("tests.support.checkpointing").save_program(
                directory, schedule, ranks
            )
        return directory

    return make


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` fails, showing the difference, unless `text` is what tests/golden/`name`
    holds."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        difference = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
        )
        if expected != text:
            pytest.fail(
                "\n".join([*difference, "if this is meant: pytest --update-golden"]), pytrace=False
            )

    return compare
