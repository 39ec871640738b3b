"""One training step of transformers' models with sharded vocabularies, and of the same models
unsplit."""

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import Gradients, eager_step
from tests.support.training import compiled_once
from tests.support.vocabulary_training import distance
from tests.support.zoo import ZOO

MODELS = ("llama", "gpt2", "gemma2", "bert")
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "dualpipe-v")
MICROBATCHES = 8
Step = tuple[Tensor, Gradients]


@dataclass(frozen=True)
class ModelCase:
    """One step of a model of the zoo."""

    model: str
    schedule: str
    ranks: int
    barriers: int = 1

    def __str__(self) -> str:
        return f"{self.model} {self.schedule} ranks={self.ranks} barriers={self.barriers}"


def model_of(name: str) -> nn.Module:
    """In double precision, but Gemma-2, of which eager mode makes NaN then."""
    return ZOO[name].model().to(torch.float32 if name == "gemma2" else torch.float64)


def one_step(case: ModelCase) -> Step:
    """The loss, and this process's share of the gradients."""
    (batch,) = ZOO[case.model].batches(1, MICROBATCHES)
    pipe = zbcompile.pipeline(
        model_of(case.model),
        schedule=case.schedule,
        microbatches=MICROBATCHES,
        ranks=None if dist.is_initialized() else case.ranks,
        vocab=case.barriers,
    )
    loss = pipe.step(*batch.args, **batch.kwargs)
    return loss, {name: p.grad for name, p in pipe.named_parameters()}


def quick_step(case: ModelCase) -> Step:
    """Like `one_step`, but compiled once."""
    with compiled_once(f"{case.model} vocab={case.barriers}", exact=False):
        return one_step(case)


@cache
def unsplit(name: str) -> Step:
    model = model_of(name)
    (batch,) = ZOO[name].batches(1, MICROBATCHES)
    loss = eager_step(model, None, batch, MICROBATCHES, 0)
    return loss, {name: p.grad for name, p in model.named_parameters()}


def join(shares: list[Step], like: Gradients) -> Step:
    """The ranks' gradients as one: rows in rank order."""
    joined: dict[str, Tensor | None] = {}
    for name, gradient in like.items():
        parts = [grads[name] for _, grads in shares if grads.get(name) is not None]
        rows = gradient is not None and parts and parts[0].shape != gradient.shape  # type: ignore[union-attr]
        joined[name] = torch.cat(parts) if rows else (parts[0] if parts else None)  # type: ignore[arg-type]
    return shares[0][0], joined


def assert_same(ours: Step, theirs: Step) -> None:
    """Within 1e-6 of the largest entry: these models compute their losses in fp32."""
    assert distance(ours[0], theirs[0]) < 1e-6
    for name, gradient in theirs[1].items():
        result = ours[1][name]
        assert (result is None) == (gradient is None), name
        if gradient is not None and result is not None:
            # the gradient of a key's bias is zero but for rounding
            noise = gradient.abs().max() < 1e-12
            assert noise or distance(result, gradient) < 1e-6, name
