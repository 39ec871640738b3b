"""A Lightning module around a pipeline, by manual optimization.

In one process, `python examples/lightning_loop.py --ranks 2`; a process per rank,
`torchrun --standalone --nproc-per-node 2 examples/lightning_loop.py`.
"""

import argparse
import os
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import zbcompile

WIDTH, BATCH, MICROBATCHES, LEARNING_RATE, CLIP = 16, 8, 4, 1e-2, 1.0


class Pipelined(lightning.LightningModule):
    """The pipeline is kept in a list: its parameters are not those of the module, for Lightning
    would move them."""

    def __init__(self, pipe: zbcompile.Pipeline) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.held = [pipe]
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return self.held[0].optimizer(torch.optim.AdamW, lr=LEARNING_RATE, clip=CLIP)

    def training_step(self, batch: Any, index: int) -> None:
        inputs, target = batch
        loss = self.held[0].step(inputs, target=target)
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss)
        self.losses.append(loss.item())

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, target = batch
        self.log("validation", cross_entropy(self.held[0].eval(inputs), target))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)), nn.Linear(WIDTH, 4)
    )


def loader(seed: int) -> "DataLoader[Any]":
    source = torch.Generator().manual_seed(seed)  # the same batches on every rank
    inputs, target = (
        torch.randn(48, WIDTH, generator=source),
        torch.randint(4, (48,), generator=source),
    )
    return DataLoader(list(zip(inputs, target, strict=True)), batch_size=BATCH)  # type: ignore[arg-type]


def train(ranks: int | None, epochs: int = 1) -> list[float]:
    """The loss of every step."""
    pipe = zbcompile.pipeline(
        model(),
        schedule="zb-v",
        microbatches=MICROBATCHES,
        ranks=ranks,
        loss=cross_entropy,
        exact=True,
    )
    module, shows = Pipelined(pipe), os.environ.get("RANK", "0") == "0"
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,  # a strategy of its own would divide the batches among the ranks
        num_sanity_val_steps=0,  # the first training batch compiles
        enable_checkpointing=False,  # zbcompile.save_checkpoint
        enable_progress_bar=shows,
        logger=False,
    )
    trainer.fit(module, loader(0), loader(1))
    if shows:
        print(
            f"losses {module.losses}, validation"
            f" {trainer.callback_metrics['validation'].item():.4f}"
        )
    pipe.close()
    return module.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", type=int, help="ranks in this process; under torchrun there is one per process"
    )
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    train(options.ranks, options.epochs)
