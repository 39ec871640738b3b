"""The out-of-band store of faults after it was closed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from zbcompile.faults.board import Board
from zbcompile.faults.fault_report import Fault


def test_a_closed_board_answers_like_a_store_that_is_gone() -> None:
    """The watchdog may close it while another thread still explains why a connection broke: that
    handles RuntimeError, and another error would hide the cause."""
    group: Any = SimpleNamespace(get_group_store=dist.HashStore)
    board = Board(group, (0,), 0, 5.0)
    fault = Fault(0, "step 3", "a cause")
    board.end(fault)
    assert board.posted(0) == fault
    board.close()
    for ask in (
        lambda: board.end(fault),
        lambda: board.posted(0),
        board.statuses,
        lambda: board.leave(0),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            ask()
