"""What NCCL takes of a GPU, by rank: links to neighbours, groups, buffers, thread blocks that wait."""

from dataclasses import replace

import pytest

from tests.support.training import Case, pipeline_of, problem_of
from zbcompile.prediction.communicators import BUFFERS, MOST_CTAS, Communicators, communicators_of
from zbcompile.program.program import Program


@pytest.fixture
def of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "device_type", "cuda")


@pytest.fixture(scope="module")
def program() -> Program:
    """Of four ranks, on the CPU."""
    pipe = pipeline_of(Case("mlp", "1f1b", 4, 4))
    (batch,) = problem_of("mlp").batches(1, 8)
    return pipe.compile(*batch.args, target=batch.target).program


@pytest.mark.usefixtures("of_gpus")
def test_a_link_per_direction_and_neighbour(program: Program) -> None:
    found = [communicators_of(program, rank) for rank in range(4)]
    assert [(each.received, each.sent) for each in found] == [(1, 1), (2, 2), (2, 2), (1, 1)]
    assert {each.groups for each in found} == {1}
    assert found[1].bytes == (2 + 1) * MOST_CTAS * BUFFERS
    assert communicators_of(program, 1, replicas=2).groups == 2


@pytest.mark.usefixtures("of_gpus")
def test_fewer_thread_blocks_make_links_smaller(program: Program) -> None:
    found = communicators_of(replace(program, step=replace(program.step, max_ctas=4)), 1)
    assert found.waiting == 4 * 4
    assert found.bytes == (2 * 4 + MOST_CTAS) * BUFFERS


def test_none_on_the_cpu(program: Program) -> None:
    assert communicators_of(program, 1) == Communicators()
    assert Communicators().bytes == 0
