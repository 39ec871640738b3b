"""An evaluation before the first step places the parameters, and training keeps that."""

from typing import Any

import pytest
import torch
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
    found = [pipe.eval(X[:3])]
    pipe.load_state_dict({key: value * 2 for key, value in pipe.state_dict(full=True).items()})
    found.append(pipe.eval(X))
    for _ in range(STEPS):
        found.append(pipe.step(X, goal=X) if own_loss else pipe.step(X, target=X))
        optimizer.step()
        optimizer.zero_grad()
    found.append(pipe.eval(X))
    state = pipe.state_dict(full=True)
    pipe.close()
    return found, state


def eager_life() -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same of the unsplit model, microbatch by microbatch."""
    model = Straight()
    found = [evaluated(model, X[:3])]
    model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})
    found.append(evaluated(model, X))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        found.append(eager_step(model, F.mse_loss, Batch((X,), {}, X), MICROBATCHES, step))
        optimizer.step()
        optimizer.zero_grad()
    found.append(evaluated(model, X))
    return found, dict(model.state_dict())


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part) for part in x.chunk(MICROBATCHES)])
    model.train()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("own_loss", [False, True])
def test_training_after_an_evaluation_has_eagers_bits(own_loss: bool, pool: Pool) -> None:
    """In one process and on two ranks."""
    losses, state = eager_life()
    for found, last in (life(own_loss), *pool.run(life, own_loss)):
        pairs = enumerate(zip(found, losses, strict=True))
        assert [i for i, pair in pairs if not torch.equal(*pair)] == []
        assert [key for key in state if not torch.equal(last[key], state[key])] == []


def test_a_step_that_needs_another_placement_says_what_to_call() -> None:
    pipe = pipe_of(Prepared(), loss=F.mse_loss)
    pipe.eval(X)
    message = r"An evaluation has placed the parameters; compile the training step before it"
    with pytest.raises(zbcompile.CompileError, match=message):
        pipe.step(X, target=X)
    pipe = pipe_of(Prepared(), loss=F.mse_loss)
    pipe.compile(X, target=X)
    pipe.eval(X)
    pipe.step(X, target=X)


def words_of(schedule: str, vocab: Any) -> zbcompile.Pipeline:
    problem = PROBLEMS["small-dropout"]
    return pipe_of(problem.model(), schedule=schedule, vocab=vocab, loss=problem.loss, exact=False)


def test_a_sharded_output_layer_is_placed_by_a_step() -> None:
    batch = PROBLEMS["small-dropout"].batches(1, 2 * ROWS)[0]
    pipe = words_of("1f1b", 1)
    with pytest.raises(
        zbcompile.PipelineError, match=r"Call pipe\.compile\(batch, target=\.\.\.\)"
    ):
        pipe.eval(*batch.args)
    pipe.compile(*batch.args, target=batch.target)
    pipe.eval(*batch.args)
    assert pipe.program.vocabulary is not None
