"""Checkpoints and weights go from any layout to any other: replicas, stages, schedules and divided
optimizers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbcompile
from tests.support.generated import examples
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

WIDTH, LAYERS, ROWS = 6, 8, 8
Layout = tuple[
    int, int, str, int, int, str
]  # dp, pp, schedule, chunks, zero, dtype: of bfloat16 masters are kept
PLACES = [
    (4, 1, "looped-bfs", 4),
    (2, 2, "zb-v", 2),
    (2, 2, "looped-bfs", 4),
    (1, 4, "zb-h1", 1),
    (2, 2, "1f1b", 1),
]


def model_of(dtype: str = "float32") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(
        getattr(torch, dtype)
    )


def begun(
    layout: Layout, model: nn.Module | None = None, **options: Any
) -> tuple[Any, Any, Tensor]:
    """A compiled pipeline, its optimizer and a batch."""
    dp, pp, schedule, chunks, zero, dtype = layout
    model = model_of(dtype) if model is None else model
    made = {"schedule": schedule, "microbatches": 4, "loss": mse_loss, **options}
    pipe = zbcompile.pipeline(
        model, mesh=mesh_of(dp=dp, pp=pp), chunks=chunks if chunks > 1 else None, **made
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2, zero=zero if dp > 1 else 0)
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(getattr(torch, dtype))
    pipe.compile(x, target=x)
    return pipe, optimizer, x


def update(pipe: Any, optimizer: Any, x: Tensor) -> None:
    pipe.step(x, target=x)
    optimizer.step()
    optimizer.zero_grad()


def moved(layouts: list[Layout], folder: Path) -> list[dict[str, Tensor]]:
    """Train one step, save, and let each next layout load that and save it again, as a checkpoint
    and as weights; the parameters at each."""
    torch.set_num_threads(1)
    found = []
    for number, layout in enumerate(layouts):
        pipe, optimizer, x = begun(layout)
        if number:
            zbcompile.load_checkpoint(folder / str(number - 1), pipe, optimizer)
        else:
            update(pipe, optimizer, x)
        zbcompile.save_checkpoint(folder / str(number), pipe, optimizer)
        zbcompile.save_weights(folder / f"{number}.safetensors", pipe)
        found.append(pipe.state_dict(full=True))
        pipe.close()
    return found


def require_same_at_all(layouts: list[Layout], pool: Pool, folder: Path) -> None:
    for found in pool.run(moved, layouts, folder, ranks=4):
        for one, other in pairwise(found):
            assert_same_tensors(other, one, "parameter")
    whole = []
    for number in (0, len(layouts) - 1):
        model = model_of(layouts[0][-1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zbcompile.load_checkpoint(folder / str(number), model, optimizer)
        kept = optimizer.state_dict()["state"].items()
        whole.append(
            model.state_dict()
            | {f"{i}.{key}": value for i, own in kept for key, value in own.items()}
        )
        weights = model_of(layouts[0][-1])
        zbcompile.load_weights(folder / f"{number}.safetensors", weights)
        assert_same_tensors(weights.state_dict(), model.state_dict(), "weight")
    assert_same_tensors(whole[1], whole[0], "state")


@pytest.mark.slow
@pytest.mark.beyond_sample
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_divided_optimizers_to_whole_ones_and_back(
    dtype: str, pool: Pool, tmp_path: Path
) -> None:
    ways = [(*PLACES[0], 1), (*PLACES[1], 0), (*PLACES[1], 1), (*PLACES[3], 0), (*PLACES[2], 1)]
    require_same_at_all([(*each, dtype) for each in ways], pool, tmp_path)


@pytest.mark.slow
@settings(examples(3), suppress_health_check=list(HealthCheck))
@given(
    ways=strategies.lists(
        strategies.tuples(strategies.sampled_from(PLACES), strategies.integers(0, 1)),
        min_size=2,
        max_size=4,
    ),
    dtype=strategies.sampled_from(["float32", "bfloat16"]),
)
def test_from_any_layout_to_any_other(
    ways: Any, dtype: str, pool: Pool, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    require_same_at_all([(*place, zero, dtype) for place, zero in ways], pool, folder)
