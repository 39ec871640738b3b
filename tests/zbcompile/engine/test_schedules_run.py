"""Executing a schedule, besides `test_combinations.py`: late messages, the order of weight gradients,
chunks, and merged pairs."""

import os
import random
import time
from dataclasses import dataclass
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.oracle import PROBLEMS, eager_step_in_order
from tests.support.ordered import in_turn
from tests.support.pool import Pool
from tests.support.training import (
    ROWS,
    Case,
    Trained,
    assert_bitwise,
    assert_same_tensors,
    compile_for_forks,
    gradients_of,
    interpreted,
    join,
    pipeline_of,
    quickly,
    reference,
    train,
)
from zbcompile.distributed.ranks import GroupRanks
from zbcompile.distributed.transport import OrderedLinks, PointToPoint, Tensors
from zbcompile.env import ORDERED
from zbcompile.program.edges import Message
from zbcompile.schedules import Pair


def test_the_lazy_schedule_has_the_sums_of_its_order() -> None:
    """Eager's gradients of microbatches added in the order of W of each stage; those that B
    computes and those of tied parameters in the order of microbatches."""
    case = Case("small-tied", "zb-h1-lazy", 2, 4, steps=1)
    ours, problem = quickly(case), PROBLEMS[case.problem]
    model, batch = problem.model(), problem.batches(1, case.microbatches * ROWS)[0]
    program = pipeline_of(case).compile(*batch.args, target=batch.target).program
    slots = [slot for stage in program.stages for slot in stage.pieces["W"].outputs]
    in_w = {slot.name for slot in slots if slot.role == "weight_gradient"} - program.shared
    orders = {
        name: program.schedule.weight_order(program.homes[name][0]) if name in in_w else range(4)
        for name, _ in model.named_parameters()
    }
    loss = eager_step_in_order(model, problem.loss, batch, 0, orders)
    assert_same_tensors(ours.losses, [loss], "loss of step")
    assert_same_tensors(ours.gradients[0], gradients_of(model), "gradient of")


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    [("interleaved-1f1b", 2, 3), ("interleaved-zb", 2, 4), ("interleaved-1f1b-overlap", 1, 5)],
)
def test_any_number_of_chunks(name: str, ranks: int, chunks: int) -> None:
    case = Case("mlp", name, ranks, 4, steps=1)
    assert_bitwise(train(pipeline_of(case, chunks=chunks), case), reference(case))


@dataclass
class Late(PointToPoint):
    """Real messages, each sent a little late; ranks with odd numbers are slow. Where the channels
    are ordered, each is a stream, as with NCCL."""

    def __post_init__(self) -> None:
        if isinstance(self.channels, OrderedLinks):
            self.channels = in_turn(self.channels)

    def send(self, message: Message, tensors: Tensors, peer: int) -> None:
        time.sleep(random.random() ** 4 * 0.01)
        super().send(message, tensors, peer)

    def wait(self, message: Message) -> None:
        time.sleep(random.random() ** 4 * 0.01 * (1 + dist.get_rank() % 2))
        super().wait(message)


def delayed(case: Case, ordered: bool) -> Trained:
    original = GroupRanks.transport
    late = lambda self, *arguments: Late(**vars(original(self, *arguments)))  # noqa: E731
    with (
        mock.patch.object(GroupRanks, "transport", late),
        mock.patch.dict(os.environ, {ORDERED.name: str(int(ordered))}),
    ):
        return quickly(case)


RARE = pytest.mark.beyond_sample


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ordered"),
    [
        (Case("skips", "zb-v", 2, 4, steps=1), True),
        pytest.param(Case("small-tied", "1f1b", 2, 4, steps=1), False, marks=RARE),
        pytest.param(Case("gpt-tied", "zb-v", 4, 8, steps=1), True, marks=RARE),
        pytest.param(Case("skips", "dualpipe", 4, 8, steps=1), False, marks=RARE),
    ],
    ids=str,
)
def test_late_messages_and_slow_ranks_change_no_bit(case: Case, ordered: bool, pool: Pool) -> None:
    """Also where messages have no tags, and a channel ends one operation before it begins
    the next."""
    compile_for_forks(case)
    shares = pool.run(delayed, case, ordered, ranks=case.ranks)
    assert_bitwise(join(shares), reference(case))


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize("name", ["dualpipe-v", "1f1b-overlap", "dualpipe"])
def test_pairs_run_as_one_graph(name: str) -> None:
    """Each kind of pair is one merged graph, called once per pair; recorded spans still name both
    halves."""
    case = Case("mlp", name, 2, 8, steps=1)
    pipe, batch = pipeline_of(case), PROBLEMS["mlp"].batches(1, case.microbatches * ROWS)[0]
    pipe.compile(*batch.args, target=batch.target)
    steps = [step for order in pipe.program.schedule.orders for step in order]
    pairs = [step for step in steps if isinstance(step, Pair)]
    calls: list[str] = []
    for plan in list(pipe._compiled.steps.plans.values())[-1].ordered()[1]:
        for kind, run in plan.merged.items():
            plan.merged[kind] = lambda values, run=run: (calls.append(name), run(values))[1]  # type: ignore[index]
    pipe.record = True
    pipe.step(*batch.args, target=batch.target)
    assert len(calls) == len(pairs) > 0
    spans = {span.action for spans in pipe.last_step.spans.values() for span in spans}
    assert {str(action) for pair in pairs for action in pair} <= spans


@pytest.mark.parametrize("name", ["dualpipe-v", pytest.param("1f1b-overlap", marks=RARE)])
def test_halves_of_pairs_whose_passes_a_backend_has_compiled_run_in_turn(name: str) -> None:
    case = Case("small-tied", name, 2, 8, steps=1)
    assert_bitwise(train(pipeline_of(case, backend=interpreted), case), reference(case))
