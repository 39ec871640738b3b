"""Tests of what torch logs and prints while a trace fails is hidden, and shown when asked for; its loggers
stay as they are."""

import logging

import pytest
import torch
from torch import Tensor, nn

import zbcompile


class OnSome(nn.Linear):
    """Decides by how many rows a mask leaves: torch prints the graph so far when it fails."""

    def forward(self, x: Tensor) -> Tensor:
        logging.getLogger("torch.fx").warning("a warning of torch.fx")
        logging.getLogger("a_model").warning("a warning of a model")
        hidden = super().forward(x)
        saved = hidden[hidden[:, 0] > 0]
        return saved.mean() if saved.numel() else saved.sum()


@pytest.mark.parametrize("printed", [False, True])
def test_torchs_logs_are_shown_if_asked_for(
    printed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZBCOMPILE_TORCH_LOGS", str(int(printed)))
    level = logging.getLogger("torch").level
    pipe = zbcompile.pipeline(OnSome(4, 4), schedule="1f1b", ranks=1, microbatches=1)
    with pytest.raises(zbcompile.CompileError, match=r"shape of a result dep.*test_torch_logs"):
        pipe.step(torch.randn(4, 4))
    assert ("a warning of torch.fx" in caplog.messages) is printed
    assert "a warning of a model" in caplog.messages
    assert logging.getLogger("torch").level == level
