"""The script that has everything: trained, then resumed."""

import contextlib
import io
import re
from pathlib import Path
from unittest import mock

import pytest

import train_everything


def trained(folder: Path, steps: int) -> str:
    """Returns what the script prints, of a model of two layers."""
    small = mock.patch.object(train_everything.CONFIG, "num_hidden_layers", 2)
    with small, contextlib.redirect_stdout(io.StringIO()) as printed:
        options = ["--folder", str(folder), "--steps", str(steps)]
        train_everything.train(train_everything.parse(options))
    return printed.getvalue()


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_trained_and_resumed(tmp_path: Path) -> None:
    begun = trained(tmp_path, 10)
    assert "perplexity before update 0:" in begun
    assert "update 10: loss" in begun
    resumed = trained(tmp_path, 20)
    assert "update 10: loss" not in resumed
    assert "update 20: loss" in resumed
    assert "b'def " in resumed
    found = (re.findall(r"perplexity .*: ([\d.]+)", printed)[0] for printed in (begun, resumed))
    start, end = map(float, found)
    assert end < start / 2
