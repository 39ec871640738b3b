"""An evaluation before the first step places the parameters, and training keeps that."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import PROBLEMS, WIDTH, Batch, eager_step
from tests.support.pool import Pool
from tests.support.training import ROWS

STEPS, MICROBATCHES = 3, 2


class Straight(nn.Module):
    """Layers, and one with buffers; a loss of its own if it gets a goal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.also = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def begun(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, goal: Tensor | None = None) -> Tensor:
        x = self.begun(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.norm(x)
        return x if goal is None else F.mse_loss(x, goal)


class Prepared(Straight):
    """Begins with a layer that only training uses: an evaluation cannot know where it belongs."""

    def begun(self, x: Tensor) -> Tensor:
        return self.also(x) if self.training else x  # type: ignore[no-any-return]


X = torch.linspace(-1, 1, 4 * WIDTH).sin().view(4, WIDTH)


def pipe_of(model: nn.Module, **options: Any) -> zbcompile.Pipeline:
    options = {
        "schedule": "1f1b",
        "ranks": 2,
        "microbatches": MICROBATCHES,
        "exact": True,
    } | options
    return zbcompile.pipeline(model, **options)


def life(own_loss: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Evaluate, also what is no batch of a step; load other weights; train; evaluate. Results and
    the last state."""
    model = Straight()
    pipe = pipe_of(model, **({} if own_loss else {"loss": F.mse_loss}))
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    results = [pipe.eval(X[:3])]
    pipe.load_state_dict({key: value * 2 for key, value in pipe.state_dict(full=True).items()})
    results.append(pipe.eval(X))
    for _ in range(STEPS):
        results.append(pipe.step(X, goal=X) if own_loss else pipe.step(X, target=X))
        optimizer.step()
        optimizer.zero_grad()
    results.append(pipe.eval(X))
    state = pipe.state_dict(full=True)
    pipe.close()
    return results, state


def eager_life() -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same of the unsplit model, microbatch by microbatch."""
    model = Straight()
    results = [evaluated(model, X[:3])]
    model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})
    results.append(evaluated(model, X))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        results.append(eager_step(model, F.mse_loss, Batch((X,), {}, X), MICROBATCHES, step))
        optimizer.step()
        optimizer.zero_grad()
    results.append(evaluated(model, X))
    return results, dict(model.state_dict())


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        results = torch.cat([model(part) for part in x.chunk(MICROBATCHES)])
    model.train()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("own_loss", [False, pytest.param(True, marks=pytest.mark.beyond_sample)])
def test_training_after_an_evaluation_has_eagers_bits(own_loss: bool, pool: Pool) -> None:
    """In one process and on two ranks."""
    losses, state = eager_life()
    for results, last in (life(own_loss), *pool.run(life, own_loss)):
        pairs = enumerate(zip(results, losses, strict=True))
        assert [i for i, pair in pairs if not torch.equal(*pair)] == []
        assert [key for key in state if not torch.equal(last[key], state[key])] == []


@pytest.mark.slow
def test_a_step_that_needs_another_placement_says_what_to_call() -> None:
    pipe = pipe_of(Prepared(), loss=F.mse_loss)
    pipe.eval(X)
    with pytest.raises(zbcompile.PipelineError, match=r"no step is compiled yet\. Call pipe\.comp"):
        pipe.stages()
    message = r"An evaluation has placed the parameters; compile the training step before it"
    with pytest.raises(zbcompile.CompileError, match=message):
        pipe.step(X, target=X)
    pipe = pipe_of(Prepared(), loss=F.mse_loss)
    pipe.compile(X, target=X)
    pipe.eval(X)
    pipe.step(X, target=X)


def words_of(schedule: str, vocab: Any, name: str = "small-dropout") -> zbcompile.Pipeline:
    problem = PROBLEMS[name]
    return pipe_of(problem.model(), schedule=schedule, vocab=vocab, loss=problem.loss, exact=False)


def rows_life() -> list[float]:
    """The differences from eager of an evaluation before the first step, of a step and of an
    evaluation behind it, with the output layer and the embedding in rows."""
    problem, pipe = PROBLEMS["small-tied"], words_of("1f1b", 1, "small-tied")
    batch, model = problem.batches(1, 2 * ROWS)[0], problem.model()

    def distance() -> float:
        return float((pipe.eval(*batch.args) - model.eval()(*batch.args)).detach().abs().max())

    evaluated = distance()
    assert pipe.program.vocabulary is not None
    bounds, homes = pipe.program.vocabulary.bounds, pipe.program.homes
    expected = eager_step(model.train(), problem.loss, batch, MICROBATCHES, 0)
    loss = pipe.step(*batch.args, target=batch.target)
    assert (pipe.program.vocabulary.bounds, pipe.program.homes) == (bounds, homes)
    for target in (pipe, model):
        torch.optim.SGD(target.parameters(), lr=0.1).step()
    return [evaluated, float((loss - expected).abs()), distance()]


@pytest.mark.slow
def test_an_evaluation_places_a_sharded_output_layer() -> None:
    assert max(rows_life()) <= 1e-6


@pytest.mark.slow
def test_an_evaluation_places_a_sharded_output_layer_on_ranks(pool: Pool) -> None:
    assert max(max(errors) for errors in pool.run(rows_life)) <= 1e-6


def test_an_output_without_logits_places_no_rows() -> None:
    pipe = pipe_of(Straight(), loss=F.mse_loss, vocab=1, exact=False)
    with pytest.raises(
        zbcompile.CompileError,
        match=r"vocab=1: .*Call pipe\.compile\(batch, target=\.\.\.\) before",
    ):
        pipe.eval(X)


@pytest.mark.slow
def test_rows_of_an_embedding_that_does_not_train_need_a_step() -> None:
    problem = PROBLEMS["small-dropout"]
    batch, model = problem.batches(1, 2 * ROWS)[0], problem.model()
    model.token.weight.requires_grad_(False)
    pipe = pipe_of(model, loss=problem.loss, vocab=1, exact=False)
    pipe.eval(*batch.args)
    with pytest.raises(zbcompile.CompileError, match=r"step shards head.weight.*before it"):
        pipe.step(*batch.args, target=batch.target)


def on_meta() -> Tensor:
    """Returns the loss of a model that was built on the meta device and evaluated first."""
    with torch.device("meta"):
        model = Straight()
    pipe = pipe_of(model, loss=F.mse_loss, init=lambda name, tensor: tensor.fill_(0.01 * len(name)))
    pipe.eval(X)
    loss = pipe.step(X, target=X)
    assert any(parameter.is_meta for parameter in model.parameters()) == dist.is_initialized()
    pipe.close()
    return loss


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_evaluated_first(pool: Pool) -> None:
    alone = on_meta()
    assert all(torch.equal(loss, alone) for loss in pool.run(on_meta))
