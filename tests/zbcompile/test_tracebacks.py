"""Errors show the frames of the user's code; the ranks print an error that all of them raise once."""

import contextlib
import io
import os
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.pool import Pool


def raised(**options: Any) -> Exception:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target.nope).sum()  # type: ignore[attr-defined, no-any-return]

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = zbcompile.pipeline(model, schedule="1f1b", microbatches=2, loss=loss, **options)
    try:
        pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
    except Exception as error:
        return error
    raise AssertionError


def test_an_error_in_the_loss_shows_the_line_and_no_frame_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZBCOMPILE_TRACEBACK")
    error = raised(ranks=2)
    shown = "".join(traceback.format_exception(error))
    assert len(shown.splitlines()) <= 13  # 10 but for the frame that stores this session's captures
    assert "return (output - target.nope).sum()" in shown
    assert os.path.dirname(torch.__file__) not in shown
    assert "'FakeTensor' object has no attribute 'nope'" in str(error)
    monkeypatch.setenv("ZBCOMPILE_TRACEBACK", "1")
    everything = "".join(traceback.format_exception(raised(ranks=2)))
    assert os.path.dirname(torch.__file__) in everything
    assert len(everything.splitlines()) > 100


def test_a_cause_without_a_line_of_the_user_says_how_to_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).reshape(-1, 7)

    monkeypatch.delenv("ZBCOMPILE_TRACEBACK")
    pipe = zbcompile.pipeline(Strange(2, 2), schedule="1f1b", microbatches=2, ranks=1, loss=lambda y, t: y.sum())
    with pytest.raises(zbcompile.CaptureError) as caught:
        pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
    assert "".join(traceback.format_exception(caught.value)).count("File ") <= 5


def printed() -> str:
    os.environ.pop("ZBCOMPILE_TRACEBACK", None)
    error, out = raised(), io.StringIO()
    with contextlib.redirect_stderr(out):
        sys.excepthook(type(error), error, error.__traceback__)
    os.environ["ZBCOMPILE_TRACEBACK"] = "1"
    return out.getvalue()


def test_only_the_first_rank_prints_what_all_raise(pool: Pool) -> None:
    first, second = pool.run(printed, ranks=2)
    assert "return (output - target.nope).sum()" in first
    assert len(second.splitlines()) == 1
    assert "rank 1 ends with the error that rank 0 prints: CaptureError: torch.export cannot capture" in second
