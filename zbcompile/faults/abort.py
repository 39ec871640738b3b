"""Ends what a rank waits in: messages of its process groups, and calls of the groups' store."""

import contextlib
import os
import socket
import stat
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

UNUSED_TAG = 1 << 30  # no message uses it


class LinkGroup(Protocol):
    """A process group of two, as the backends of torch.distributed are."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...


Group = dist.ProcessGroup | LinkGroup


def cut_connections(group: Group, backend: str) -> None:
    """Make everything that waits in `group` raise, on this rank; its peers see a closed connection.

    Gloo's `abort` does nothing (torch 2.11-2.13). But a gloo receive that times out closes all
    connections of the group if the one that it uses is still open, so this tries a receive from
    each peer.
    """
    if backend != "gloo":
        group.abort()
        return
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError, ValueError):
            group.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))


def port_of(store: Any) -> int | None:
    """The port of a store's server; None for a store without one, such as a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None


def cut_connections_to(port: int | None) -> None:
    """Shut down this process's connections to a port: what waits in them raises. torch's client
    gives no other way, and a wait inside torch cannot be left to a thread: of a script, or of a
    process group that is being made.
    """
    for name in os.listdir("/dev/fd") if port is not None else ():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and connection.getpeername()[1] == port:
                        connection.shutdown(socket.SHUT_RDWR)
