"""A store whose server is frozen: calls of it end; it may answer again."""

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from zbcompile.distributed.arrival import Rendezvous
from zbcompile.errors import PipelineError
from zbcompile.faults.board import BoundedStore, SilentStoreError
from zbcompile.torch_private import gloo_link


def serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """The process and port of a store."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context(
        "forkserver"
    )  # a fork of this process may find a lock of its threads taken
    process = context.Process(target=serve, args=(there,))
    process.start()
    there.close()
    assert process.pid is not None
    yield process.pid, here.recv()
    process.kill()
    process.join()


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


def client(port: int) -> dist.TCPStore:
    patience = timedelta(seconds=3)  # with which it connects
    return dist.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience
    )


def test_a_store_that_does_not_answer_may_answer_later(server: tuple[int, int]) -> None:
    pid, port = server
    store = BoundedStore(client(port))
    store.ask(lambda each: each.set("key", "value"))
    freeze(pid)
    for within in (
        0.2,
        3600.0,
    ):  # it is known to be silent: the second call does not wait for its turn
        with pytest.raises(SilentStoreError):
            store.ask(lambda each: each.get("key"), within)
    os.kill(pid, signal.SIGCONT)
    while True:
        try:
            assert store.ask(lambda each: each.get("key")) == b"value"
            break
        except SilentStoreError:
            pass
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.ask(lambda each: each.get("key"))


def test_a_store_is_given_up_on_every_thread(server: tuple[int, int]) -> None:
    pid, port = server
    other, store = client(port), BoundedStore(client(port))
    freeze(pid)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(other.check, ["key"])
        with pytest.raises(SilentStoreError):
            store.ask(lambda each: each.check(["key"]), 0.2)
        store.cut()
        with pytest.raises(RuntimeError):
            waiting.result()
    store.close()


def test_ranks_that_make_a_group_do_not_wait_for_a_frozen_store(server: tuple[int, int]) -> None:
    """torch waits for the answer of the server without an end."""
    pid, port = server
    store = BoundedStore(shared := client(port))
    freeze(pid)
    with ThreadPoolExecutor(1) as executor:
        making = executor.submit(gloo_link, shared, 0, timedelta(seconds=0.5))
        with pytest.raises(TimeoutError):
            making.result(2)
        store.cut()
        with pytest.raises(RuntimeError):
            making.result()
    store.close()


def test_a_start_ends_whose_store_is_frozen(
    server: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbcompile.distributed.arrival.ANSWER", 0.2)
    pid, port = server
    freeze(pid)
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.raises(PipelineError, match="rank 0, which keeps the store"):
        Rendezvous(place, 1.0).join("gloo")


def test_a_start_does_not_meet_an_earlier_one() -> None:
    """In the same store, after ranks that ended at any moment: also with fewer or more ranks."""
    store = dist.HashStore()
    for ranks in (2, 2, 3, 1):
        store.append("zbcompile/members", "0:one-that-ended-before-the-others-came,")
        with ThreadPoolExecutor(ranks) as executor:
            found = list(
                executor.map(
                    lambda rank, count=ranks: arrival(rank, count, 30.0).meet(store), range(ranks)
                )
            )
        values = [each.add("arrived", 1) for each in found]
        assert sorted(values) == list(range(1, ranks + 1))


def test_who_is_missing_is_named_to_the_others_and_to_the_one_who_is_late() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as executor:
        found = list(executor.map(lambda rank: reason_of(arrival(rank, 3, 0.5), store), (0, 2)))
    late = reason_of(arrival(1, 3, 0.2), store)
    assert all(
        re.fullmatch(r"(rank [02] has given up: )?rank 1 did not arrive", each) for each in found
    )
    assert re.fullmatch(r"rank [02] has given up: rank 1 did not arrive", late)


def test_who_comes_no_more_after_an_earlier_start_is_named() -> None:
    store = dist.HashStore()
    store.append("zbcompile/members", "0:before,1:before,2:before,")
    others = dist.HashStore()
    others.append("zbcompile/members", "7:before,")
    assert "rank 1 did not arrive" in reason_of(arrival(0, 2, 0.2), others)
    with ThreadPoolExecutor(2) as executor:
        found = list(executor.map(lambda rank: reason_of(arrival(rank, 3, 1.0), store), (0, 1)))
    assert "rank 2 did not arrive" in found
    assert all("rank 2 did not arrive" in each for each in found)


def test_ranks_that_do_not_reach_each_other_make_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those told a wrong interface: making the group would take five times the time that it
    waits for."""
    made: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: made.append(named))
    with pytest.raises(RuntimeError, match=r"rank 1|[Tt]imed? ?out"):
        arrival(0, 2, 1.0)._connect(dist.HashStore(), "gloo")
    assert not made


def arrival(rank: int, ranks: int, timeout: float) -> Rendezvous:
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    return Rendezvous(place, timeout)


def reason_of(one: Rendezvous, store: Any) -> str:
    with pytest.raises(RuntimeError) as raised:
        one.meet(store)
    return str(raised.value)
