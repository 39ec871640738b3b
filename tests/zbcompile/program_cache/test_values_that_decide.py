"""Models that decide by values: static inputs compile a program for each value, everything else is
refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.pool import Pool
from tests.support.training import AsEager, assert_same_tensors, gradients_of
from zbcompile.errors import PipelineError
from zbcompile.passes.errors import CaptureError, PartitionError

WIDTH, ROWS, LENGTH = 8, 2, 5
KINDS = ("full", "padded", "both", "full", "both", "padded")
OPTIONS = {
    "schedule": "1f1b",
    "ranks": 2,
    "microbatches": 4,
    "loss": nn.functional.mse_loss,
    "exact": True,
}
MASK = ("args[1]",)


class Attending(nn.Module):
    """Means over a sequence: by the fast way if nothing is padded, as transformers' attention does.
    `extra` trains only where something is padded, and `often` is used in both ways."""

    def __init__(self) -> None:
        super().__init__()
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


def batch_of(kind: str, microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a mask and targets: nothing padded, something in every microbatch, or in every second
    one."""
    generator = torch.Generator().manual_seed(seed)
    rows = ROWS * microbatches
    x = torch.randn(rows, LENGTH, WIDTH, generator=generator)
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    padded = {"full": [], "padded": range(microbatches), "both": range(1, microbatches, 2)}[kind]
    for i in padded:
        mask[i * ROWS + 1, -1 - i % 2 :] = 0
    return x, mask, torch.randn(rows, WIDTH, generator=generator)


def follow(
    kinds: tuple[str, ...],
    schedule: str,
    microbatches: int,
    model: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Train on a stream of batches, each compared with eager; the pipeline."""
    torch.manual_seed(0)
    compared = AsEager(model or Attending(), microbatches, schedule=schedule, **options)
    for seed, kind in enumerate(kinds):
        x, mask, target = batch_of(kind, microbatches, seed)
        compared.step(x, mask, target=target)
    gradients = [p.grad for p in compared.eager.parameters() if p.grad is not None]
    torch.testing.assert_close(
        compared.pipe.clip_grad_norm_(1e9), nn.utils.get_total_norm(gradients)
    )  # what other answers have trained counts as well
    return compared.pipe


class Reusing(nn.Module):
    """Uses its first layer once more, at the end, if something is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = x.mean(1)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden if mask.all() else self.layers[0](hidden)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(("schedule", "kinds"), [("zb-h1", KINDS), ("dualpipe-v", KINDS[1:])])
def test_a_stream_whose_mask_changes(schedule: str, kinds: tuple[str, ...]) -> None:
    """Three programs, one for each value, serve all batches, also those that mix them."""
    pipe = follow(kinds, schedule, 4, ranks=2, static_inputs=MASK)
    assert len(pipe._compiled.steps.entries) == 3
    first, second, third = (entry.graphs[0].program for entry in pipe._compiled.steps.entries)
    assert first.homes == second.homes == third.homes


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("kinds", [("padded", "full"), ("full", "padded")])
def test_programs_that_read_a_parameter_on_other_stages_are_refused(kinds: tuple[str, str]) -> None:
    """A layer runs on one stage, or on two."""
    with pytest.raises(
        PartitionError, match="reads its parameters in another order than when it was placed"
    ):
        follow(kinds, "zb-h1", 4, model=Reusing(), ranks=2, static_inputs=MASK)


def test_a_decision_is_refused_with_its_line_and_the_remedy() -> None:
    with pytest.raises(
        CaptureError,
        match=r"value that depends on its inputs \(.*that_decide\.py:\d+\).*static_inputs",
    ):
        follow(("full",), "zb-h1", 2, ranks=2)
    with pytest.raises(
        PipelineError, match=r"'mask', which is not an input; the inputs are args\[0\], args\[1\]"
    ):
        follow(("full",), "zb-h1", 2, ranks=2, static_inputs=("mask",))


class Guarded(nn.Module):
    """Asserts something of an activation, `guarded` as the refusal of it says, or not."""

    def __init__(self, guarded: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.guarded = guarded

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if not (self.guarded and torch.compiler.is_compiling()):
            assert x.isfinite().all()
        return self.layers[1](torch.where(x.mean() > 0, x, -x))


def test_an_assert_is_refused_or_guarded() -> None:
    """The other remedy, torch.where, is in the model as well."""
    x = torch.randn(4, WIDTH)
    with pytest.raises(CaptureError, match=r"that_decide\.py:\d+.*is_compiling\(\)"):
        zbcompile.pipeline(Guarded(False), **OPTIONS).step(x, target=x)
    model = Guarded(True)
    eager = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="path that it has for compilers"):
        loss = zbcompile.pipeline(model, **OPTIONS).step(x, target=x)
    assert torch.equal(
        loss, sum(nn.functional.mse_loss(eager(part), part).detach() / 4 for part in x.chunk(4))
    )


@pytest.mark.slow
def test_a_saved_program_refuses_other_values(tmp_path: Path) -> None:
    """In one line, before anything runs; with the value that it was compiled for it runs the same
    bits."""
    pipe = follow(("full",), "zb-h1", 2, ranks=2, static_inputs=MASK)
    pipe.program.save(tmp_path / "program")
    loaded = zbcompile.load(tmp_path / "program", state_dict=pipe.state_dict(full=True))
    x, mask, target = batch_of("full", 2, seed=5)
    loaded.step_index = pipe.step_index
    for item in (pipe, loaded):
        for parameter in item.parameters():
            parameter.grad = None
    assert torch.equal(loaded.step(x, mask, target=target), pipe.step(x, mask, target=target))
    assert_same_tensors(gradients_of(loaded), gradients_of(pipe), "gradient of")
    x, mask, target = batch_of("padded", 2)
    with pytest.raises(
        PipelineError, match=r"args\[1\] = \[\[1, 1, 1, 1, 1\].*received .*args\[1\] = "
    ):
        loaded.step(x, mask, target=target)


@pytest.mark.slow
def test_an_evaluation_computes_its_batch_as_one() -> None:
    """As eager does: one padded sample decides for all of them."""
    model = Attending()
    pipe = follow(("full",), "gpipe", 2, model=model, ranks=2, static_inputs=MASK)
    eager = copy.deepcopy(model).eval()
    for kind in ("full", "both", "padded", "full"):
        x, mask, _ = batch_of(kind, 2, seed=9)
        torch.testing.assert_close(pipe.eval(x, mask), eager(x, mask), rtol=1e-6, atol=1e-6)


def followed() -> int:
    return len(follow(KINDS[:3], "zb-h1", 4, static_inputs=MASK)._compiled.steps.entries)


@pytest.mark.slow
def test_on_two_ranks(pool: Pool) -> None:
    assert pool.run(followed, ranks=2) == [3, 3]
