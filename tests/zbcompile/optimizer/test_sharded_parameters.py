"""An optimizer that is divided among replicas trains as one that is not: every bit of losses, norms
and parameters; what it cannot do ends every rank with one line. Gradients that travel in another
dtype are rounded by each replica and added."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import zbcompile
from tests.support.pool import Pool
from tests.support.refused import said
from tests.support.replicated import MICROBATCHES, mesh_of_replicas
from tests.support.sharded_optimizers import Training, at_levels, batches, pipeline_with
from tests.support.training import Case, assert_same_tensors, compiled_once, pipeline_of
from zbcompile.engine.replicas import ALONE_BYTES

TRAININGS = [  # more of them: `examples/benchmarks/optimizer_sweep.py`
    Training("short-mlp", "zb-v", validate="after", clip=0.05),
    Training("small-tied", "zb-v", unsynchronised=2, clip=0.05),
    Training("small-tied", "zb-h1", vocab=1, clip=0.05),
]


def compile_before(training: Training, ranks: int) -> None:
    """For the processes that are forked."""
    with compiled_once(f"{training.problem} {training.dtype}", exact=True):
        case = Case(training.problem, training.schedule, ranks, MICROBATCHES)
        (batch,) = batches(training, 1)
        pipeline_of(case).compile(*batch.args, target=batch.target)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_every_bit_is_that_of_an_optimizer_that_is_not_divided(
    training: Training, pool: Pool
) -> None:
    compile_before(training, 2)
    for results in pool.run(at_levels, training, ranks=4):
        full, divided = results[0], results[-1]
        for other in results[1:]:
            for name in ("losses", "norms", "state"):
                assert_same_tensors(getattr(other, name), getattr(full, name), f"{name}:")
        assert min(full.gradients) > 0
        assert set(divided.gradients) == {0}
        assert divided.held <= full.held / 2 + 2 * 4 * 64


WIDTH = 520  # a weight travels by itself, biases together


class Tied(nn.Sequential):
    """The first and the last layer have one weight, which is complete at the end of the step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self[3].weight = self[0].weight


Named = dict[str, Tensor]


def rounded(zero: int) -> tuple[Named, Named, Named]:
    """The gradients of this replica alone, and its parameters before and after an update by those
    of all."""
    mesh, loss = mesh_of_replicas(), nn.functional.mse_loss
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
    pipe = zbcompile.pipeline(Tied(), schedule="zb-h1", microbatches=2, loss=loss, mesh=mesh)
    with pipe.no_sync():
        pipe.step(x, target=x)
    local = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    pipe.zero_grad()
    dtype = torch.bfloat16
    optimizer = pipe.optimizer(SGD, lr=1.0, zero=zero, overlap=zero > 0, reduce_dtype=dtype)
    before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    pipe.step(x, target=x)
    optimizer.step()
    after = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    pipe.close()
    return local, before, after


def stepped_without_sum(pipe: Any, optimizer: Any, batch: Any) -> None:
    with pipe.no_sync():
        pipe.step(*batch.args, target=batch.target)
    optimizer.step()


def clipped_by_hand(pipe: Any, optimizer: Any, batch: Any) -> None:
    pipe.step(*batch.args, target=batch.target)
    pipe.clip_grad_norm_(1.0)


def frozen_in_between(pipe: Any, optimizer: Any, batch: Any) -> None:
    pipe.step(*batch.args, target=batch.target)
    pipe.model.layers[0].requires_grad_(False)
    pipe.step(*batch.args, target=batch.target)


def different_on_ranks(pipe: Any, optimizer: Any, batch: Any) -> None:
    optimizer.close()
    pipe.compile(*batch.args, target=batch.target)
    pipe.optimizer(SGD, lr=0.1, clip=1.0 + dist.get_rank())


def written_on_the_way(pipe: Any, optimizer: Any, batch: Any) -> None:
    pipe.step(*batch.args, target=batch.target)
    optimizer.step()
    optimizer.zero_grad()
    pipe.model.layers[0].weight.detach().mul_(0.5)
    pipe.step(*batch.args, target=batch.target)


def used_twice(pipe: Any, optimizer: Any, batch: Any) -> None:
    pipe.step(*batch.args, target=batch.target)
    optimizer.step()
    pipe.model.zero_grad()
    pipe.step(*batch.args, target=batch.target)


def second_optimizer(pipe: Any, optimizer: Any, batch: Any) -> None:
    pipe.compile(*batch.args, target=batch.target).optimizer(SGD)


def state_of_another(pipe: Any, optimizer: Any, batch: Any) -> None:
    pipe.step(*batch.args, target=batch.target)
    optimizer.step()
    theirs: list[Any] = [None, None]
    dist.all_gather_object(theirs, optimizer.state_dict())
    optimizer.load_state_dict(theirs[1 - dist.get_rank()])


REFUSED: dict[str, Any] = {
    "is this replica's own: the last step was inside no_sync": stepped_without_sum,
    "needs whole gradients, and pipe.optimizer(zero=1) keeps this replica's": clipped_by_hand,
    "this step does not train layers.0.bias, and the first one did": frozen_in_between,
    "the ranks made different optimizers: clip is 1.0 on rank 0 and 2.0 on": different_on_ranks,
    "that an update has used already. Call optimizer.zero_grad()": used_twice,
    "layers.0.bias is in two optimizers": second_optimizer,
    "of another rank, or another zero=": state_of_another,
    "layers.0.weight was written between the update of the": written_on_the_way,  # ends the group
}


def refusing(folder: str) -> Any:
    """Returns what is said, and whether a checkpoint brings the state back."""
    mesh, training, results = mesh_of_replicas(), Training("short-mlp"), []
    (batch,) = batches(training, 1, mesh)
    with compiled_once("short-mlp float32", exact=True):
        pipe, optimizer = pipeline_with(training, 1, mesh)
        pipe.step(*batch.args, target=batch.target)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    zbcompile.save_checkpoint(folder, pipe, optimizer)
    optimizer.load_state_dict({k: v for k, v in before.items() if not k.startswith("state.")})
    zbcompile.load_checkpoint(folder, pipe, optimizer)
    after, names = optimizer.state_dict(), [name for name in before if name.startswith("state.")]
    pairs = [[torch.as_tensor(state[name]) for name in names] for state in (after, before)]
    for call in REFUSED.values():
        cached = call is not frozen_in_between
        with compiled_once("short-mlp float32", exact=True) if cached else nullcontext():
            pipe, optimizer = pipeline_with(training, 1, mesh)
            results.append(said(lambda call=call, a=pipe, b=optimizer: call(a, b, batch)))
            pipe.close()
    return results, len(names) > 0 and all(map(torch.equal, *pairs))


@pytest.mark.slow
def test_every_rank_ends_with_one_line(pool: Pool, tmp_path: Path) -> None:
    compile_before(Training("short-mlp"), 1)
    shares = pool.run(refusing, str(tmp_path))
    for results, same in shares:
        assert same
        for message, (error, text) in zip(REFUSED, results, strict=True):
            assert error in ("PipelineError", "FaultError"), f"{message}: {text}"
            assert message in text
            assert "\n" not in text


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("zero", [1, 0])
def test_sums_are_those_of_rounded_gradients(pool: Pool, zero: int) -> None:
    assert WIDTH * WIDTH * 4 > ALONE_BYTES > WIDTH * 4
    results = pool.run(rounded, zero)
    for (local, before, after), (theirs, _, _) in (results, results[::-1]):
        sums = {name: (local[name].bfloat16() + theirs[name].bfloat16()).float() for name in local}
        expected = {name: before[name] - sums[name] for name in before}
        assert_same_tensors(after, expected, "after the update:")
