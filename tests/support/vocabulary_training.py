"""Training with a sharded output layer, and by eager accumulation, so that the two can be
compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.oracle import Batch, eager_step
from zbcompile.schedules import Schedule

STEPS = 2


@dataclass(frozen=True)
class VocabularyCase:
    """One training run: a model by name, what shards its output layer, where it runs."""

    model: str
    schedule: str | Schedule
    vocab: Any
    ranks: int
    microbatches: int = 4
    double: bool = True
    backend: Any = "fx"

    def __str__(self) -> str:
        return f"{self.model} {self.schedule} vocab={self.vocab} ranks={self.ranks}"


@dataclass(frozen=True)
class Learned:
    """What a run leaves: losses and gradients of each step by parameter name, the whole state dict,
    an evaluation."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]
    output: Tensor


def small_gpt(tied: bool = False) -> nn.Module:
    return GPT(layers=2, width=32, heads=2, length=16, tied=tied)


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    """Ignored tokens, label smoothing, a soft cap and z-loss at the same time."""
    logits = 20 * torch.tanh(output / 20)
    target = target.masked_fill(target % 5 == 0, -100)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    return loss + 1e-3 * torch.logsumexp(logits, -1).square().mean()


Make = Callable[[], nn.Module]
MODELS: Mapping[str, tuple[Make, Any]] = {
    "gpt": (small_gpt, next_byte_loss),
    "gpt-options": (small_gpt, smoothed),
    "gpt-tied": (partial(small_gpt, tied=True), next_byte_loss),
}


def model_of(case: VocabularyCase) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[case.model][0]()
    return model.double() if case.double else model


def batches_of(case: VocabularyCase) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    tokens = [
        torch.randint(0, 256, (2 * case.microbatches, 17), generator=generator)
        for _ in range(STEPS)
    ]
    return [Batch((t[:, :-1].contiguous(),), {}, t[:, 1:].contiguous()) for t in tokens]


def sharded(case: VocabularyCase) -> Learned:
    """Train this process's share."""
    pipe = pipeline_of(case)
    losses, gradients = learn(pipe, case)
    return Learned(
        losses, gradients, pipe.state_dict(full=True), pipe.eval(*batches_of(case)[0].args)
    )


def pipeline_of(case: VocabularyCase) -> zbcompile.Pipeline:
    return zbcompile.pipeline(
        model_of(case),
        schedule=case.schedule,
        microbatches=case.microbatches,
        loss=MODELS[case.model][1],
        ranks=None if dist.is_initialized() else case.ranks,
        vocab=case.vocab,
        backend=case.backend,
    )


def learn(
    pipe: zbcompile.Pipeline, case: VocabularyCase
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Losses and gradients of each step of a pipeline for `case`."""
    losses, gradients, optimizer = [], [], None
    for batch in batches_of(case):
        losses.append(pipe.step(*batch.args, target=batch.target))
        optimizer = optimizer or sgd(pipe.parameters())
        gradients.append(
            {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
        )
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def eager(case: VocabularyCase) -> Learned:
    """The same training by the oracle."""
    model = model_of(case)
    losses, gradients, optimizer = [], [], sgd(model.parameters())
    for step, batch in enumerate(batches_of(case)):
        losses.append(eager_step(model, MODELS[case.model][1], batch, case.microbatches, step))
        gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        output = model(*batches_of(case)[0].args)
    return Learned(losses, gradients, dict(model.state_dict()), output)


sgd = partial(torch.optim.SGD, lr=0.1)


def join(shares: list[Learned]) -> Learned:
    """The ranks' shares as one: rows of a sharded parameter in rank order, of others the first
    rank's that has it."""
    gradients = [
        {
            name: _joined(
                [s.gradients[step][name] for s in shares if name in s.gradients[step]],
                shares[0].state[name],
            )
            for share in shares
            for name in share.gradients[step]
        }
        for step in range(STEPS)
    ]
    return Learned(shares[0].losses, gradients, shares[0].state, shares[0].output)


def _joined(parts: list[Tensor], whole: Tensor) -> Tensor:
    return parts[0] if parts[0].shape == whole.shape else torch.cat(parts)


def assert_equal_within(ours: Learned, theirs: Learned, bound: float) -> None:
    """Losses, gradients (max norm of each), the trained state and the evaluation."""
    assert ours.gradients[0].keys() == theirs.gradients[0].keys()
    pairs = [
        (f"loss {i}", a, b) for i, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))
    ]
    for step, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        pairs += [(f"gradient of {name} in step {step}", a[name], b[name]) for name in b]
    pairs += [(name, ours.state[name], theirs.state[name]) for name in theirs.state]
    pairs.append(("eval", ours.output, theirs.output))
    far = {what: distance(a, b) for what, a, b in pairs if distance(a, b) > bound}
    assert not far, far


def distance(one: Tensor, other: Tensor) -> float:
    """Relative to the largest entry of the reference, absolute where that is 0."""
    scale = other.abs().max().item()
    return (one - other).abs().max().item() / (scale or 1.0)
