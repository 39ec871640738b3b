"""Training with a sharded output layer, and by eager accumulation, so that the two can be compared:
small GPTs, and models of the zoo."""

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
from tests.support.replicated import mesh_of_replicas
from tests.support.training import gradients_of
from tests.support.zoo import ZOO
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
    replicas: int = 1

    def __str__(self) -> str:
        return f"{self.model} {self.schedule} vocab={self.vocab} ranks={self.ranks}"


@dataclass(frozen=True)
class Learned:
    """What a run leaves: losses and gradients of each step, the state dict, an evaluation."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]
    output: Any


def small_gpt(tied: bool = False) -> nn.Module:
    return GPT(layers=1, width=32, heads=2, length=16, tied=tied)


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    """Ignored tokens, label smoothing, a soft cap and z-loss at the same time."""
    logits = 20 * torch.tanh(output / 20)
    target = target.masked_fill(target % 5 == 0, -100)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    return loss + 1e-3 * torch.logsumexp(logits, -1).square().mean()


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Any]] = {
    "gpt": (small_gpt, next_byte_loss),
    "gpt-options": (small_gpt, smoothed),
    "gpt-tied": (partial(small_gpt, tied=True), next_byte_loss),
    **{name: (ZOO[name].make, None) for name in ("llama", "gpt2", "gemma2", "bert")},
}


def model_of(case: VocabularyCase) -> nn.Module:
    """In double precision, but Gemma-2, of which eager mode makes NaN then."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[case.model][0]()
    return model if case.model == "gemma2" else model.double()


def batches_of(case: VocabularyCase) -> list[Batch]:
    if case.model in ZOO:
        return ZOO[case.model].batches(1, 2 * case.microbatches)
    generator, size = torch.Generator().manual_seed(1), (2 * case.microbatches, 17)
    tokens = [torch.randint(0, 256, size, generator=generator) for _ in range(STEPS)]
    return [Batch((t[:, :-1].contiguous(),), {}, t[:, 1:].contiguous()) for t in tokens]


def sharded(case: VocabularyCase) -> Learned:
    """Train this process's share."""
    pipe = pipeline_of(case)
    losses, gradients = learn(pipe, case)
    batch = batches_of(case)[0]
    output = None if case.model in ZOO or dist.is_initialized() else pipe.eval(*batch.args)
    return Learned(losses, gradients, pipe.state_dict(full=True), output)


def pipeline_of(case: VocabularyCase) -> zbcompile.Pipeline:
    return zbcompile.pipeline(
        model_of(case),
        schedule=case.schedule,
        microbatches=case.microbatches // case.replicas,
        mesh=mesh_of_replicas() if case.replicas > 1 else None,
        loss=MODELS[case.model][1],
        ranks=None if dist.is_initialized() else case.ranks,
        vocab=case.vocab,
    )


def learn(
    pipe: zbcompile.Pipeline | nn.Module, case: VocabularyCase
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Losses and gradients of each step of a pipeline for `case`, or of its model by the oracle."""
    losses, gradients, optimizer = [], [], None
    for step, batch in enumerate(batches_of(case)):
        if isinstance(pipe, nn.Module):
            losses.append(eager_step(pipe, MODELS[case.model][1], batch, case.microbatches, step))
        else:
            if case.replicas > 1:
                batch = list(batch.parts(case.replicas))[pipe.ranks.mesh.index("dp")]
            target = {} if batch.target is None else {"target": batch.target}
            losses.append(pipe.step(*batch.args, **batch.kwargs, **target))
        optimizer = optimizer or sgd(pipe.parameters())
        gradients.append({name: g for name, g in gradients_of(pipe).items() if g is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def eager(case: VocabularyCase) -> Learned:
    """The same training by the oracle."""
    model, batch = model_of(case), batches_of(case)[0]
    losses, gradients = learn(model, case)
    with torch.no_grad():
        output = None if case.model in ZOO else model(*batch.args)
    return Learned(losses, gradients, dict(model.state_dict()), output)


sgd = partial(torch.optim.SGD, lr=0.1)


def join(shares: list[Learned]) -> Learned:
    """The ranks' shares as one: rows of a sharded parameter in rank order, of others the first
    rank's that has it."""
    first, gradients = shares[0], []
    for step in range(len(first.losses)):
        parts: dict[str, list[Tensor]] = {}
        for share in shares:
            for name, gradient in share.gradients[step].items():
                parts.setdefault(name, []).append(gradient)
        full = {name: item[0].shape == first.state[name].shape for name, item in parts.items()}
        gradients.append({n: item[0] if full[n] else torch.cat(item) for n, item in parts.items()})
    return Learned(first.losses, gradients, first.state, first.output)


def assert_equal_within(ours: Learned, theirs: Learned, bound: float) -> None:
    """Losses, gradients (max norm of each), the trained state and the evaluation."""
    pairs = [("loss", *both) for both in zip(ours.losses, theirs.losses, strict=True)]
    for step, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        assert a.keys() == b.keys()
        pairs += [(f"gradient of {name} in step {step}", a[name], b[name]) for name in b]
    pairs += [(name, ours.state[name], theirs.state[name]) for name in theirs.state]
    pairs += [] if ours.output is None else [("eval", ours.output, theirs.output)]
    # the gradient of a key's bias is zero but for rounding
    far = {what: distance(a, b) for what, a, b in pairs if b.abs().max() > 1e-12}
    assert not (wrong := {what: item for what, item in far.items() if item > bound}), wrong


def distance(one: Tensor, other: Tensor) -> float:
    """Relative to the largest entry of the reference, absolute where that is 0."""
    scale = other.abs().max().item()
    return (one - other).abs().max().item() / (scale or 1.0)
