"""The loop by Accelerate next to the plain one, on the same model and data."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pool

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from accelerate_loop import BATCH, loader, tiny_model, train

UPDATES, ACCUMULATE = 3, 2


def plain() -> list[float]:
    """Returns what Accelerate's own documentation writes."""
    set_seed(0)
    accelerator, model = Accelerator(gradient_accumulation_steps=ACCUMULATE), tiny_model()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(adam, total_iters=UPDATES)
    batches, losses = loader(UPDATES * ACCUMULATE * BATCH), []
    model, optimizer, batches = accelerator.prepare(model, adam, batches)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
    return losses


def on_a_rank() -> list[float]:
    """Accelerate finds the processes as torchrun's."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with patch.dict(os.environ, place):
        result = train(ranks=None, updates=UPDATES, accumulate=ACCUMULATE)
        AcceleratorState._reset_state(reset_partial_state=True)
    return result


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_the_losses_of_the_plain_loop_in_two_processes(pool: Pool) -> None:
    expected = plain()
    for result in pool.run(on_a_rank, timeout=240):
        assert result == pytest.approx(expected, abs=2e-6)
