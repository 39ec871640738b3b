"""Threads: pipelines with random numbers beside each other, and two threads in one pipeline."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import zbcompile
from tests.support.oracle import WIDTH
from zbcompile.faults.turns import Turns

X = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)
PATIENCE = 0.5  # seconds that one thread gives the other to come between


def around_first_pass(before: Callable[[], Any], after: Callable[[], Any]) -> Callable[..., Any]:
    """A backend that runs graphs as they are, with something before and after the first run of any."""
    waiting = [(before, after)]

    def compile_(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        def run(*values: Tensor) -> Any:
            begin, end = waiting.pop() if waiting else (bool, bool)
            begin()
            result = graph(*values)
            end()
            return result

        return run

    return compile_


def dropping(**options: Any) -> zbcompile.Pipeline:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(4)]
    pipe = zbcompile.pipeline(
        nn.Sequential(*layers), schedule="1f1b", ranks=2, microbatches=2, loss=F.mse_loss, **options
    )
    return pipe.compile(X, target=X)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_two_pipelines_in_two_threads_draw_as_alone() -> None:
    expected = dropping().step(X, target=X)
    seeded, disturbed, drawn = threading.Event(), threading.Event(), threading.Event()
    first = around_first_pass(lambda: (seeded.set(), disturbed.wait(PATIENCE)), drawn.set)
    second = around_first_pass(lambda: seeded.wait(PATIENCE), lambda: (disturbed.set(), drawn.wait(PATIENCE)))
    pipes = [dropping(backend=first), dropping(backend=second)]
    before = torch.get_rng_state()
    with ThreadPoolExecutor(2) as threads:
        losses = list(threads.map(lambda pipe: pipe.step(X, target=X), pipes))
    assert all(torch.equal(loss, expected) for loss in losses)
    assert torch.equal(before, torch.get_rng_state())


def test_two_threads_in_one_pipeline() -> None:
    """The second is refused, the first ends as if it had been alone."""
    expected = dropping().step(X, target=X)
    inside, refused = threading.Event(), threading.Event()
    pipe = dropping(backend=around_first_pass(lambda: (inside.set(), refused.wait(60)), bool))
    with ThreadPoolExecutor(1) as threads:
        step = threads.submit(pipe.step, X, target=X)
        assert inside.wait(60)
        with pytest.raises(zbcompile.PipelineError, match=r"step 0: another thread is inside this pipeline.*lock"):
            pipe.step(X, target=X)
        refused.set()
        assert torch.equal(step.result(), expected)
    assert pipe.step_index == 1


def test_ranks_of_a_group_do_not_wait_for_another_pipeline() -> None:
    with Turns(wait=True).take("step 0"), ThreadPoolExecutor(1) as threads:

        def other() -> None:
            with Turns(wait=False).take("step 3"):
                pass

        with pytest.raises(zbcompile.PipelineError, match=r"step 3: another thread .* inside another pipeline"):
            threads.submit(other).result()
        with Turns(wait=False).take("within a call of the same thread"):
            pass
    with Turns(wait=False).take("afterwards"):
        pass
