"""A checkpoint of any layout goes on in any other: with the bits of the same checkpoint by way of a
plain model, and with the values of the training that it was taken from."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

import zbcompile
from tests.support.dtensor_models import (
    LENGTH,
    VOCABULARY,
    Llama,
    loss_of as llama_loss,
    parallelised,
)
from tests.support.meshes import mesh_of
from tests.support.parallel_models import LENGTH as POSITIONS, WIDTH, TensorParallel
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

Layout = tuple[dict[str, int], str, int, Any]  # mesh, schedule, zero, vocab
State = dict[str, Tensor]
TOKENS = torch.arange(40).view(8, 5) % 5


class Words(nn.Module):
    """An output layer of five words, tied to the embedding: four ranks have 2, 2, 1 and 0 of its
    rows."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def words_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


WORDS: list[Layout] = [
    ({"dp": 2, "pp": 2}, "1f1b", 1, 1),
    ({"pp": 4}, "1f1b", 0, "off"),
    ({"dp": 4, "pp": 1}, "looped-bfs", 1, "off"),
    ({"pp": 4}, "zb-h1", 0, 2),
    ({"dp": 2, "pp": 2}, "zb-h1", 0, "off"),
]
PAIRS: list[Layout] = [({"pp": 2}, "zb-v", 0, 1), ({"pp": 1, "dp": 2}, "looped-bfs", 1, "off")]
LLAMA: list[Layout] = [
    ({"dp": 2, "tp": 2}, "1f1b", 1, "off"),
    ({"pp": 2, "tp": 2}, "zb-h1", 0, "off"),
    ({"dp": 2, "pp": 2}, "1f1b", 1, "off"),
]


def plain(is_llama: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Llama(layers=1) if is_llama else Words()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def begun(is_llama: bool, layout: Layout, dtype: torch.dtype = torch.float32) -> Any:
    sizes, schedule, zero, vocab = layout
    mesh = mesh_of(**sizes)
    torch.manual_seed(4)
    model: nn.Module = Words().to(dtype)
    x, y, loss = TOKENS, TOKENS, words_loss
    if is_llama:
        model = parallelised(mesh["tp"], "plain", layers=1) if "tp" in sizes else Llama(layers=1)
        (x, y), loss = torch.randint(VOCABULARY, (2, 8, LENGTH)).unbind(), llama_loss
    options = {"schedule": schedule, "microbatches": 4, "vocab": vocab}
    pipe = zbcompile.pipeline(model, mesh=mesh, loss=loss, **options)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.5, zero=zero)
    return pipe.compile(x, target=y), optimizer, x, y


def train(pipe: Any, optimizer: Any, x: Tensor, y: Tensor, steps: int) -> State:
    for _ in range(steps):
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    named = pipe.state_dict(full=True).items()
    return {name: getattr(item, "full_tensor", item.clone)().clone() for name, item in named}


def continued(folders: list[Path], is_llama: bool, layout: Layout, to: Path) -> list[State]:
    """The parameters two steps after each of some checkpoints; one step after the first one another
    is saved, and last the parameters that were saved, and those two steps later."""
    torch.set_num_threads(1)
    training = begun(is_llama, layout)
    pipe, optimizer, *_ = training
    results = []
    for folder in folders:
        zbcompile.load_checkpoint(folder, pipe, optimizer)
        results.append(train(*training, 2))
    zbcompile.load_checkpoint(folders[0], pipe, optimizer)
    saved = train(*training, 1)
    zbcompile.save_checkpoint(to, pipe, optimizer, wait=False)
    zbcompile.save_weights(to / "weights", pipe)
    for parameter in pipe.parameters():
        nn.init.zeros_(parameter)
    zbcompile.load_weights(to / "weights", pipe)
    assert_same_tensors(train(*training, 0), saved, "weight")
    results += [saved, train(*training, 2)]
    pipe.close()
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "ranks"),
    [
        pytest.param(PAIRS, 2, id="words"),
        pytest.param([*WORDS, WORDS[0]], 4, id="words at 4", marks=pytest.mark.beyond_sample),
        pytest.param([*LLAMA, LLAMA[0]], 4, id="llama", marks=pytest.mark.beyond_sample),
    ],
)
def test_further_steps_have_the_same_bits(
    layouts: list[Layout], ranks: int, pool: Pool, tmp_path: Path
) -> None:
    """The rows of words, and those of the Llama along "tp", are uneven."""
    is_llama, went_on = "tp" in layouts[0][0], State()
    model, optimizer = plain(is_llama)
    folders = [zbcompile.save_checkpoint(tmp_path / "0", model, optimizer)]
    for number, layout in enumerate(layouts, 1):
        folder, again = tmp_path / f"{number}", tmp_path / f"{number}-plain"
        results = pool.run(continued, folders, is_llama, layout, folder, ranks=ranks)
        for first, *others in (result[:-2] for result in results):
            for state in others:
                assert_same_tensors(state, first, f"to {layout}, parameter")
            for name, value in went_on.items():
                torch.testing.assert_close(first[name], value, rtol=0, atol=1e-5, msg=name)
        went_on = results[0][-1]
        model, optimizer = plain(is_llama)
        at = zbcompile.load_checkpoint(folder, model, optimizer)
        assert at.step == number
        assert optimizer.param_groups[0]["lr"] == 0.02
        assert_same_tensors(dict(model.state_dict()), results[0][-2], "saved")
        zbcompile.load_weights(folder / "weights", second := plain(is_llama)[0])
        assert_same_tensors(dict(second.state_dict()), dict(model.state_dict()), "weight")
        folders = [folder, zbcompile.save_checkpoint(again, model, optimizer, step=at.step)]


def by_hand(folder: Path) -> list[State]:
    """Returns what was saved, what there was a step later, and what was loaded then."""
    mesh = mesh_of(pp=1, tp=2)
    model = TensorParallel(mesh, "plain")
    options = {"schedule": "zb-h1", "microbatches": 4, "placements": model.PLACEMENTS}
    pipe = zbcompile.pipeline(model, mesh=mesh, loss=F.mse_loss, **options)
    x, y = torch.randn(2, 8, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(pipe.compile(x, target=y).parameters(), lr=0.01)
    result = []
    for act in (zbcompile.save_checkpoint, lambda *_: None, zbcompile.load_checkpoint):
        train(pipe, optimizer, x, y, 1)
        act(folder, pipe, optimizer)
        named = dict(pipe.named_parameters())
        state = {name: parameter.detach().clone() for name, parameter in named.items()}
        for name, parameter in named.items():
            kept = optimizer.state[parameter].items()
            state |= {f"{name}.{key}": value.clone() for key, value in kept}
        result.append(state)
    said = r"is sharded by hand, so torch\.distributed\.checkpoint would"
    with pytest.raises(zbcompile.PipelineError, match=said):
        dcp.save({"model": pipe}, checkpoint_id=folder)
    pipe.close()
    return result


@pytest.mark.slow
def test_what_is_sharded_by_hand_is_kept_rank_by_rank(pool: Pool, tmp_path: Path) -> None:
    for saved, later, loaded in pool.run(by_hand, tmp_path, ranks=2):
        assert not any(torch.equal(later[name], saved[name]) for name in saved)
        assert_same_tensors(loaded, saved, "saved")
    said = r"unexpected \['layers.0.columns \(tp 0 of 2\)'"
    with pytest.raises(zbcompile.PipelineError, match=said):
        zbcompile.load_checkpoint(tmp_path, TensorParallel(None, "plain"))


def moved(folder: Path, layouts: list[Layout], dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    expected = State()
    for number, layout in enumerate(layouts):
        pipe, optimizer, x, y = begun(False, layout, dtype)
        assert isinstance(pipe, Stateful)
        assert isinstance(optimizer, Stateful)
        state = {"model": pipe, "optimizer": optimizer}
        if number:
            optimizer.param_groups[0]["lr"] = 1.0
            dcp.load(state, checkpoint_id=folder / str(number - 1))
            assert optimizer.param_groups[0]["lr"] == 0.5
        else:
            train(pipe, optimizer, x, y, 2)
        dcp.save(state, checkpoint_id=folder / str(number))
        result = train(pipe, optimizer, x, y, 1)
        for name, value in (expected := expected or result).items():
            torch.testing.assert_close(result[name], value, rtol=0, atol=1e-5, msg=name)
        pipe.close()


@pytest.mark.slow
def test_torchs_save_and_load(pool: Pool, tmp_path: Path) -> None:
    """torch.distributed.checkpoint takes a pipeline and its optimizer as they are."""
    layouts = [({"pp": 1, "dp": 2}, "1f1b", 1, "off"), ({"pp": 2, "dp": 1}, "zb-h1", 0, "off")]
    pool.run(moved, tmp_path, layouts, torch.bfloat16, ranks=2)
