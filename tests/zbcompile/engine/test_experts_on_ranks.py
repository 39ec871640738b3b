"""Experts on several ranks, without dropped tokens: bit for bit what one process computes that has
them all, whatever the router does."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.oracle import Gradients
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors, gradients_of

MICROBATCHES, ROWS = 4, 6
WIDTH, EXPERTS, CHOSEN, LAYERS = 16, 8, 2, 2
SHARDED = {"*.up": {"ep": "shard"}, "*.down": {"ep": "shard"}}


class Layer(nn.Module):
    """Dense computation, normed over the batch, then experts; `exchange` moves tokens to them."""

    def __init__(self, group: Any, factor: float, norm: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.route = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 6)
        self.exchange = zbcompile.ExpertExchange(EXPERTS, group, factor)

    def keep(self, rank: int) -> None:
        """Keep the experts of a rank."""
        for name in ("up", "down"):
            part = getattr(self, name).detach().chunk(self.exchange.ranks)[rank].clone()
            setattr(self, name, nn.Parameter(part))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.mix(x)))
        weights, chosen = self.choose(x, bias)
        rows, ends, route = self.exchange.dispatch(x.repeat_interleave(CHOSEN, 0), chosen.flatten())
        return self.join(x, self.exchange.combine(self.compute(rows, ends), route), weights)

    def choose(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.route(x).softmax(-1)
        chosen = (scores + bias).topk(CHOSEN).indices
        return scores.gather(1, chosen), chosen

    def compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(F.silu(F.grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)

    def join(self, x: Tensor, created: Tensor, weights: Tensor) -> Tensor:
        return x + (created.view(-1, CHOSEN, WIDTH) * weights.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    def __init__(
        self,
        group: Any = None,
        factor: float = 1.0,
        norm: bool = False,
        kind: type[Layer] = Layer,
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(group, factor, norm) for _ in range(layers))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, bias)
        return x


def mixture_of(rank: int, *inputs: Any, **options: Any) -> Mixture:
    """One rank's part of a `Mixture`, whose arguments follow."""
    model = Mixture(*inputs, **options)
    for layer in model.layers:
        layer.keep(rank)
    return model


def everywhere(
    models: Sequence[Mixture], xs: list[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    """Returns what all ranks compute, in one process, with all experts of the first of `models`: rows
    sorted by expert, those of one expert by rank."""
    for at, first in enumerate(models[0].layers):
        layers = [model.layers[at] for model in models]
        xs = [torch.tanh(layer.norm(layer.mix(x))) for layer, x in zip(layers, xs, strict=True)]
        routed = [layer.choose(x, bias) for layer, x, bias in zip(layers, xs, biases, strict=True)]
        rows = torch.cat([x.repeat_interleave(CHOSEN, 0) for x in xs])
        experts = torch.cat([chosen.flatten() for _, chosen in routed])
        order = experts.argsort(stable=True)
        ends = torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()
        created = first.compute(rows[order], ends)
        back = torch.zeros_like(created).index_copy(0, order, created).chunk(len(models))
        parts = zip(layers, xs, back, routed, strict=True)
        xs = [layer.join(x, rows, weights) for layer, x, rows, (weights, _) in parts]
    return xs


def bias_of(router: str, microbatch: int, rows: int) -> Tensor:
    """Returns what is added to the scores: nothing ("even"); much, so that each expert gets equally many
    ("balanced"), or two experts of one rank get all, always or in turn."""
    bias = torch.zeros(rows, EXPERTS)
    if router == "balanced":
        for token in range(rows):
            bias[token, [token % EXPERTS, (token + EXPERTS // 2) % EXPERTS]] = 9
    if router == "one":
        bias[:, :CHOSEN] = 9
    elif router == "turns":
        first = CHOSEN * (microbatch % (EXPERTS // CHOSEN))
        bias[:, first : first + CHOSEN] = 9
    return bias


class LayerOfCounts(Layer):
    """As torchtitan writes it: functional all-to-alls whose parts have sizes that the host reads.
    `exchange` is not used."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.mix(x)))
        weights, chosen = self.choose(x, bias)
        if self.exchange.ranks == 1:
            return super().forward(x, bias)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(
            0, chosen.flatten(), torch.ones_like(order)
        )
        ranks, group = self.exchange.ranks, self.exchange.group
        with torch.no_grad():
            come = wait_tensor(all_to_all_single(counts, None, None, group))
            sent = counts.view(ranks, -1).sum(1).to(torch.device("cpu"), non_blocking=True).tolist()
            arriving = come.view(ranks, -1).sum(1).to(torch.device("cpu")).tolist()
        rows = all_to_all_single_autograd(x[order // CHOSEN], arriving, sent, group)
        places = self.by_expert(come.view(ranks, -1), rows.shape[0])
        ends = come.view(ranks, -1).sum(0).cumsum(0).int()
        created = self.compute(rows[places, :], ends)
        back = created.new_empty(rows.shape)
        back[places, :] = created
        back = all_to_all_single_autograd(back, sent, arriving, group)
        return self.join(x, torch.zeros_like(back).index_copy(0, order, back), weights)

    def by_expert(self, counts: Tensor, total: int) -> Tensor:
        """Of the rows sorted by expert the places where they have arrived, sorted by rank."""
        begins = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).t().reshape(-1)
        lengths = counts.t().reshape(-1)
        group = torch.arange(lengths.shape[0]).repeat_interleave(lengths, output_size=total)
        return begins[group] + torch.arange(group.shape[0]) - (lengths.cumsum(0) - lengths)[group]


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
    "no-sync": Run(
        routers=("balanced", "one", "turns"), unsynchronised=True, norm=True, alone=True
    ),
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
    [
        pytest.param(name, marks=[RARE] * (name in ("four", "dualpipe-v", "1f1b-overlap")))
        for name in CASES
    ],
)
def test_bits_of_one_process(case: str, pool: Pool) -> None:
    """The tokens of all ranks together, those of one expert in the order of the ranks."""
    run = CASES[case]
    compare(run, pool.run(trained, run, ranks=run.ep if run.alone else 4))


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
