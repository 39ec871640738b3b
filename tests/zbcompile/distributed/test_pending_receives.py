"""A bound on the receives that are posted and not yet waited for: it is kept, and changes no bit of a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from tests.support.pool import Pool
from tests.support.training import Case, Trained, assert_same_tensors, pipeline_of, train
from zbcompile.distributed.packing import Buffer
from zbcompile.distributed.transport import PointToPoint, ReceiveBuffers
from zbcompile.env import ORDERED
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.schedules.lowering.edges import Message

SPEC = TensorSpec((1,), (1,), "float32", "cpu")


class Noted:
    """Channels, and the works of their receives, that note what is posted and what has been waited for."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, Message]] = []
        self.open: set[Message] = set()
        self.most = 0

    def receive(self, tensor: torch.Tensor, message: Message, index: int, peer: int) -> "Arrival":
        self.posted.append((peer, message))
        self.open.add(message)
        self.most = max(self.most, len(self.open))
        return Arrival(lambda: self.open.discard(message))


class Arrival:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def transport(channels: Any, most: int | None) -> PointToPoint:
    return PointToPoint(channels=channels, buffers=ReceiveBuffers(torch.device("cpu")), most_posted=most)


@given(peers=st.lists(st.integers(0, 3), min_size=1, max_size=12), most=st.none() | st.integers(1, 4), data=st.data())
def test_each_channel_keeps_its_order(peers: list[int], most: int | None, data: st.DataObject) -> None:
    """Whichever is waited for first; and no more are open than may be, if they are waited for in turn."""
    noted = Noted()
    moves = transport(noted, most)
    messages = [Message("F", peer, index) for index, peer in enumerate(peers)]
    for message, peer in zip(messages, peers, strict=True):
        moves.post(message, [Buffer(SPEC, -1)], peer)
    in_turn = data.draw(st.booleans())
    for message in messages if in_turn else data.draw(st.permutations(messages)):
        moves.wait(message)
        assert message not in noted.open
        moves.take(message)
    moves.finish()
    for peer in set(peers):
        assert [message for sender, message in noted.posted if sender == peer] == [
            message for message, sender in zip(messages, peers, strict=True) if sender == peer
        ]
    assert len(noted.posted) == len(peers)
    if in_turn:
        assert noted.most == min(len(peers), most or len(peers))


def trained(schedule: str, most: int | None) -> tuple[Trained, int]:
    """Steps with at most so many receives posted ahead; and how many were posted when another one was."""
    case, found = Case("small-tied", schedule, 2, 4), [0]
    pipe = pipeline_of(case, max_receives=most)
    post_now = PointToPoint._post_now

    def noted(self: PointToPoint, *given: Any) -> None:
        found.append(len(self.receives))
        post_now(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PointToPoint, "_post_now", noted)
        return train(pipe, case), max(found)


def in_channels(schedule: str, most: int | None) -> tuple[Trained, int]:
    """As over NCCL: a group for each channel, whose messages are told apart by their order alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ORDERED.name, "1")
        return trained(schedule, most)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_bound_changes_no_bit(schedule: str, pool: Pool) -> None:
    """With one receive that is posted ahead of its pass."""
    unbounded, bounded = (pool.run(in_channels, schedule, most) for most in (None, 1))
    for (one, many), (other, few) in zip(unbounded, bounded, strict=True):
        assert few <= 1  # ahead, and what a pass needs at once
        assert few <= many
        assert all(map(torch.equal, one.losses, other.losses))
        assert_same_tensors(one.state, other.state, "state dict:")
