"""An optimizer that does not update as its class says, or that a pipeline cannot call, is refused when it is made; what
says the truth trains as it does undivided."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import LBFGS, SGD, Adafactor, Optimizer

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.optimizers import EightBits, GlobalNorm, Lars, Plain, Shampoo, saying
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.replicated import MICROBATCHES, REPLICAS, ROWS, mesh_of_replicas
from tests.support.training import Case, assert_same_tensors, compiled_once, pipeline_of


class Sam(Plain):
    """Needs the gradients at a second point."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "Sam requires closure"


def made(kind: type[Optimizer], **options: Any) -> Optimizer:
    return pipeline_of(Case("mlp", "1f1b", 2, 4)).optimizer(kind, **options)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (EightBits, {"elementwise": True}),
        (EightBits, {"blockwise": 32}),
        (Lars, {"elementwise": True}),
        (Lars, {"blockwise": 64}),
        (GlobalNorm, {"matrixwise": True}),
    ],
    ids=str,
)
def test_a_rule_that_does_not_hold_is_refused(kind: type[Optimizer], said: dict[str, Any]) -> None:
    with pytest.raises(zbcompile.PipelineError, match=rf"{kind.__name__} says that it updates .* got other values"):
        made(saying(kind, **said))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Plain, {"elementwise": True}),
        (EightBits, {"blockwise": 64}),
        (EightBits, {"blockwise": 128}),
        (Lars, {"matrixwise": True}),
        (SGD, {"elementwise": True}),
        (GlobalNorm, {}),
    ],
    ids=str,
)
def test_a_rule_that_holds_is_admitted(kind: type[Optimizer], said: dict[str, Any]) -> None:
    """And no generator has drawn."""
    before = torch.get_rng_state()
    assert made(saying(kind, **said), groups=[{"params": lambda _, p: p.ndim < 2, "lr": 1e-3}], lr=1e-2)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_one_rule_can_be_said() -> None:
    for said in ({"elementwise": True, "matrixwise": True}, {"blockwise": True}, {"blockwise": -1}):
        with pytest.raises(zbcompile.PipelineError, match=r"Plain says .*; expected one of elementwise = True, matrix"):
            made(saying(Plain, **said))


@pytest.mark.parametrize("kind", [LBFGS, Sam])
def test_what_needs_a_closure_is_refused_in_one_sentence(kind: type[Optimizer]) -> None:
    with pytest.raises(zbcompile.PipelineError, match=rf"{kind.__name__}.step\(\) needs a closure") as raised:
        made(kind)
    assert "\n" not in str(raised.value)


def trained_in_blocks(zero: int, early: bool) -> Any:
    """The parameters after three updates; a checkpoint of parts is refused."""
    mesh, chosen = mesh_of_replicas(), PROBLEMS["mlp"]
    pipe = zbcompile.pipeline(
        chosen.model(), loss=chosen.loss, mesh=mesh, schedule="1f1b", microbatches=MICROBATCHES, exact=True
    )
    optimizer = pipe.optimizer(saying(EightBits, blockwise=64), zero=zero, early=early)
    for batch in chosen.batches(3, REPLICAS * MICROBATCHES * ROWS):
        own = list(batch.parts(REPLICAS))[mesh["dp"].get_local_rank()]
        pipe.step(*own.args, target=own.target)
        optimizer.step()
        optimizer.zero_grad()
    if zero:
        with pytest.raises(zbcompile.PipelineError, match=r"keeps scale of shape .* Save optimizer.state_dict\(\)"):
            zbcompile.save_checkpoint("never-written", pipe, optimizer)
    found = pipe.state_dict(full=True)
    pipe.close()
    return found


def trained_with_each_zero() -> list[Any]:
    torch.set_num_threads(1)
    with compiled_once("mlp float32", exact=True):
        return [trained_in_blocks(*each) for each in ((0, False), (1, False), (2, True), (3, False))]


@pytest.mark.slow
def test_replicas_divide_between_blocks(pool: Pool) -> None:
    for whole, *divided in pool.run(trained_with_each_zero, ranks=4):
        for each in divided:
            assert_same_tensors(each, whole, "state dict:")


def refused_on_dtensors(kind: type[Optimizer]) -> str:
    mesh, x = mesh_of(pp=1, tp=2), torch.ones(2, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", microbatches=2, loss=nn.functional.mse_loss)
    pipe.compile(x, target=x)
    with pytest.raises(zbcompile.PipelineError) as raised:
        pipe.optimizer(kind)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Adafactor, Shampoo])
def test_an_optimizer_that_cannot_update_dtensors_says_so_in_one_line(kind: type[Optimizer], pool: Pool) -> None:
    for text in pool.run(refused_on_dtensors, kind, ranks=2):
        assert f"{kind.__name__}.step() fails on parameters that are DTensors: " in text
        assert "\n" not in text
