"""Experts on several ranks, without dropped tokens: bit for bit what one process computes that has
them all, whatever the router does."""

from contextlib import nullcontext
from functools import reduce
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import zbcompile
from tests.support.expert_layers import (
    SHARDED,
    WIDTH,
    Layer,
    LayerOfCounts,
    Mixture,
    bias_of,
    everywhere,
    mixture_of,
)
from tests.support.meshes import mesh_of
from tests.support.oracle import Gradients
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors, gradients_of

MICROBATCHES, ROWS = 4, 6


class Run(NamedTuple):
    """The training of a rank: the schedule, ranks along "ep", the router in each of its steps, of which
    all but the last may be inside no_sync, the capacity, whether there is a batch norm, the kind of
    layer, and whether there are no ranks but those of "ep". A rank without a pipeline has one
    layer.
    """

    schedule: str = "zb-h1"
    ep: int = 2
    routers: tuple[str, ...] = ("balanced",)
    factor: float = 4.0
    norm: bool = False
    unsynchronised: bool = False
    layer: type[Layer] = Layer
    alone: bool = False

    @property
    def layers(self) -> int:
        return 1 if self.ep == 4 or self.alone else 2


class Seen(NamedTuple):
    """The results of a rank: losses of all steps, gradients after the last one, parameters after an
    update, buffers."""

    losses: list[Tensor]
    gradients: Gradients
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def batch_of(run: Run, rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(100 * step + rank)
    x, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH).unbind()
    return x, torch.cat([bias_of(run.routers[step], i, ROWS) for i in range(MICROBATCHES)]), target


def pipeline_of(run: Run) -> tuple[zbcompile.Pipeline, Mixture, int]:
    rest = dist.get_world_size() // run.ep
    mesh = mesh_of(ep=run.ep, pp=rest)
    rank = mesh["ep"].get_local_rank()
    model = mixture_of(rank, mesh["ep"].get_group(), run.factor, run.norm, run.layer, run.layers)
    options: dict[str, Any] = {
        "schedule": run.schedule,
        "microbatches": MICROBATCHES,
        "loss": F.mse_loss,
    }
    return (
        zbcompile.pipeline(model, mesh=mesh, placements=SHARDED, exact=True, **options),
        model,
        rank,
    )


def trained(run: Run) -> tuple[int, Seen]:
    pipe, _, rank = pipeline_of(run)
    losses = []
    for step in range(len(run.routers)):
        x, bias, target = batch_of(run, rank, step)
        inside = run.unsynchronised and step + 1 < len(run.routers)
        with pipe.no_sync() if inside else nullcontext():
            losses.append(pipe.step(x, bias, target=target))
    gradients = gradients_of(pipe)
    state = {name: item.clone() for name, item in pipe.state_dict().items()}
    pipe.close()
    parameters = {
        name: state.pop(name)
        for name in list(state)
        if not ("running" in name or "tracked" in name)
    }
    return rank, Seen(losses, gradients, parameters, state)


def oracle(run: Run) -> tuple[list[Tensor], list[Mixture]]:
    """The losses of all steps, and the models with their gradients; the first one has all experts,
    and after a step that sums over ranks the sums: there the first rank goes on, and the others
    begin anew."""
    models = [Mixture(None, 1.0, run.norm, layers=run.layers) for _ in range(run.ep)]
    losses = []
    for step in range(len(run.routers)):
        batches = [
            [t.chunk(MICROBATCHES) for t in batch_of(run, rank, step)] for rank in range(run.ep)
        ]
        scaled: list[list[Tensor]] = []
        for i in range(MICROBATCHES):
            built = everywhere(
                models, [item[0][i] for item in batches], [item[1][i] for item in batches]
            )
            parts = [
                F.mse_loss(y, item[2][i]) / (MICROBATCHES * run.ep)
                for y, item in zip(built, batches, strict=True)
            ]
            torch.autograd.backward(parts)
            scaled.append([part.detach() for part in parts])
        losses.append(
            reduce(
                torch.add, [scaled[i][rank] for rank in range(run.ep) for i in range(MICROBATCHES)]
            )
        )
        if not run.unsynchronised or step + 1 == len(run.routers):
            sum_over_ranks(models)
    return losses, models


def sum_over_ranks(models: list[Mixture]) -> None:
    for name, first in models[0].named_parameters():
        if not is_expert(name):
            rest = [dict(model.named_parameters())[name] for model in models[1:]]
            first.grad = reduce(torch.add, [item.grad for item in rest], first.grad)
            for item in rest:
                item.grad.zero_()


def is_expert(name: str) -> bool:
    return name.endswith((".up", ".down"))


def compare(run: Run, results: list[tuple[int, Seen]]) -> None:
    losses, models = oracle(run)
    expected = dict(models[0].named_parameters())
    for rank, seen in results:
        assert_same_tensors(seen.losses, losses, "loss of step")
        for name, gradient in seen.gradients.items():
            full = expected[name].grad
            local = full.chunk(run.ep)[rank] if is_expert(name) else full
            if run.ep == 2 or is_expert(name):
                assert torch.equal(gradient, local), name
            else:  # four parts are added in gloo's order
                assert torch.allclose(
                    gradient, local, rtol=0, atol=1e-6 * float(local.abs().max())
                ), name
        buffers = dict(models[0].named_buffers())  # replicas go on with the first one's
        assert_same_tensors(seen.buffers, {name: buffers[name] for name in seen.buffers}, "buffer")


CASES = {
    "no-sync": Run(routers=("balanced", "one", "turns"), unsynchronised=True, norm=True),
    "four": Run(ep=4, schedule="1f1b", routers=("turns",), norm=True),
    "dualpipe-v": Run(schedule="dualpipe-v", routers=("even", "one")),
    "functional all-to-alls": Run(
        schedule="1f1b-overlap", routers=("even", "one"), factor=2.0, layer=LayerOfCounts
    ),
    "1f1b-overlap": Run(schedule="1f1b-overlap", routers=("even",), factor=2.0),
}
RARE = pytest.mark.beyond_sample  # each takes 10 to 60 seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[RARE] * (name in ("dualpipe-v", "1f1b-overlap"))) for name in CASES],
)
def test_bits_of_one_process(case: str, pool: Pool) -> None:
    """The tokens of all ranks together, those of one expert in the order of the ranks."""
    compare(CASES[case], pool.run(trained, CASES[case], ranks=4))


def overflowing(run: Run) -> tuple[int, Seen]:
    """Runs `trained` after a step in which more tokens chose one rank than there is room for."""
    pipe, model, rank = pipeline_of(run)
    x, bias, target = batch_of(run._replace(routers=("one",)), rank, 0)
    with pytest.raises(RuntimeError, match="number of ranks is enough for any routing"):
        model(x, bias)
    with pytest.raises(zbcompile.PipelineError, match="Pass a larger factor= to ExpertExchange"):
        pipe.step(x, bias, target=target)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    x, bias, target = batch_of(run, rank, 0)
    losses = [pipe.step(x, bias, target=target)]
    gradients = gradients_of(pipe)
    pipe.close()
    return rank, Seen(losses, gradients, {}, {})


@pytest.mark.slow
def test_tokens_without_room_are_an_error_and_the_next_step_goes_on(pool: Pool) -> None:
    run = Run(schedule="1f1b", factor=1.0, alone=True)
    compare(run, pool.run(overflowing, run, ranks=2))


def evaluated_and_refused() -> float:
    """Returns the difference of an evaluation from eager. Batches of two sizes, both compiled, are
    refused."""
    pipe, model, rank = pipeline_of(Run(schedule="1f1b", alone=True))
    x, bias, target = batch_of(Run(), rank, 0)
    rows = (4 * MICROBATCHES, ROWS * MICROBATCHES)
    for count in rows:
        pipe.step(x[:count], bias[:count], target=target[:count])
    with torch.no_grad():
        difference = float((pipe.eval(x, bias) - model(x, bias)).abs().max())
    count = rows[rank]
    with pytest.raises(zbcompile.PipelineError, match="pass batches of one size"):
        pipe.step(x[:count], bias[:count], target=target[:count])
    pipe.close()
    return difference


@pytest.mark.slow
def test_evaluations_are_eagers_and_batches_of_other_sizes_are_refused(pool: Pool) -> None:
    assert max(pool.run(evaluated_and_refused, ranks=2)) <= 1e-6
