"""Collectives inside the graphs: experts that live on different ranks, two pipelines wide."""

from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from moe import Experts, MoE
from tests.support.oracle import Gradients
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors, gradients_of

EXPERT = {"*.up.*": {"ep": "shard"}, "*.down.*": {"ep": "shard"}}
LAYERS, WIDTH, EXPERTS, MICROBATCHES, ROWS = 2, 8, 2, 4, 6


class Seen(NamedTuple):
    """What one rank saw of one step: its expert, the loss, gradients, its model's output, the norm,
    and the refusal."""

    expert: int
    loss: Tensor
    gradients: Gradients
    output: Tensor
    norm: Tensor
    refusal: str


def model_of(expert: int, group: Any) -> MoE:
    """Everything but the expert is the same on all ranks."""
    torch.manual_seed(7)
    model = MoE(LAYERS, WIDTH, group)
    torch.manual_seed(expert)
    for each in model.experts:
        each.up.reset_parameters()  # type: ignore[union-attr, operator]
        each.down.reset_parameters()  # type: ignore[union-attr, operator]
    return model


def batch_of(expert: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + expert)
    return torch.randn(2, MICROBATCHES * ROWS, WIDTH).unbind()


def trained(schedule: str, folder: Path) -> Seen:
    """One step of this rank's pipeline. The pipelines of both experts exchange tokens, rank by
    rank. Saved, loaded on other groups of the mesh and run again, they give the same bits."""
    shape = (EXPERTS, dist.get_world_size() // EXPERTS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "pp"))
    expert = mesh["ep"].get_local_rank()
    inputs, targets = batch_of(expert)
    model = model_of(expert, mesh["ep"].get_group())
    options = {
        "schedule": schedule,
        "microbatches": MICROBATCHES,
        "loss": F.mse_loss,
        "exact": True,
    }
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pipe = zbcompile.pipeline(model, mesh=mesh, placements=EXPERT, **options)
    loss = pipe.step(inputs, target=targets)
    gradients, output, norm = gradients_of(pipe), pipe.eval(inputs), pipe.clip_grad_norm_(1e9)
    pipe.program.save(folder / "program")
    pipe.close()
    other = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "pp"))
    loaded = zbcompile.load(folder / "program", state, mesh=other)
    assert torch.equal(loaded.step(inputs, target=targets), loss)
    assert_same_tensors(gradients_of(loaded), gradients, "gradient of")
    loaded.close()
    with pytest.raises(zbcompile.PipelineError) as refused:
        zbcompile.load(
            folder / "program", mesh=init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
        )
    return Seen(expert, loss, gradients, output, norm, str(refused.value))


def everywhere(models: list[MoE], xs: list[Tensor]) -> list[Tensor]:
    """What the ranks compute together, in one process: the exchange is an exchange of parts of
    tensors."""
    for layer in range(LAYERS):
        experts = [model.experts[layer] for model in models]
        xs = [torch.tanh(model.mixers[layer](x)) for model, x in zip(models, xs, strict=True)]
        sent = [each.choose(x) for each, x in zip(experts, xs, strict=True)]
        made = [
            each.expert(x) for each, x in zip(experts, swapped([s[0] for s in sent]), strict=True)
        ]
        parts = zip(experts, xs, swapped(made), sent, strict=True)
        xs = [
            each.combine(x, back, chosen, weights) for each, x, back, (_, chosen, weights) in parts
        ]
    return xs


def swapped(tensors: list[Tensor]) -> list[Tensor]:
    parts = [tensor.chunk(EXPERTS) for tensor in tensors]
    return [torch.cat(received) for received in zip(*parts, strict=True)]


def oracle() -> tuple[list[Tensor], list[MoE], list[Tensor]]:
    """The losses of both batches, models with gradients and outputs, without pipelines and without
    collectives."""
    group = SimpleNamespace(size=lambda: EXPERTS, group_name="")
    models = [model_of(expert, group) for expert in range(EXPERTS)]
    batches = [batch_of(expert) for expert in range(EXPERTS)]
    parts = [[tensor.chunk(MICROBATCHES) for tensor in batch] for batch in batches]
    totals, outputs = [torch.zeros(()) for _ in models], []
    for i in range(MICROBATCHES):
        results = everywhere(models, [inputs[i] for inputs, _ in parts])
        losses = [
            F.mse_loss(y, targets[i]) / (MICROBATCHES * EXPERTS)
            for y, (_, targets) in zip(results, parts, strict=True)
        ]
        torch.autograd.backward(losses)
        totals = [total + loss.detach() for total, loss in zip(totals, losses, strict=True)]
        outputs.append([result.detach() for result in results])
    return totals, models, [torch.cat(each) for each in zip(*outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("zb-h1", 2), pytest.param("dualpipe-v", 4, marks=pytest.mark.beyond_sample)],
)
def test_experts_on_other_ranks(schedule: str, ranks: int, pool: Pool, tmp_path: Path) -> None:
    """The gradients are those of one process that has all experts: of an expert the sum over all
    tokens that reached it, of the rest the sum over both batches. Under dualpipe-v pairs interleave
    the exchanges."""
    losses, models, outputs = oracle()
    whole = [gradients_of(model) for model in models]
    experts = [gradient for each in whole for name, gradient in each.items() if is_expert(name)]
    once = experts + [sum(each[name] for each in whole) for name in whole[0] if not is_expert(name)]  # type: ignore
    norm = nn.utils.get_total_norm(once)  # type: ignore[arg-type]
    for seen in pool.run(trained, schedule, tmp_path, ranks=ranks):
        assert torch.allclose(seen.loss, sum(losses), rtol=1e-6)
        assert torch.allclose(seen.norm, norm, rtol=1e-6)
        for name, gradient in seen.gradients.items():
            parts = (
                [whole[seen.expert][name]] if is_expert(name) else [each[name] for each in whole]
            )
            assert gradient is not None
            assert torch.allclose(
                gradient, sum(parts), rtol=0, atol=1e-6 * float(gradient.abs().max())
            )  # type: ignore
        assert_same_tensors([seen.output], [outputs[seen.expert]], "output")
        assert 'compiled for 2 ranks along "ep", but there are 1' in seen.refusal


def is_expert(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in EXPERT)


class Plain(nn.Module):
    """Exchanges as torch.distributed's own calls do, which autograd does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        dist.all_reduce(y)
        return y


class Branching(nn.Module):
    """Exchanges in a branch that some ranks may not take."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.experts = Experts(WIDTH, group)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.experts(y), lambda y: self.layer(y), (x,))


def refusals() -> list[str]:
    texts = []
    for model in (Plain(), Branching(dist.group.WORLD)):
        x = torch.randn(4, WIDTH)
        with pytest.raises(zbcompile.CaptureError) as refused:
            zbcompile.pipeline(model, schedule="1f1b", microbatches=2, loss=F.mse_loss).step(
                x, target=x
            )
        texts.append(str(refused.value))
    return texts


@pytest.mark.slow
def test_what_cannot_be_part_of_a_graph_is_refused(pool: Pool) -> None:
    plain, branching = pool.run(refusals, ranks=1)[0]
    assert "forward calls torch.distributed.all_reduce on an activation" in plain
    assert "communicates inside of torch.cond" in branching
