"""Agreement of all ranks: a failure on one is raised on all, and ranks that compiled different programs do not
start."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from zbcompile.errors import PipelineError
from zbcompile.runtime.engine import Distributed, Engine

Result = TypeVar("Result")


def together(engine: Engine, what: str, make: Callable[[], Result]) -> Result:
    """Run `make` on every rank; when it fails on any, every rank raises: its own error, or one that names the rank."""
    if not isinstance(engine, Distributed):
        return make()
    result, error = None, None
    try:
        result = make()
    except Exception as caught:
        error = caught
    reports: list[str | None] = [None] * dist.get_world_size(engine.everyone)
    report = None if error is None else f"{type(error).__name__}: {error}"
    with engine.watch.position.waiting("the agreement"):
        dist.all_gather_object(reports, report, group=engine.everyone)
    if error is not None:
        raise engine.watch.known_to_all(error)
    failed = [(rank, text) for rank, text in zip(engine.watch.board.members, reports, strict=True) if text]
    if failed:
        text = f"{what} failed on rank {failed[0][0]}: {failed[0][1]}"
        raise engine.watch.known_to_all(PipelineError(text))
    return result  # type: ignore[return-value]


def gathered(engine: Engine, value: Result) -> list[Result]:
    """The value of every rank, on every rank."""
    if not isinstance(engine, Distributed):
        return [value]
    values = [value] * dist.get_world_size(engine.everyone)
    with engine.watch.position.waiting("the exchange"):
        dist.all_gather_object(values, value, group=engine.everyone)
    return values


COMPILED = "compiled different programs"
BUILD = "Every rank must build the same model, use the same versions and pass the same batch shapes and options."


def require_equal_programs(
    engine: Engine, manifest: Mapping[str, object], what: str = COMPILED, remedy: str = BUILD
) -> None:
    """Raise on every rank when the manifests differ, naming what differs and where: the ranks did `what`."""
    if not isinstance(engine, Distributed):
        return
    manifests: list[Mapping[str, object]] = [{}] * dist.get_world_size(engine.everyone)
    with engine.watch.position.waiting("the comparison of programs"):
        dist.all_gather_object(manifests, dict(manifest), group=engine.everyone)
    members = engine.watch.board.members
    for rank, other in zip(members, manifests, strict=True):
        for key, value in manifests[0].items():
            if other[key] != value:
                where, here, there = first_difference(key, value, other[key])
                text = f"the ranks {what}: {where} is {here} on rank {members[0]} and {there} on rank {rank}. {remedy}"
                raise engine.watch.known_to_all(PipelineError(text))


def first_difference(name: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """Down to the entry in which lists of one length, or mappings with the same keys, differ first.

    >>> first_difference("graphs", ["a", "b"], ["a", "c"])
    ('graphs[1]', 'b', 'c')
    """
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        entries = [(str(key), one[key], other[key]) for key in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        entries = [(str(index), a, b) for index, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return name, one, other
    key, a, b = next(entry for entry in entries if entry[1] != entry[2])
    return first_difference(f"{name}[{key}]", a, b)
