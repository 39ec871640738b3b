"""Passes recorded as CUDA graphs; what needs no GPU of it runs everywhere."""

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import Batch
from tests.support.training import problem_of
from zbcompile.backends.cuda_graphs import RecordedPass

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
MICROBATCHES, STEPS = 4, 3


def test_refused_without_a_gpu() -> None:
    with pytest.raises(zbcompile.PipelineError, match="cuda_graphs=True records passes on a GPU"):
        zbcompile.pipeline(problem_of("mlp").model(), ranks=2, cuda_graphs=True)


def test_a_tensor_of_the_host_is_not_recorded() -> None:
    recorded = RecordedPass(
        "F of stage 0", lambda values: values, staying=(0,), written=frozenset(), pool=None
    )
    with pytest.raises(
        zbcompile.PipelineError, match=r"F of stage 0 reads a tensor of shape \[2\] on cpu"
    ):
        recorded([torch.ones(1), torch.ones(2)])


def trained(problem: str, **options: object) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and parameters after some steps on the GPU, gradients kept in place."""
    chosen = problem_of(problem)
    model: nn.Module = chosen.model().cuda()
    pipe = zbcompile.pipeline(
        model, schedule="zb-v", ranks=2, microbatches=MICROBATCHES, loss=chosen.loss, **options
    )
    losses, optimizer = [], None
    for batch in map(on_gpu, chosen.batches(STEPS, MICROBATCHES * 2)):
        losses.append(pipe.step(*batch.args, **batch.kwargs, target=batch.target))
        optimizer = optimizer or torch.optim.SGD(pipe.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return losses, pipe.state_dict()


def on_gpu(batch: Batch) -> Batch:
    target = None if batch.target is None else batch.target.cuda()
    return Batch(
        tuple(t.cuda() for t in batch.args), {k: v.cuda() for k, v in batch.kwargs.items()}, target
    )


@needs_gpu
@pytest.mark.parametrize(("problem", "exact"), [("gpt-dropout", False), ("small-tied", True)])
def test_replays_compute_what_launches_do(problem: str, exact: bool) -> None:
    """The same kernels on the same values: the same bits, random masks included."""
    (losses, state), (plain_losses, plain) = (
        trained(problem, exact=exact, cuda_graphs=on) for on in (True, False)
    )
    assert [loss.item() for loss in losses] == [loss.item() for loss in plain_losses]
    for name, value in plain.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@needs_gpu
def test_gradients_that_move_are_recorded_again() -> None:
    """Correct wherever the gradients are; from the ninth place on without a graph, with a
    warning."""
    chosen = problem_of("mlp")
    pipe = zbcompile.pipeline(
        chosen.model().cuda(),
        schedule="zb-h1",
        ranks=2,
        microbatches=2,
        loss=chosen.loss,
        cuda_graphs=True,
    )
    batch = on_gpu(chosen.batches(1, 4)[0])
    with pytest.warns(UserWarning, match="set_to_none=False"):
        steps_with_moving_gradients(pipe, batch)


def steps_with_moving_gradients(pipe: zbcompile.Pipeline, batch: Batch) -> None:
    """Every step finds no gradients, and memory elsewhere to make them in."""
    saved: list[dict[str, Tensor]] = []
    for _ in range(10):
        pipe.step(*batch.args, target=batch.target)
        saved.append({name: p.grad for name, p in pipe.named_parameters() if p.grad is not None})
        for name, grad in saved[-1].items():
            torch.testing.assert_close(grad, saved[0][name], rtol=1e-5, atol=1e-6)
        for parameter in pipe.parameters():
            parameter.grad = None


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
