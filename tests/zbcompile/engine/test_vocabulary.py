"""A sharded output layer trains as the unsplit model does: in one process, over gloo, in replicas; its
rows are parameters like others."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.oracle import Batch
from tests.support.pool import Pool
from tests.support.training import interpreted
from tests.support.vocabulary_training import (
    MODELS,
    VocabularyCase,
    assert_equal_within,
    batches_of,
    distance,
    eager,
    join,
    model_of,
    sharded,
)
from zbcompile.errors import PipelineError
from zbcompile.passes.errors import CompileError

RARE = pytest.mark.beyond_sample


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        VocabularyCase("gpt-options", "zb-h1", 2, 2),
        *(
            pytest.param(VocabularyCase(*case), marks=RARE)
            for case in (
                ("gpt", "1f1b", 1, 1),
                ("gpt-options", "dualpipe-v", 2, 2),
                ("gpt", "1f1b", 2, 4),
                ("gpt-tied", "zb-v", 2, 2, 4, interpreted),
                ("gpt-options", "zb-v", 1, 3, 6),
                ("gpt", "interleaved-zb", 1, 2),
                ("llama", "zb-h1", 1, 4),  # untied; GPT-2 and BERT tied, Gemma-2 with a soft cap
                ("gpt2", "dualpipe-v", 2, 4, 8),
                ("gemma2", "zb-v", 1, 2),
                ("bert", "1f1b", 1, 4),
            )
        ),
    ],
    ids=str,
)
def test_in_one_process(case: VocabularyCase) -> None:
    """Models of transformers compute their losses in fp32."""
    bound = 1e-12 if case.model.startswith("gpt-") or case.model == "gpt" else 1e-6
    assert_equal_within(sharded(case), eager(case), bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        VocabularyCase("gpt-tied", "1f1b", 1, 2),
        pytest.param(VocabularyCase("gpt-options", "zb-v", 2, 2), marks=RARE),
        pytest.param(VocabularyCase("gpt-tied", "zb-h1", 1, 4), marks=RARE),
        pytest.param(VocabularyCase("gpt-tied", "1f1b", 2, 2, 8, replicas=2), marks=RARE),
    ],
    ids=str,
)
def test_in_processes(case: VocabularyCase, pool: Pool) -> None:
    """Two replicas train as one on the concatenated batch: the rows of a tied weight are reduced
    once, after the lookups have been added."""
    shares, expected = pool.run(sharded, case, ranks=case.ranks * case.replicas), eager(case)
    for first in range(0, len(shares), case.ranks):
        assert_equal_within(join(shares[first : first + case.ranks]), expected, 1e-12)


def test_what_cannot_be_is_refused() -> None:
    case = VocabularyCase("gpt", "1f1b", 1, 2)
    batch = batches_of(case)[0]
    for options, reason in (
        ({"vocab": 3}, "vocab=3; expected"),
        ({"vocab": 1, "exact": True}, "exact=True cannot use it"),
        ({"vocab": 1, "loss": lambda y, goal: y.square().mean()}, "vocab=1: .*Use vocab=.off"),
    ):
        arguments = {"loss": MODELS["gpt"][1], "schedule": "1f1b", "microbatches": 4} | options
        with pytest.raises((CompileError, PipelineError), match=reason):
            zbcompile.pipeline(model_of(case), ranks=2, **arguments).compile(
                *batch.args, target=batch.target
            )


def fill(name: str, tensor: Tensor) -> None:
    tensor.normal_(std=0.2)


def tall() -> nn.Module:
    return GPT(layers=1, width=16, heads=2, length=8)


momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def on_meta(folder: str) -> dict[str, Any]:
    """A model on the meta device; saved, changed and restored."""
    with torch.device("meta"):
        model = tall()
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "loss": next_byte_loss}
    options |= {"init": fill, "vocab": 1}
    pipe = zbcompile.pipeline(model, ranks=None if dist.is_initialized() else 2, **options)
    tokens = torch.randint(0, 256, (8, 9), generator=torch.Generator().manual_seed(1))
    batch = Batch((tokens[:, :-1].contiguous(),), {}, tokens[:, 1:].contiguous())
    loss = pipe.step(*batch.args, target=batch.target)
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    states, optimizer = [copied(pipe)], momentum(pipe.parameters())
    optimizer.step()
    states.append(copied(pipe))
    head = pipe.state_dict()["head.weight"]
    zbcompile.save_checkpoint(folder, pipe, optimizer)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.add_(1.0)
    zbcompile.load_checkpoint(folder, pipe, optimizer)
    return {
        "loss": loss,
        "gradients": gradients,
        "states": [*states, copied(pipe)],
        "shapes": (*head.shape, *getattr(head, "_local_tensor", head).shape),
        "real": {name for name, p in model.named_parameters() if not p.is_meta},
    }


def copied(pipe: zbcompile.Pipeline) -> dict[str, Tensor]:
    """Returns copies of a state dict: as eager's, it shows the parameters themselves."""
    return {name: tensor.clone() for name, tensor in pipe.state_dict(full=True).items()}


@pytest.mark.slow
def test_a_rank_makes_its_own_rows_real(pool: Pool, tmp_path: Path) -> None:
    """Only a rank's rows, DTensors in the state dict, get memory, with the values that the whole
    parameter would have; gradients are those of one process with all ranks, and a checkpoint puts
    the rows together again."""
    alone, seen = on_meta(str(tmp_path / "alone")), pool.run(on_meta, str(tmp_path / "ranks"))
    joined = {}
    for item in seen:
        assert item["shapes"] == (256, 16, 128, 16)
        assert not {"head.weight", "token.weight"} & item["real"]
        assert distance(item["loss"], alone["loss"]) < 1e-6
        before, trained, restored = item["states"]
        for key, value in alone["states"][0].items():
            assert torch.equal(before[key], value), key
            assert torch.equal(restored[key], trained[key]), key
    for name, gradient in alone["gradients"].items():
        parts = [item["gradients"][name] for item in seen if name in item["gradients"]]
        joined[name] = torch.cat(parts) if len(parts) == 2 else parts[0]
        assert distance(joined[name], gradient) < 1e-6, name
    model = tall()
    optimizer = momentum(model.parameters())
    zbcompile.load_checkpoint(tmp_path / "ranks", model, optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, seen[0]["states"][1][name]), name
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], joined[name]), name
