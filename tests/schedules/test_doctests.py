"""The examples in the docstrings are the documentation: they run."""

import doctest
import pkgutil
from importlib import import_module

import pytest

from zbcompile import schedules

MODULES = [
    module.name for module in pkgutil.walk_packages(schedules.__path__, "zbcompile.schedules.")
]
MODULES = ["zbcompile.schedules", *(name for name in MODULES if not name.endswith("__main__"))]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    outcome = doctest.testmod(import_module(module))
    assert outcome.failed == 0


def test_rooms_are_searched() -> None:
    assert "zbcompile.schedules.ir.schedule" in MODULES
