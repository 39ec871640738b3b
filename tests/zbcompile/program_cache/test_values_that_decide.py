"""Models that decide by values: static inputs compile a program for each value, everything else is
refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.training import AsEager, assert_same_tensors, gradients_of

WIDTH, LENGTH = 8, 5


class Attending(nn.Module):
    """Means over a sequence: by the fast way if nothing is padded, as transformers' attention does.
    `extra` trains only where something is padded, and `often` is used in both ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.often, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.to(torch.bool)
        hidden = self.dropout(self.first(x).tanh())
        if mask.all():
            return self.last(self.often(hidden).mean(1))
        weight = mask / mask.sum(1, keepdim=True)
        hidden = self.often(hidden + self.dropout(self.extra(hidden)))
        return self.last((hidden * weight[..., None]).sum(1))


def batch_of(kind: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a mask and targets of four microbatches: nothing padded, something in every
    microbatch, or in every second one."""
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(8, LENGTH, WIDTH, generator=generator), torch.ones(8, WIDTH)
    mask = torch.ones(8, LENGTH, dtype=torch.int64)
    for i in {"full": (), "padded": range(4), "both": (1, 3)}[kind]:
        mask[2 * i + 1, -1 - i % 2 :] = 0
    return x, mask, target


def follow(kinds: tuple[str, ...], **more: Any) -> Any:
    """Train on a stream of batches, each compared with eager."""
    options = {"schedule": "zb-h1", "ranks": 2, "static_inputs": ("args[1]",), **more}
    compared = AsEager(Attending(), 4, **options)
    for seed, kind in enumerate(kinds):
        x, mask, target = batch_of(kind, seed)
        compared.step(x, mask, target=target)
    return compared


@pytest.mark.slow
def test_a_stream_whose_mask_changes() -> None:
    """Three programs, one for each value, serve all batches, also those that mix them. An
    evaluation computes its batch as one, as eager does: one padded sample decides for all."""
    compared = follow(("full", "padded", "both", "full"))
    programs = [entry.graphs[0].program for entry in compared.pipe._compiled.steps.entries]
    assert len(programs) == 3
    assert programs[0].homes == programs[1].homes == programs[2].homes
    gradients = [p.grad for p in compared.eager.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)  # what other answers have trained counts as well
    torch.testing.assert_close(compared.pipe.clip_grad_norm_(1e9), norm)
    for kind in ("full", "both"):
        x, mask, _ = batch_of(kind, seed=9)
        expected = compared.eager.eval()(x, mask)
        torch.testing.assert_close(compared.pipe.eval(x, mask), expected, rtol=1e-6, atol=1e-6)


class Guarded(nn.Sequential):
    """Asserts something of an activation, `guarded` as the refusal of it says, or not."""

    guarded = False

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        if not (self.guarded and torch.compiler.is_compiling()):
            assert x.isfinite().all()
        return self[1](torch.where(x.mean() > 0, x, -x))  # type: ignore[no-any-return]


def test_a_decision_is_refused_with_its_line_and_a_remedy_that_works() -> None:
    where = r"that_decide\.py:\d+"
    says = rf"value that depends on its inputs \(.*{where}\).*static_inputs"
    with pytest.raises(zbcompile.CaptureError, match=says):
        follow(("full",), static_inputs=())
    says = r"'mask', which is not an input; the inputs are args\[0\], args\[1\]"
    with pytest.raises(zbcompile.PipelineError, match=says):
        follow(("full",), static_inputs=("mask",))
    model, x = Guarded(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), torch.randn(8, WIDTH)
    options: Any = {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "loss": F.mse_loss}
    with pytest.raises(zbcompile.CaptureError, match=rf"{where}.*is_compiling\(\)"):
        zbcompile.pipeline(model, **options).step(x, target=x)
    model.guarded, eager = True, copy.deepcopy(model)
    with pytest.warns(UserWarning, match="path that it has for compilers"):
        loss = zbcompile.pipeline(model, exact=True, **options).step(x, target=x)
    assert torch.equal(loss, sum(F.mse_loss(eager(p), p).detach() / 4 for p in x.chunk(4)))


@pytest.mark.slow
def test_a_saved_program_refuses_other_values(tmp_path: Path) -> None:
    """In one line, before anything runs; with its own value it runs the same bits."""
    pipe = follow(("full",)).pipe
    pipe.program.save(tmp_path / "program")
    loaded = zbcompile.load(tmp_path / "program", state_dict=pipe.state_dict(full=True))
    loaded.step_index = pipe.step_index
    x, mask, target = batch_of("full", seed=5)
    pipe.zero_grad()
    assert torch.equal(loaded.step(x, mask, target=target), pipe.step(x, mask, target=target))
    assert_same_tensors(gradients_of(loaded), gradients_of(pipe), "gradient of")
    says = r"args\[1\] = \[\[1, 1, 1, 1, 1\].*received .*args\[1\] = "
    with pytest.raises(zbcompile.PipelineError, match=says):
        loaded.step(*batch_of("padded")[:2], target=target)
