"""Parameters that live divided among replicas are saved, loaded and filled without being gathered: from any layout to
any other, and never more than one of them at a time."""

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
from zbcompile.runtime.gathers import Gathers

WIDTH, LAYERS, ROWS = 6, 8, 8
Layout = tuple[int, int, str, int, int, str]  # dp, pp, schedule, chunks, zero, dtype: of bfloat16 masters are kept
PLACES = [(4, 1, "looped-bfs", 4), (2, 2, "zb-v", 2), (2, 2, "looped-bfs", 4), (1, 4, "zb-h1", 1), (2, 2, "1f1b", 1)]


def model_of(dtype: str = "float32") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(getattr(torch, dtype))


def initialised(name: str, tensor: Tensor) -> None:
    tensor.normal_()


def begun(layout: Layout, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Tensor]:
    """A compiled pipeline, its optimizer and a batch."""
    dp, pp, schedule, chunks, zero, dtype = layout
    model = model_of(dtype) if model is None else model
    made = {"schedule": schedule, "microbatches": 4, "loss": mse_loss, **options}
    pipe = zbcompile.pipeline(model, mesh=mesh_of(dp=dp, pp=pp), chunks=chunks if chunks > 1 else None, **made)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2, zero=zero if dp > 1 else 0)
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(getattr(torch, dtype))
    pipe.compile(x, target=x)
    return pipe, optimizer, x


def update(pipe: Any, optimizer: Any, x: Tensor) -> None:
    pipe.step(x, target=x)
    optimizer.step()
    optimizer.zero_grad()


def required_in_parts(pipe: Any) -> None:
    """No parameter that replicas divide has memory here."""
    for gathers in pipe._optimizers.gathers:
        assert not gathers.whole
        assert not any(own.untyped_storage().nbytes() for own, _ in gathers.tensors.values())


def moved(layouts: list[Layout], folder: Path) -> list[dict[str, Tensor]]:
    """Train one step, save, and let each next layout load that and save it again, as a checkpoint and as weights; the
    parameters at each."""
    torch.set_num_threads(1)
    found = []
    for number, layout in enumerate(layouts):
        pipe, optimizer, x = begun(layout)
        if number:
            zbcompile.load_checkpoint(folder / str(number - 1), pipe, optimizer)
            required_in_parts(pipe)
        else:
            update(pipe, optimizer, x)
        zbcompile.save_checkpoint(folder / str(number), pipe, optimizer)
        zbcompile.save_weights(folder / f"{number}.safetensors", pipe)
        required_in_parts(pipe)
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
        whole.append(model.state_dict() | {f"{i}.{key}": value for i, own in kept for key, value in own.items()})
        weights = model_of(layouts[0][-1])
        zbcompile.load_weights(folder / f"{number}.safetensors", weights)
        assert_same_tensors(weights.state_dict(), model.state_dict(), "weight")
    assert_same_tensors(whole[1], whole[0], "state")


@pytest.mark.slow
@pytest.mark.beyond_sample
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_divided_parameters_to_whole_ones_and_back(dtype: str, pool: Pool, tmp_path: Path) -> None:
    ways = [(*PLACES[0], 3), (*PLACES[1], 0), (*PLACES[1], 3), (*PLACES[3], 0), (*PLACES[2], 3)]
    require_same_at_all([(*each, dtype) for each in ways], pool, tmp_path)


@pytest.mark.slow
@settings(examples(3), suppress_health_check=list(HealthCheck))
@given(
    ways=strategies.lists(
        strategies.tuples(strategies.sampled_from(PLACES), strategies.integers(0, 3)), min_size=2, max_size=4
    ),
    dtype=strategies.sampled_from(["float32", "bfloat16"]),
)
def test_from_any_layout_to_any_other(ways: Any, dtype: str, pool: Pool, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("any")
    require_same_at_all([(*place, zero, dtype) for place, zero in ways], pool, folder)


class WithUnused(nn.Sequential):
    """Beside its layers it has one that nothing reads."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(LAYERS):
            x = self[number](x)
        return x


def adapted(dtype: str) -> nn.Module:
    """Every second layer is frozen, and so is the one that nothing reads; two others have the same weight."""
    model = WithUnused(*model_of(dtype))  # type: ignore[misc]
    model[7].weight = model[1].weight
    for layer in [*list(model)[::2]]:
        layer.requires_grad_(False)
    return model


def trained_with_tie(zero: int, dtype: str, folder: Path) -> list[dict[str, Tensor]]:
    """The parameters after two updates; after loading a checkpoint of that; and one that left out what is frozen."""
    torch.set_num_threads(1)
    layout = (2, 2, "looped-bfs", 2, zero, dtype)
    pipe, optimizer, x = begun(layout, adapted(dtype))
    for _ in range(2):
        update(pipe, optimizer, x)
    for frozen in (True, False):
        zbcompile.save_checkpoint(folder / f"{zero} {frozen}", pipe, optimizer, frozen=frozen)
    required_in_parts(pipe)
    found = [pipe.state_dict(full=True)]
    pipe.close()
    for frozen in (True, False):
        pipe, optimizer, _ = begun(layout, adapted(dtype))
        zbcompile.load_checkpoint(folder / f"{zero} {frozen}", pipe, optimizer)
        required_in_parts(pipe)
        if zero == 3:
            (gathers,) = pipe._optimizers.gathers
            assert gathers.tensors.keys() == dict(pipe.named_parameters()).keys()
        found.append(pipe.state_dict(full=True))
        pipe.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.beyond_sample), "bfloat16"])
def test_what_is_frozen_or_tied_lives_divided_too(dtype: str, pool: Pool, tmp_path: Path) -> None:
    runs = zip(*(pool.run(trained_with_tie, zero, dtype, tmp_path, ranks=4) for zero in (0, 3)), strict=True)
    for whole, divided in runs:
        for found in (*whole, *divided):
            assert_same_tensors(found, whole[0], "parameter")


def filled(weights: Path) -> tuple[list[int], dict[str, Tensor], dict[str, Tensor]]:
    """Of a model on the meta device: how many divided parameters had memory at once while it was filled by `init=`, and
    by a file, and what it has got."""
    torch.set_num_threads(1)
    most = []
    lend = Gathers.free

    def counting(self: Gathers, names: Any) -> None:
        most.append(sum(own.untyped_storage().nbytes() > 0 for own, _ in self.tensors.values()))
        lend(self, names)

    Gathers.free = counting  # type: ignore[method-assign]
    try:
        with torch.device("meta"):
            model = model_of()
        pipe, optimizer, x = begun((4, 1, "looped-bfs", 4, 3, "float32"), model, init=initialised)
        required_in_parts(pipe)
        made = list(most)
        zbcompile.load_weights(weights, pipe)
        required_in_parts(pipe)
        made += most
    finally:
        Gathers.free = lend  # type: ignore[method-assign]
    before = pipe.state_dict(full=True)
    update(pipe, optimizer, x)
    after = pipe.state_dict(full=True)
    pipe.close()
    return made, before, after


@pytest.mark.slow
def test_one_parameter_at_a_time_is_whole_while_a_model_is_filled(pool: Pool, tmp_path: Path) -> None:
    zbcompile.save_weights(tmp_path / "model.safetensors", model_of())
    for counts, before, after in pool.run(filled, tmp_path / "model.safetensors", ranks=4):
        assert len(counts) >= 4 * LAYERS
        assert set(counts) == {1}
        assert_same_tensors(before, model_of().state_dict(), "weight")
        assert not any(torch.equal(after[name], before[name]) for name in before)


def initialised_by(zero: int) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = model_of()
    pipe, optimizer, x = begun((2, 2, "looped-bfs", 2, zero, "float32"), model, init=initialised)
    update(pipe, optimizer, x)
    found = pipe.state_dict(full=True)
    pipe.close()
    return found


@pytest.mark.slow
def test_init_gives_divided_parameters_the_values_of_whole_ones(pool: Pool) -> None:
    for divided, whole in zip(*(pool.run(initialised_by, zero, ranks=4) for zero in (3, 0)), strict=True):
        assert_same_tensors(divided, whole, "parameter")
