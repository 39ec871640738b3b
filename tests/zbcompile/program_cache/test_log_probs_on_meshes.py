"""Log-probabilities beside tensor, context and data parallelism are those of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zbcompile
from tests.support.dtensor_models import LENGTH, VOCABULARY, Llama, parallelised
from tests.support.meshes import mesh_of
from tests.support.parallel_models import ContextParallel
from tests.support.pool import Pool

ROWS = 4


def frozen(model: nn.Module, mesh: Any) -> zbcompile.Pipeline:
    return zbcompile.pipeline(
        model.requires_grad_(False), mesh=mesh, schedule="1f1b", microbatches=2
    )


def far(pipe: zbcompile.Pipeline, logits: Tensor, labels: Tensor, *args: Tensor) -> float:
    """By how much log-probabilities for `args` differ from those of `logits`."""
    normal = torch.log_softmax(logits.detach(), -1)
    expected = normal.gather(-1, labels[..., None])[..., 0]
    return float((pipe.log_probs(*args, labels=labels) - expected).abs().max())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (2, ROWS, LENGTH), generator=generator).unbind()  # type: ignore[return-value]


def beside_tp() -> tuple[float, str]:
    """Logits that are a DTensor sharded over the words; and local parts of the words, which are
    refused."""
    mesh, (tokens, labels) = mesh_of(pp=1, tp=2), batch(0)
    found = far(
        frozen(parallelised(mesh["tp"], "loss", layers=1), mesh),
        Llama(layers=1)(tokens),
        labels,
        tokens,
    )
    parts = Llama(layers=1)
    head = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1))
    parallelize_module(parts, mesh["tp"], {"head": head})
    with pytest.raises(zbcompile.CompileError) as raised:
        frozen(parts, mesh).log_probs(tokens, labels=labels % 6)
    return found, str(raised.value)


def beside_cp() -> float:
    """Each rank has the logits of its part of the sequence, and passes the labels of that part."""
    mesh = mesh_of(pp=1, cp=2)
    torch.manual_seed(1)
    x = torch.randn(ROWS, 8, 16)
    whole, labels = ContextParallel(None, "gather")(x), torch.randint(16, (ROWS, 8))
    part = mesh.get_local_rank("cp")
    pipe = frozen(ContextParallel(mesh, "gather"), mesh)
    return far(pipe, whole.chunk(2, 1)[part], labels.chunk(2, 1)[part], x)


def beside_dp() -> float:
    """Each replica has rows of its own."""
    mesh = mesh_of(dp=2, pp=1)
    tokens, labels = batch(mesh.get_local_rank("dp"))
    return far(frozen(Llama(layers=1), mesh), Llama(layers=1)(tokens), labels, tokens)


def on_meshes() -> tuple[list[float], str]:
    found, reason = beside_tp()
    return [found, beside_cp(), beside_dp()], reason


@pytest.mark.slow
def test_on_meshes(pool: Pool) -> None:
    for found, reason in pool.run(on_meshes):
        assert max(found) <= 2e-6
        assert (
            "this rank's part of them, by its part of head.weight; a distribution needs all words"
            in reason
        )
        assert "\n" not in reason
