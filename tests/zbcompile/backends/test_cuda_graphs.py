"""Passes recorded as CUDA graphs; what needs no GPU of it runs everywhere."""

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.training import problem_of
from zbcompile.backends.cuda_graphs import RecordedPass

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
MICROBATCHES = 4


def test_what_no_graph_can_record_is_refused() -> None:
    """A model that is on no GPU, a tensor of the host."""
    with pytest.raises(zbcompile.PipelineError, match="cuda_graphs=True records passes on a GPU"):
        zbcompile.pipeline(problem_of("mlp").model(), ranks=2, cuda_graphs=True)
    recorded = RecordedPass("F of stage 0", lambda values: values, (0,), frozenset(), None)
    refused = r"F of stage 0 reads a tensor of shape \[2\] on cpu"
    with pytest.raises(zbcompile.PipelineError, match=refused):
        recorded([torch.ones(1), torch.ones(2)])


def pipe_and_batches(
    problem: str, schedule: str, **options: object
) -> tuple[zbcompile.Pipeline, list[tuple[Tensor, Tensor]]]:
    chosen = problem_of(problem)
    options |= {"schedule": schedule, "ranks": 2, "microbatches": MICROBATCHES}
    pipe = zbcompile.pipeline(chosen.model().cuda(), loss=chosen.loss, **options)
    batches = chosen.batches(3, MICROBATCHES * 2)
    return pipe, [(batch.args[0].cuda(), batch.target.cuda()) for batch in batches]  # type: ignore[union-attr]


def trained(problem: str, **options: object) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters after some steps on the GPU, gradients kept in place."""
    pipe, batches = pipe_and_batches(problem, "zb-v", **options)
    losses, optimizer = [], None
    for x, target in batches:
        losses.append(pipe.step(x, target=target).item())
        optimizer = optimizer or torch.optim.SGD(pipe.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return losses, pipe.state_dict()


@needs_gpu
@pytest.mark.parametrize(
    ("problem", "exact"),
    [("small-dropout", False), pytest.param("small-tied", True, marks=pytest.mark.beyond_sample)],
)
def test_replays_compute_what_launches_do(problem: str, exact: bool) -> None:
    """The same kernels on the same values: the same bits, random masks included."""
    (losses, state), (plain_losses, plain) = (
        trained(problem, exact=exact, cuda_graphs=on) for on in (True, False)
    )
    assert losses == plain_losses
    for name, value in plain.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@needs_gpu
def test_gradients_that_move_are_recorded_again() -> None:
    """Every step finds no gradients, and memory elsewhere to make them in: correct wherever they
    are; from the ninth place on without a graph, with a warning."""
    pipe, ((x, target), *_) = pipe_and_batches("short-mlp", "zb-h1", cuda_graphs=True)
    saved: list[dict[str, Tensor]] = []

    def step() -> None:
        pipe.step(x, target=target)
        saved.append({name: p.grad for name, p in pipe.named_parameters()})  # type: ignore[misc]
        for parameter in pipe.parameters():
            parameter.grad = None

    for _ in range(8):
        step()
    with pytest.warns(UserWarning, match="set_to_none=False"):
        step()
    step()
    for gradients in saved:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, saved[0][name], rtol=1e-5, atol=1e-6)


@needs_gpu
def test_a_pass_without_inputs_is_not_recorded() -> None:
    """B of a stage whose only layer has its gradient in W, and no gradient to send."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    batch, losses = torch.ones(4, 8, device="cuda"), []
    for graphs in (False, True):
        options = {"schedule": "zb-h1", "ranks": 2, "microbatches": 2, "cuda_graphs": graphs}
        pipe = zbcompile.pipeline(model, loss=nn.functional.mse_loss, **options)
        losses.append([pipe.step(batch, target=batch).item() for _ in range(3)])
        pipe.close()
    assert losses[0] == losses[1]
