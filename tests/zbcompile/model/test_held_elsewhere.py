"""A model in a pipeline of several processes: what other ranks train is refused wherever it would
be read as if it were the trained model, and all else works as before."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_
from torch.optim.swa_utils import AveragedModel

import zbcompile
from tests.support.dtensor_models import LENGTH, VOCABULARY, Llama, loss_of, parallelised
from tests.support.meshes import mesh_of
from tests.support.oracle import WIDTH, optimizer_of
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

ROWS = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)


class Net(nn.Module):
    """A layer, a body that may be shared, with buffers, and a layer."""

    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.front = nn.Linear(WIDTH, WIDTH)
        self.body = body or nn.Sequential(
            *[nn.Linear(WIDTH, WIDTH) for _ in range(4)], nn.BatchNorm1d(WIDTH)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.front(x)))  # type: ignore[no-any-return]


def pipe_of(model: nn.Module, **options: Any) -> zbcompile.Pipeline:
    options = {
        "schedule": "1f1b",
        "ranks": 2,
        "microbatches": 2,
        "loss": F.mse_loss,
        "exact": True,
    } | options
    return zbcompile.pipeline(model, **options)


def trained(
    model: nn.Module, steps: int = 2, **options: Any
) -> tuple[zbcompile.Pipeline, list[Tensor]]:
    pipe, losses = pipe_of(model, **options), []
    optimizer = optimizer_of(pipe.compile(ROWS, target=ROWS).parameters())
    for _ in range(steps):
        losses.append(pipe.step(ROWS, target=ROWS))
        optimizer.step()
        optimizer.zero_grad()
    return pipe, losses


def averaged_later(model: nn.Module) -> Callable[[], Any]:
    average = AveragedModel(model)
    return lambda: average.update_parameters(model)


READS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "forward": lambda model: model(ROWS),
    "a part": lambda model: [layer(ROWS) for layer in (model.front, *model.body, model.head)],  # type: ignore[union-attr, operator]
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: torch.save(model, io.BytesIO()),
    "AveragedModel": AveragedModel,
    "clipping": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "clipping a list": lambda model: clip_grad_norm_(list(model.parameters()), 1.0),
    "norm": lambda model: sum(parameter.norm() for parameter in model.parameters()),
    "data": lambda model: [parameter.data for parameter in model.parameters()],
    "in place": lambda model: [parameter.detach().mul_(2) for parameter in model.parameters()],
    "stacked": lambda model: torch.cat([parameter.flatten() for parameter in model.parameters()]),
    "buffers": lambda model: [buffer + 1 for buffer in model.buffers()],
    "copied": lambda model: [torch.empty(p.shape).copy_(p) for p in model.parameters()],
}


def refusals() -> tuple[dict[str, str], str, str]:
    """What each way to read the model says, in this process; what torch's clipping of own
    parameters and an average made in time say."""
    model = Net()
    later = averaged_later(model)
    pipe, _ = trained(model)
    pipe.step(ROWS, target=ROWS)
    found = {name: said_by(lambda read=read: read(model)) for name, read in READS.items()}  # type: ignore[misc]
    own = said_by(lambda: clip_grad_norm_([*pipe.parameters()], 1.0))
    clip_grads_with_norm_(pipe.parameters(), 1.0, torch.ones(()))
    pipe.close()
    clip_grad_norm_([each for each in model.parameters() if each.grad is not None], 1.0)
    return found, own, said_by(later)


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except zbcompile.PipelineError as error:
        return str(error)
    return ""


def test_old_values_are_never_read_as_if_they_were_the_model(pool: Pool) -> None:
    """On one of two ranks at least: a rank may read what it has, such as its own buffers."""
    both = pool.run(refusals)
    for name in READS:
        said = " ".join(found[name] for found, _, _ in both)
        clips = name.startswith("clipping")
        assert ("Call pipe.clip_grad_norm_(max_norm)" if clips else "has old values") in said, name
        assert clips or "pipe.state_dict(full=True)" in said, name
        if name != "buffers":
            assert all(found[name] for found, _, _ in both), name
    assert all("Call pipe.clip_grad_norm_(max_norm)" in own for _, own, _ in both)
    assert all("has old values" in later for _, _, later in both)


def test_in_one_process_the_model_is_whole() -> None:
    model = Net()
    later = averaged_later(model)
    pipe, _ = trained(model)
    assert not any(said_by(lambda read=read: read(model)) for read in READS.values())  # type: ignore[misc]
    assert clip_grad_norm_(pipe.parameters(), 1.0) == 0
    later()


def usual_life() -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor], str]:
    """Steps of two shapes, of another mode and evaluations after the first one; the model made
    whole before and after the end; what it says after one more step."""
    model = Net()
    names = [name for name, _ in model.named_modules()]
    pipe, losses = trained(model)
    losses.append(pipe.step(ROWS[:4], target=ROWS[:4]))
    model.eval()
    losses += [pipe.step(ROWS, target=ROWS), pipe.eval(ROWS[:3])]
    model.train().zero_grad()
    model.requires_grad_(True)
    assert [name for name, _ in model.named_modules()] == names
    assert (
        sum(parameter.numel() for parameter in model.parameters())
        == 6 * (WIDTH + 1) * WIDTH + 2 * WIDTH
    )
    pipe.load_state_dict(pipe.state_dict(full=True))
    losses.append(pipe.step(ROWS, target=ROWS))
    model.load_state_dict(pipe.state_dict(full=True))
    once = {key: value.clone() for key, value in model.state_dict().items()}
    losses.append(pipe.step(ROWS, target=ROWS))
    says = said_by(model.state_dict)
    last = pipe.state_dict(full=True)
    pipe.close()
    model.load_state_dict(last)
    return losses, once, {**model.state_dict(), "output": model.eval()(ROWS).detach()}, says


@pytest.mark.slow
def test_everything_else_works_as_in_one_process(pool: Pool) -> None:
    losses, once, last, says = usual_life()
    assert not says
    for theirs, also_once, also_last, refused in pool.run(usual_life):
        assert all(map(torch.equal, theirs, losses))
        assert_same_tensors(also_once, once, "made whole between two steps:")
        assert_same_tensors(also_last, last, "made whole at the end:")
        assert "has old values" in refused


def two_pipelines(frozen: bool, alike: bool) -> list[Tensor]:
    """Two models that share layers, trained in turn; cut at the same place of these, or not."""
    body = Net().body.requires_grad_(not frozen)
    first, second = Net(body), Net(body)
    cuts = {"balance": ["body.2"]}, {"balance": ["body.2" if alike else "body.3"]}
    losses, pipes = (
        [],
        [pipe_of(model, **cut) for model, cut in zip((first, second), cuts, strict=True)],
    )
    optimizers = [optimizer_of(pipe.compile(ROWS, target=ROWS).parameters()) for pipe in pipes]
    for _ in range(2):
        for pipe, optimizer in zip(pipes, optimizers, strict=True):
            losses.append(pipe.step(ROWS, target=ROWS))
            optimizer.step()
            optimizer.zero_grad()
    for pipe in pipes:
        pipe.close()
    return losses


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize(("frozen", "alike"), [(True, False), (False, True)])
def test_two_pipelines_share_layers(frozen: bool, alike: bool, pool: Pool) -> None:
    """Frozen ones wherever they are cut, others if both have them on the same ranks."""
    losses = two_pipelines(frozen, alike)
    for theirs in pool.run(two_pipelines, frozen, alike):
        assert all(map(torch.equal, theirs, losses))


@pytest.mark.slow
def test_two_pipelines_that_train_a_layer_on_different_ranks_are_refused(pool: Pool) -> None:
    outcomes = pool.outcomes(two_pipelines, False, False)
    assert all(
        "another pipeline of the same module has trained or loaded it" in outcome.text
        for outcome in outcomes
    )


def one_after_the_other() -> tuple[str, Tensor]:
    """A second pipeline of the model, cut elsewhere, without and with the weights of the
    first one."""
    model = Net()
    pipe, _ = trained(model, balance=["body.1"])
    weights = pipe.state_dict(full=True)
    pipe.close()
    second = pipe_of(model, balance=["body.3"]).compile(ROWS, target=ROWS)
    says = said_by(lambda: second._bound.share.require_filled())
    second.load_state_dict(weights)
    loss = second.step(ROWS, target=ROWS)
    second.close()
    return says, loss


@pytest.mark.slow
def test_a_second_pipeline_does_not_start_from_old_values(pool: Pool) -> None:
    _, loss = one_after_the_other()
    both = pool.run(one_after_the_other)
    assert "trained elsewhere by another pipeline, and not filled" in " ".join(
        says for says, _ in both
    )
    assert all(torch.equal(theirs, loss) for _, theirs in both)


def parallel_state() -> tuple[set[str], bool, bool, bool]:
    """Of a model with DTensors in a pipeline: which names of torch's state dict are DTensors here
    and not in the eager one, or vice versa; whether values are the same; whether what torch loads
    arrives."""
    mesh = mesh_of(tp=dist.get_world_size())
    eager, model = parallelised(mesh["tp"], "plain", 1), parallelised(mesh["tp"], "plain", 1)
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", microbatches=2, loss=loss_of)
    torch.manual_seed(1)
    x, y = torch.randint(VOCABULARY, (2, 4, LENGTH)).unbind()
    pipe.step(x, target=y)
    shown, expected = get_model_state_dict(model), get_model_state_dict(eager)
    unlike = {
        name
        for name, value in shown.items()
        if isinstance(value, DTensor) != isinstance(expected[name], DTensor)
    }
    same = all(torch.equal(whole(shown[name]), whole(expected[name])) for name in expected)
    set_model_state_dict(model, {name: value * 2 for name, value in expected.items()})
    found = pipe.state_dict(full=True)
    doubled = all(torch.equal(whole(found[name]), 2 * whole(expected[name])) for name in expected)
    model.load_state_dict(Llama(1).state_dict())
    again = all(
        torch.equal(whole(value), whole(expected[name]))
        for name, value in model.state_dict().items()
    )
    with pytest.raises(
        zbcompile.PipelineError, match=r"differs from rank to rank"
    ):  # plain parts of DTensors
        clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_norm_([each for each in pipe.parameters() if isinstance(each, DTensor)], 1.0)
    pipe.close()
    return unlike, same, doubled, again


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.slow
def test_state_dicts_of_a_parallelised_model_have_its_dtensors(pool: Pool) -> None:
    for unlike, same, doubled, again in pool.run(parallel_state):
        assert not unlike
        assert same
        assert doubled
        assert again
