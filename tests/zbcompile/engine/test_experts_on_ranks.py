"""Experts on several ranks, without dropped tokens: bit for bit what one process computes that has
them all, whatever the router does."""

from contextlib import nullcontext
from functools import reduce
from typing import Any, NamedTuple

import pytest
import torch
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

MICROBATCHES, ROWS, WIDTH, EXPERTS, CHOSEN = 4, 6, 16, 8, 2
SHARDED = {"*.up": {"ep": "shard"}, "*.down": {"ep": "shard"}}


class Layer(nn.Module):
    """Dense computation, normed over the batch, then experts; `exchange` moves tokens to them."""

    def __init__(self, group: Any, factor: float) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
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
        x, weights, chosen = self.choose(x, bias)
        rows, ends, route = self.exchange.dispatch(x.repeat_interleave(CHOSEN, 0), chosen.flatten())
        return self.join(x, self.exchange.combine(self.compute(rows, ends), route), weights)

    def choose(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.tanh(self.norm(self.mix(x)))
        scores = self.route(x).softmax(-1)
        chosen = (scores + bias).topk(CHOSEN).indices
        return x, scores.gather(1, chosen), chosen

    def compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(F.silu(F.grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)

    def join(self, x: Tensor, created: Tensor, weights: Tensor) -> Tensor:
        return x + (created.view(-1, CHOSEN, WIDTH) * weights.unsqueeze(-1)).sum(1)


class LayerOfCounts(Layer):
    """As torchtitan writes it: functional all-to-alls whose parts have sizes that the host reads."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x, weights, chosen = self.choose(x, bias)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(
            0, chosen.flatten(), torch.ones_like(order)
        )
        ranks, group = self.exchange.ranks, self.exchange.group
        with torch.no_grad():
            come = wait_tensor(all_to_all_single(counts, None, None, group)).view(ranks, -1)
            sent = counts.view(ranks, -1).sum(1).to(torch.device("cpu"), non_blocking=True).tolist()
            arriving = come.sum(1).to(torch.device("cpu")).tolist()
        rows = all_to_all_single_autograd(x[order // CHOSEN], arriving, sent, group)
        places = self.by_expert(come, rows.shape[0])
        created = self.compute(rows[places, :], come.sum(0).cumsum(0).int())
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


class Mixture(nn.Module):
    def __init__(self, group: Any, factor: float, kind: type[Layer], layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(group, factor) for _ in range(layers))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, bias)
        return x


def everywhere(models: list[Mixture], xs: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """Returns what all ranks compute, in one process, with all experts of the first of `models`:
    rows sorted by expert, those of one expert by rank."""
    for at, first in enumerate(models[0].layers):
        layers = [model.layers[at] for model in models]
        routed = [layer.choose(*item) for layer, *item in zip(layers, xs, biases, strict=True)]
        rows = torch.cat([x.repeat_interleave(CHOSEN, 0) for x, _, _ in routed])
        experts = torch.cat([chosen.flatten() for _, _, chosen in routed])
        order = experts.argsort(stable=True)
        ends = torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()
        created = first.compute(rows[order], ends)
        back = torch.zeros_like(created).index_copy(0, order, created).chunk(len(models))
        parts = zip(layers, routed, back, strict=True)
        xs = [layer.join(x, rows, weights) for layer, (x, weights, _), rows in parts]
    return xs


def bias_of(router: str, microbatch: int) -> Tensor:
    """Returns what is added to the scores: nothing ("even"); much, so that each expert gets equally
    many ("balanced"), or two experts of one rank get all, always ("one") or in turn ("turns")."""
    bias = torch.zeros(ROWS, EXPERTS)
    for token in range(ROWS):
        first = CHOSEN * (microbatch % (EXPERTS // CHOSEN)) * (router == "turns")
        both = [token % EXPERTS, (token + EXPERTS // 2) % EXPERTS]
        bias[token, both if router == "balanced" else [first, first + 1]] = 9 * (router != "even")
    return bias


class Run(NamedTuple):
    """The training of a rank: the schedule, processes along "ep" and "pp", the router in each step,
    of which all but the last may be inside no_sync, the capacity, and the kind of layer."""

    schedule: str = "1f1b"
    ep: int = 2
    pp: int = 1
    routers: tuple[str, ...] = ("balanced",)
    factor: float = 4.0
    unsynchronised: bool = False
    layer: type[Layer] = Layer


Seen = tuple[list[Tensor], Gradients, dict[str, Tensor]]  # losses, last gradients, buffers


def batch_of(run: Run, rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(100 * step + rank)
    x, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH).unbind()
    return x, torch.cat([bias_of(run.routers[step], i) for i in range(MICROBATCHES)]), target


def pipeline_of(run: Run) -> tuple[zbcompile.Pipeline, Mixture, int]:
    mesh = mesh_of(ep=run.ep, pp=run.pp)
    rank = mesh["ep"].get_local_rank()
    model = Mixture(mesh["ep"].get_group(), run.factor, run.layer, run.pp)
    for layer in model.layers:
        layer.keep(rank)
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "loss": F.mse_loss, "exact": True}
    options |= {"mesh": mesh, "placements": SHARDED, "schedule": run.schedule}
    return zbcompile.pipeline(model, **options), model, rank


def trained(run: Run, overflowing: bool = False) -> tuple[int, Seen]:
    """`overflowing`: after a step in which more tokens chose one rank than there is room for."""
    pipe, model, rank = pipeline_of(run)
    losses = []
    if overflowing:
        x, bias, target = batch_of(run._replace(routers=("one",)), rank, 0)
        with pytest.raises(RuntimeError, match="number of ranks is enough for any routing"):
            model.eval()(x, bias)
        model.train()
        with pytest.raises(
            zbcompile.PipelineError, match="Pass a larger factor= to ExpertExchange"
        ):
            pipe.step(x, bias, target=target)
        assert all(parameter.grad is None for parameter in pipe.parameters())
    for step in range(len(run.routers)):
        x, bias, target = batch_of(run, rank, step)
        inside = run.unsynchronised and step + 1 < len(run.routers)
        with pipe.no_sync() if inside else nullcontext():
            losses.append(pipe.step(x, bias, target=target))
    state = {name: item.clone() for name, item in pipe.state_dict().items() if "norm.r" in name}
    seen = losses, gradients_of(pipe), {} if overflowing else state
    if overflowing:
        refuse_other_sizes(pipe, rank)
    pipe.close()
    return rank, seen


def refuse_other_sizes(pipe: zbcompile.Pipeline, rank: int) -> None:
    """Batches of two sizes, both compiled."""
    x, bias, target = batch_of(Run(), rank, 0)
    small = 4 * MICROBATCHES
    pipe.step(x[:small], bias[:small], target=target[:small])
    count = (small, len(x))[rank]
    with pytest.raises(zbcompile.PipelineError, match="pass batches of one size"):
        pipe.step(x[:count], bias[:count], target=target[:count])


def oracle(run: Run) -> tuple[list[Tensor], list[Mixture]]:
    """The losses of all steps, and the models with their gradients; the first one has all experts,
    and after a step that sums over ranks the sums: there the first rank goes on, and the others
    begin anew."""
    models, losses = [Mixture(None, 1.0, Layer, run.pp) for _ in range(run.ep)], []
    for step in range(len(run.routers)):
        batches = [
            [t.chunk(MICROBATCHES) for t in batch_of(run, rank, step)] for rank in range(run.ep)
        ]
        scaled: list[list[Tensor]] = []
        for i in range(MICROBATCHES):
            inputs = ([item[0][i] for item in batches], [item[1][i] for item in batches])
            targets = [item[2][i] for item in batches]
            pairs = zip(everywhere(models, *inputs), targets, strict=True)
            parts = [F.mse_loss(y, target) / (MICROBATCHES * run.ep) for y, target in pairs]
            torch.autograd.backward(parts)
            scaled.append([part.detach() for part in parts])
        by_rank = [scaled[i][rank] for rank in range(run.ep) for i in range(MICROBATCHES)]
        losses.append(reduce(torch.add, by_rank))
        if not run.unsynchronised or step + 1 == len(run.routers):
            for name, *copies in zip(
                dict(models[0].named_parameters()), *(m.parameters() for m in models), strict=True
            ):
                if not is_expert(name):
                    copies[0].grad = reduce(torch.add, [item.grad for item in copies])
                    for item in copies[1:]:
                        item.grad.zero_()
    return losses, models


def is_expert(name: str) -> bool:
    return name.endswith((".up", ".down"))


def compare(run: Run, results: list[tuple[int, Seen]]) -> None:
    losses, models = oracle(run)
    for rank, (seen, gradients, buffers) in results:
        assert_same_tensors(seen, losses, "loss of step")
        for name, gradient in gradients.items():
            full = models[0].get_parameter(name).grad
            local = full.chunk(run.ep)[rank] if is_expert(name) else full
            bits = run.ep == 2 or is_expert(name)  # four parts are added in gloo's order
            bound = 0 if bits else 1e-6 * float(local.abs().max())
            torch.testing.assert_close(gradient, local, rtol=0, atol=bound, msg=name)
        for name, buffer in buffers.items():  # replicas go on with the first one's
            assert torch.equal(buffer, models[0].get_buffer(name)), name


RARE = pytest.mark.beyond_sample
COUNTS = Run("1f1b-overlap", 2, 2, ("even", "one"), 2.0, layer=LayerOfCounts)
CASES = [
    pytest.param(COUNTS, id="functional all-to-alls", marks=RARE),
    pytest.param(Run("1f1b", 4, 1, ("turns",)), id="four", marks=RARE),
    pytest.param(
        Run("dualpipe-v", 2, 1, ("even", "one")), id="dualpipe-v, a stage without experts"
    ),
    pytest.param(Run("dualpipe-v", 2, 2, ("even", "one")), id="dualpipe-v"),
]


@pytest.mark.slow
@pytest.mark.parametrize("run", CASES)
def test_bits_of_one_process(run: Run, pool: Pool) -> None:
    """The tokens of all ranks together, those of one expert in the order of the ranks."""
    compare(run, pool.run(trained, run, ranks=run.ep * run.pp))


@pytest.mark.slow
def test_tokens_without_room_and_batches_of_other_sizes_are_errors(pool: Pool) -> None:
    """The step after one that has failed goes on, inside no_sync too."""
    run = Run(routers=("balanced", "balanced"), factor=1.0, unsynchronised=True)
    compare(run, pool.run(trained, run, True, ranks=2))
