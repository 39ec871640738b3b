"""What ranks are predicted to hold, against an independent count of the storages that live in a
step."""

import gc
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import zbcompile
from tests.support.live_storages import Alive, leave_aside, living_tensors
from tests.support.pool import Pool
from tests.support.skip_models import UNet
from zbcompile.batches.example import Example
from zbcompile.cli.target import load_example
from zbcompile.compiler.compile_example import compile_example
from zbcompile.compiler.stage_price import running_of
from zbcompile.engine.rank import RankRun
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.partition.memory_estimate import ReplicaSharding
from zbcompile.prediction.predict import predicted_costs, prices_of
from zbcompile.prediction.rank_memory import RankMemory, held_in_step, rank_memories
from zbcompile.schedules import build
from zbcompile.schedules.ir.actions import Action

TARGETS = Path(__file__).parents[3] / "examples" / "targets.py"


def counted_and_predicted(schedule: str, microbatches: int) -> tuple[int, int]:
    """Bytes of gradients, activations and messages on this rank: the most that lived, and what was
    predicted. Of all steps the least counts: on a busy machine a message that leaves late is one
    more tensor that lives.
    """
    torch.manual_seed(0)
    return _counted_and_predicted(load_example(f"{TARGETS}:gpt"), schedule, microbatches)


def skips_counted_and_predicted(schedule: str, microbatches: int) -> tuple[int, int]:
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    return _counted_and_predicted(
        Example(UNet(), (x,), target=x, loss=mse_loss), schedule, microbatches
    )


def _counted_and_predicted(example: Example, schedule: str, microbatches: int) -> tuple[int, int]:
    tokens, target = (
        torch.cat([each] * microbatches) for each in (example.args[0], example.target)
    )
    before = leave_aside()
    options = {"schedule": schedule, "microbatches": microbatches, "loss": example.loss}
    pipe = zbcompile.pipeline(example.model, **options)
    pipe.step(tokens, target=target)
    gc.collect()
    lived = []
    for _ in range(8):
        with Alive(living_tensors(), before) as alive:
            pipe.step(tokens, target=target)
        lived.append(alive.most)
    state = dict(example.model.named_parameters()) | dict(example.model.named_buffers())
    memory = rank_memories(pipe.program, predicted_costs(pipe.program), state)[
        torch.distributed.get_rank()
    ]
    return min(lived), memory.peak - memory.parameters - memory.optimizer_state


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("schedule", ["zb-v", "1f1b", "zb-h2"])
def test_storages_that_live_in_a_step_are_predicted(pool: Pool, schedule: str) -> None:
    """Under zb-v one rank has both stages of a tied parameter, and keeps a sum for each."""
    for lived, predicted in pool.run(counted_and_predicted, schedule, 4):
        assert predicted == pytest.approx(lived, rel=0.005)


@pytest.mark.slow
def test_values_that_pass_through_stages_are_predicted(pool: Pool) -> None:
    """Left out is the last rank, which holds more."""
    for lived, predicted in pool.run(skips_counted_and_predicted, "1f1b", 8, ranks=4)[:3]:
        assert predicted == pytest.approx(lived, rel=0.1)


def _memory(dtype: torch.dtype, sharding: ReplicaSharding) -> RankMemory:
    """Of the first of two ranks, which has one layer of 64 x 64."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(2)))
    x = torch.ones(4, 64, dtype=dtype)
    example = zbcompile.Example(model, (x,), loss=nn.MSELoss(), target=x)
    program = compile_example(example, build("1f1b", 2, 4), Choices(balance=("1",))).program
    return rank_memories(
        program, predicted_costs(program), dict(model.named_parameters()), sharding
    )[0]


@pytest.mark.parametrize("zero", [0, 1])
def test_what_replicas_divide(zero: int) -> None:
    size = 64 * 64
    whole = _memory(torch.float32, ReplicaSharding(2, zero))
    half = _memory(torch.bfloat16, ReplicaSharding(2, zero))
    assert (whole.parameters, half.parameters) == (4 * size, 2 * size)
    part = size * 4 // 2 if zero == 1 else 0  # of the summed gradients
    assert whole.gradients == half.gradients == 4 * size + part
    assert whole.optimizer_state == (8 * size / 2 if zero else 8 * size)
    assert half.optimizer_state == (12 * size / 2 if zero else 12 * size)
    assert whole.collectives == 4 * size


WIDTH, LAYERS = 768, 4  # a layer's weight is large enough to travel by itself


def held_after_each_action(
    zero: int, schedule: str, chunks: int | None
) -> list[tuple[str, int, int]]:
    """Of one of two replicas, after each action of a step: the bytes that live, and what is
    predicted. Of three steps the least counts: a thread may let a sum go late."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    before, executed = leave_aside(), RankRun._execute
    lived: defaultdict[Action, list[int]] = defaultdict(list)
    model, x = (
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
        torch.ones(4, WIDTH),
    )
    options: dict[str, Any] = {
        "schedule": schedule,
        "chunks": chunks,
        "microbatches": 2,
        "mesh": mesh,
    }
    pipe = zbcompile.pipeline(model, loss=nn.functional.mse_loss, **options)
    optimizer = pipe.optimizer(torch.optim.AdamW, zero=zero)

    def step(observed: bool) -> None:
        gc.collect()
        counted = Alive(living_tensors(), [*before, x]) if observed else nullcontext()
        with counted as alive, pytest.MonkeyPatch.context() as m:

            def execute(run: RankRun, instructions: tuple[Any, ...]) -> None:
                executed(run, instructions)
                lived[instructions[0].action].append(alive.now)

            if observed:
                m.setattr(RankRun, "_execute", execute)
            pipe.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()

    for observed in (
        False,
        False,
        True,
        True,
        True,
    ):  # at first there is no state yet, but sums to compare ranks by
        step(observed)
    parameters = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
    sharding, program = ReplicaSharding(2, zero), pipe.program
    costs, running = predicted_costs(program), running_of(prices_of(program))
    memory = rank_memories(program, costs, parameters, sharding)[0]
    gradients = sum(parameter.nbytes for parameter in parameters.values())
    stays = memory.parameters + memory.optimizer_state + gradients
    held = {
        each.after: stays + each.total
        for each in held_in_step(program, costs, running, parameters, 0)
    }
    pipe.close()
    return [
        (str(action), min(each), int(held[action]))
        for action, each in lived.items()
        if action in held
    ]


RARE = pytest.mark.beyond_sample  # each takes 10 seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "schedule", "chunks"),
    [
        (0, "1f1b", None),
        (1, "looped-bfs", 4),
        pytest.param(1, "1f1b", None, marks=RARE),
        pytest.param(0, "looped-bfs", 4, marks=RARE),
    ],
)
def test_what_lives_after_each_action_is_predicted(
    pool: Pool, zero: int, schedule: str, chunks: int | None
) -> None:
    """Predicted are gradients from the begin of the step on; without `zero=1` they are there from
    the first W of their stage on."""
    for replica in pool.run(held_after_each_action, zero, schedule, chunks):
        complete = max(
            i for i, (action, *_) in enumerate(replica) if action.endswith("0") and "W" in action
        )
        for number, (action, lived, predicted) in enumerate(replica):
            assert lived <= 1.005 * predicted, action
            if zero == 1 or number >= complete:
                assert lived == pytest.approx(predicted, rel=0.005), action


def held_by_replicas(zero: int) -> tuple[int, int, int, int]:
    """Of one of two replicas, all but the parameters: the most bytes that lived in a step, what was
    predicted, and the most in an update; the bytes of the parameters. The first step has no state
    yet, but sums to compare the ranks by.
    """
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    before = leave_aside()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    before += living_tensors()
    x = torch.ones(4, WIDTH)
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", microbatches=2, loss=nn.functional.mse_loss, mesh=mesh
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, zero=zero)
    pipe.step(x, target=x)
    optimizer.step()
    optimizer.zero_grad()
    lived: dict[str, list[int]] = {"step": [], "update": []}
    for _ in range(3):
        for name, call in (("step", lambda: pipe.step(x, target=x)), ("update", optimizer.step)):
            gc.collect()
            with Alive(living_tensors(), before) as alive:
                call()
            lived[name].append(alive.most)
        optimizer.zero_grad()
    parameters = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
    sharding = ReplicaSharding(2, zero)
    memory = rank_memories(pipe.program, predicted_costs(pipe.program), parameters, sharding)[0]
    pipe.close()
    size = sum(each.nbytes for each in parameters.values())
    return max(lived["step"]), memory.peak - size, max(lived["update"]), size


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "most"),
    [(0, 3.6), (1, 3.1)],
)
def test_storages_of_replicas_are_predicted(pool: Pool, zero: int, most: float) -> None:
    """`most` is in units of the parameters' bytes, beside the parameters. AdamW itself takes as
    much as two of the four layers while it updates one."""
    for lived, predicted, in_update, parameters in pool.run(held_by_replicas, zero):
        assert predicted == pytest.approx(lived, rel=0.02)
        assert max(lived, in_update) <= most * parameters
