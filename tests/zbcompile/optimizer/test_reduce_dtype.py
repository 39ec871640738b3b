"""Gradients that travel between replicas in another dtype: rounded by each replica, added, and kept
as they were."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors
from zbcompile.engine.replicas import ALONE_BYTES

WIDTH = 520  # a weight travels by itself, biases together
Named = dict[str, Tensor]


class Tied(nn.Module):
    """The first and the last layer have one weight, which is complete at the end of the
    step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def trained(zero: int, overlap: bool) -> tuple[Named, Named, Named]:
    """The gradients of this replica alone, and its parameters before and after an update by those
    of all."""
    mesh = init_device_mesh(
        "cpu", (2, torch.distributed.get_world_size() // 2), mesh_dim_names=("dp", "pp")
    )
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
    pipe = zbcompile.pipeline(
        Tied(), schedule="zb-h1", microbatches=2, loss=nn.functional.mse_loss, mesh=mesh
    )
    with pipe.no_sync():
        pipe.step(x, target=x)
    local = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    for parameter in pipe.parameters():
        parameter.grad = None
    optimizer = pipe.optimizer(
        torch.optim.SGD, lr=1.0, zero=zero, overlap=overlap, reduce_dtype=torch.bfloat16
    )
    before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    pipe.step(x, target=x)
    optimizer.step()
    after = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    pipe.close()
    return local, before, after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "overlap"),
    [
        (0, False),
        (1, True),
        *(pytest.param(zero, not zero, marks=pytest.mark.beyond_sample) for zero in (0, 1)),
    ],
)
def test_sums_are_those_of_rounded_gradients(pool: Pool, zero: int, overlap: bool) -> None:
    assert WIDTH * WIDTH * 4 > ALONE_BYTES > WIDTH * 4
    results = pool.run(trained, zero, overlap, ranks=4)
    for here, second in ((0, 2), (1, 3), (2, 0), (3, 1)):
        local, before, after = results[here]
        theirs = results[second][0]
        sums = {name: (local[name].bfloat16() + theirs[name].bfloat16()).float() for name in local}
        assert_same_tensors(
            after, {name: before[name] - sums[name] for name in before}, "after the update:"
        )


def test_what_is_no_such_dtype_is_refused() -> None:
    pipe = zbcompile.pipeline(nn.Linear(2, 2), ranks=1, microbatches=1, loss=nn.functional.mse_loss)
    for arguments in (torch.int8, "bfloat16", torch.add):
        with pytest.raises(
            zbcompile.PipelineError,
            match=r"reduce_dtype=.*; expected a dtype of floating-point numbers",
        ):
            pipe.optimizer(torch.optim.SGD, reduce_dtype=arguments)  # type: ignore[arg-type]
