"""Aborts pending operations of a rank's process groups."""

import contextlib
from datetime import timedelta
from typing import Any

import torch

UNUSED_TAG = 1 << 30  # no message uses it


def abort_group(group: Any, backend: str) -> None:
    """Makes everything that waits in `group` raise on this rank; its peers see a closed connection.

    `group` is a process group of torch or one of its backends. gloo's `abort` does nothing (torch
    2.11 to 2.13). But a gloo receive that times out closes all connections of the group if the one
    that it uses is still open, so this tries a receive from each peer.
    """
    if backend != "gloo":
        group.abort()
        return
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError, ValueError):
            group.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
