"""The examples in the docstrings are the documentation: they run."""

import doctest
import pkgutil
from importlib import import_module

import pytest

from zbcompile import schedules

MODULES = ["", *(f".{module.name}" for module in pkgutil.iter_modules(schedules.__path__) if module.name != "__main__")]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    outcome = doctest.testmod(import_module(f"zbcompile.schedules{module}"))
    assert outcome.failed == 0
