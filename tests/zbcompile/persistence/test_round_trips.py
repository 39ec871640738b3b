"""A checkpoint of any layout goes on in any other with the bits of the same checkpoint by way of a
plain model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.dtensor_models import (
    LENGTH,
    VOCABULARY,
    Llama,
    loss_of as llama_loss,
    parallelised,
)
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors
from tests.zbcompile.persistence.test_checkpoint import TOKENS, Words, loss_of

Layout = tuple[dict[str, int], str, int, Any]  # mesh, schedule, zero, vocab
WORDS: list[Layout] = [
    ({"dp": 2, "pp": 2}, "1f1b", 1, 1),
    ({"pp": 4}, "zb-v", 0, "off"),
    ({"dp": 4, "pp": 1}, "looped-bfs", 1, "off"),
    ({"pp": 4}, "zb-h1", 0, 2),
    ({"dp": 2, "pp": 2}, "zb-h1", 0, "off"),
]
LLAMA: list[Layout] = [
    ({"dp": 2, "tp": 2}, "1f1b", 1, "off"),
    ({"pp": 2, "tp": 2}, "zb-h1", 0, "off"),
    ({"dp": 2, "pp": 2}, "1f1b", 1, "off"),
]


def plain(is_llama: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Llama(layers=1) if is_llama else Words()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def begun(is_llama: bool, layout: Layout) -> Any:
    sizes, schedule, zero, vocab = layout
    mesh = mesh_of(**sizes)
    torch.manual_seed(4)
    if is_llama:
        model: Any = (
            parallelised(mesh["tp"], "plain", layers=1) if "tp" in sizes else Llama(layers=1)
        )
        x, y = torch.randint(VOCABULARY, (2, 8, LENGTH)).unbind()
    else:
        model, x, y = Words(), TOKENS, TOKENS
    options: dict[str, Any] = {
        "loss": llama_loss if is_llama else loss_of,
        "schedule": schedule,
        "microbatches": 4,
    }
    pipe = zbcompile.pipeline(model, mesh=mesh, vocab=vocab, **options)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.5, zero=zero)
    pipe.compile(x, target=y)
    return pipe, optimizer, x, y


def continued(
    folders: list[Path], is_llama: bool, layout: Layout, to: Path
) -> list[dict[str, Tensor]]:
    """The parameters two steps after each of some checkpoints; one step after the first one is
    saved."""
    torch.set_num_threads(1)
    pipe, optimizer, x, y = begun(is_llama, layout)
    results = []
    for folder, steps in [*((folder, 2) for folder in folders), (folders[0], 1)]:
        zbcompile.load_checkpoint(folder, pipe, optimizer)
        for _ in range(steps):
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        results.append(
            {
                name: getattr(item, "full_tensor", item.clone)().clone()
                for name, item in pipe.state_dict(True).items()
            }
        )
    zbcompile.save_checkpoint(to, pipe, optimizer, wait=False)
    pipe.close()
    return results[:-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(WORDS[:2], id="words"),
        pytest.param(LLAMA[:2], id="llama"),
        pytest.param([*WORDS[1:], WORDS[0]], id="words further", marks=pytest.mark.beyond_sample),
        pytest.param([*LLAMA[1:], LLAMA[0]], id="llama further", marks=pytest.mark.beyond_sample),
    ],
)
def test_further_steps_have_the_same_bits(
    layouts: list[Layout], pool: Pool, tmp_path: Path
) -> None:
    is_llama = layouts[-1] in LLAMA
    model, optimizer = plain(is_llama)
    folders = [zbcompile.save_checkpoint(tmp_path / "0", model, optimizer)]
    for number, layout in enumerate(layouts, 1):
        folder, again = tmp_path / f"{number}", tmp_path / f"{number}-plain"
        for states in pool.run(continued, folders, is_llama, layout, folder, ranks=4):
            for state in states[1:]:
                assert_same_tensors(state, states[0], f"to {layout}, parameter")
        model, optimizer = plain(is_llama)
        at = zbcompile.load_checkpoint(folder, model, optimizer)
        assert at.step == number
        folders = [folder, zbcompile.save_checkpoint(again, model, optimizer, step=at.step)]
