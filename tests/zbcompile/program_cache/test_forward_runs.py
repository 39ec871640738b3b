"""A forward-only run is a run like any other: recorded, predicted, in any mode and number of
microbatches. It leaves nothing behind in what trains."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.live_storages import Alive, forward_bytes, leave_aside
from tests.support.training import assert_same_tensors
from zbcompile.compiler.compile_forward import forward_order
from zbcompile.passes.stage.peak_memory import transient_bytes
from zbcompile.prediction.predict import predicted_costs
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.schedules import check, simulate

WIDTH = 8


class Layers(nn.Module):
    """Dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return self.norm(x)


def batch_of(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def made() -> zbcompile.Pipeline:
    pipe = zbcompile.pipeline(
        Layers(), schedule="zb-v", microbatches=4, ranks=2, loss=F.mse_loss, exact=True
    )
    return pipe.compile(batch_of(8), target=batch_of(8))


@pytest.fixture(scope="module")
def pipe() -> zbcompile.Pipeline:
    return made()


@pytest.mark.slow
def test_split_microbatches_of_any_shape(pipe: zbcompile.Pipeline) -> None:
    model = Layers().eval()
    parts = [batch_of(rows) for rows in (3, 1, 3)]
    with torch.no_grad():
        for ours, part in zip(
            pipe.eval(microbatches=[((part,), {}) for part in parts]), parts, strict=True
        ):
            assert torch.equal(ours, model(part))


@pytest.mark.slow
def test_a_run_is_checked_recorded_and_predicted(pipe: zbcompile.Pipeline) -> None:
    """Nothing waits after a forward, and however many microbatches there are, a rank needs what one
    of its stages needs for one of them: no more than in training."""
    with pipe.recording() as records:
        pipe.eval(batch_of(8))
    (record,) = records
    assert next(span.action for span in record.spans[1] if span.action.startswith("F")) == "F1.0"
    assert record.peak_activation_bytes == {0: 0, 1: 0}
    program = list(pipe._compiled.evaluations.plans.values())[-1].program
    check(program.lowered)
    assert simulate(program.schedule, predicted_costs(program)).schedule == record.schedule
    peaks, same = (
        [memory.activations for memory in rank_memories(each, predicted_costs(program), {})]
        for each in (program, replace(program, lowered=forward_order(program, 8)))
    )
    assert peaks == same
    for rank, peak in enumerate(peaks):
        own, trained = (
            [transient_bytes(each.stages[i], "F") for i in program.stages_of(rank)]
            for each in (program, pipe.program)
        )
        assert max(trained) >= max(own) == peak


@pytest.mark.parametrize("count", [1, 8])
def test_what_is_predicted_is_alive(pipe: zbcompile.Pipeline, count: int) -> None:
    """One microbatch in one stage beside messages and outputs, however many microbatches
    there are."""
    x = batch_of(8)
    pipe.eval(x, microbatches=count)
    with Alive([], [*pipe._model.parameters(), *pipe._model.buffers(), x]) as alive:
        pipe.eval(x, microbatches=count)
    inside, beside = forward_bytes(list(pipe._compiled.evaluations.plans.values())[-1].program)
    assert inside <= alive.most <= inside + beside


def test_step_eval_step_has_the_bits_of_step_step() -> None:
    one, other, x = made(), made(), batch_of(8)
    for pipe in (one, other):
        for _ in range(2):
            pipe.step(x, target=x)
            if pipe is one:
                pipe.eval(x)
    assert_same_tensors(
        {n: p.grad for n, p in one.named_parameters()}, dict(grads(other)), "gradient of"
    )
    assert_same_tensors(one.state_dict(), other.state_dict(), "state dict:")


def grads(pipe: zbcompile.Pipeline) -> list[tuple[str, Tensor | None]]:
    return [(name, parameter.grad) for name, parameter in pipe.named_parameters()]


@pytest.mark.slow
def test_alternating_compiles_and_keeps_nothing(
    pipe: zbcompile.Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_aside()
    x, counts = batch_of(8), []
    for i in range(12):
        pipe.step(x, target=x)
        pipe.eval(x)
        if i in (3, 11):
            gc.collect()
            gc.collect()  # values whose weak keys the first one freed
            counts.append(
                (sum(isinstance(each, Tensor) for each in gc.get_objects()), len(pipe.compilations))
            )
    assert counts[0] == counts[1]
    assert "compiling again" not in capsys.readouterr().out


def test_the_state_dict_as_a_stream(pipe: zbcompile.Pipeline) -> None:
    assert_same_tensors(dict(pipe.stream_state_dict()), pipe.state_dict(full=True), "state dict:")
