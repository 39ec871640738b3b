"""Calls in a chunk of the stack of their own."""

import pytest

from zbcompile.passes.pass_list.stack_chunk import in_one_chunk

CHUNK = 16 * 1024  # bytes: what CPython maps at a time


def test_results_and_exceptions_pass() -> None:
    assert in_one_chunk(divmod, 7, 2) == (3, 1)
    assert in_one_chunk(dict, {"a": 1}, b=2) == {"a": 1, "b": 2}
    with pytest.raises(ZeroDivisionError):
        in_one_chunk(divmod, 7, 0)


def test_its_frame_does_not_fit_into_an_ordinary_chunk() -> None:
    assert in_one_chunk.__code__.co_stacksize * 8 > CHUNK
