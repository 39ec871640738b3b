"""Models that decide by the values of their inputs: every microbatch runs the graphs of its own answer."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support import asserting
from tests.support.deciding import (
    KINDS,
    REUSING,
    WIDTH,
    Attending,
    Eager,
    alone,
    batch_of,
    exchanging_answers,
    follow,
    followed,
    make_reusing,
    replicated_answers,
    reusing,
)
from tests.support.functions import Saving
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors, gradients_of
from zbcompile.distributed.process_group import find_ranks
from zbcompile.errors import PipelineError
from zbcompile.passes.capture.export import capture
from zbcompile.program_cache.cache import ProgramCache


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(("schedule", "kinds"), [("zb-h1", KINDS), ("dualpipe-v", KINDS[1:])])
def test_a_stream_whose_mask_changes(schedule: str, kinds: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Two programs serve all batches, also those that mix both kinds."""
    pipe = follow(kinds, schedule, 4, ranks=2)
    assert len(list(pipe._compiled)) == 2
    first, second = (each.program for each in pipe._compiled)
    assert (first.cuts, first.homes) == (second.cuts, second.homes)
    said = capsys.readouterr().out
    assert said.count(f"compiling again for the answer {kinds[0] != 'full'} to") == 1
    assert "deciding.py:" in said
    assert "if mask.all():" in said


@pytest.mark.slow
def test_replicas_with_different_answers(pool: Pool) -> None:
    """What one replica alone has trained is summed with the other's zeros; both compile the same programs."""
    kinds = ("full", "padded")
    expected = alone(kinds)
    for found in pool.run(replicated_answers, kinds, ranks=2):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-7)


def test_replicas_that_exchange_tensors_answer_alike(pool: Pool) -> None:
    """Else one would wait in a collective that the other never enters."""
    for outcome in pool.outcomes(exchanging_answers, "full", "both", ranks=2):
        assert re.search(r"ranks 0 and 1 answer .*mask\.all.* differently.*or exchange tensors", outcome.text), outcome


@pytest.mark.slow
def test_on_two_ranks(pool: Pool) -> None:
    assert pool.run(followed, "zb-h1", ranks=2) == [2, 2]


@pytest.mark.slow
def test_an_evaluation_answers_for_its_whole_batch() -> None:
    """Eager evaluates the whole batch at once, so one padded sample decides for all of them."""
    model = Attending()
    pipe = follow(KINDS[:1], "gpipe", 2, model=model, ranks=2)
    eager = copy.deepcopy(model).eval()
    for kind in ("full", "both", "padded", "full"):
        x, mask, _ = batch_of(kind, 2, seed=9)
        torch.testing.assert_close(pipe.eval(x, mask), eager(x, mask), rtol=1e-6, atol=1e-6)
    assert len(pipe._compiled.cache.evaluations) == 2


OPTIONS = {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "loss": nn.functional.mse_loss, "exact": True}


class Curious(nn.Module):
    """Asks what decides nothing, and reads a number that decides how often a layer runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if 0 in mask:
            self.seen = "padding"
        hidden = x.mean(1)
        for _ in range(int(mask.sum(1).min())):
            hidden = self.layer(hidden).tanh()
        return self.last(hidden)


@pytest.mark.slow
def test_numbers_that_decide_and_answers_that_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer runs two, three or four times, within one batch; `eager` runs it as often."""
    torch.manual_seed(0)
    model = Curious(8 * WIDTH)
    eager = Eager(copy.deepcopy(model), 4)
    pipe = zbcompile.pipeline(model, max_shapes=4, **OPTIONS)
    x, mask, target = batch_of("padded", 4)  # four or three of five
    mask[:2] = 1
    assert torch.equal(pipe.step(x, mask, target=target), eager.step(x, mask, target))
    mask[:4] = torch.tensor([1, 1, 0, 0, 0])
    assert torch.equal(pipe.step(x, mask, target=target), eager.step(x, mask, target))
    assert len(list(pipe._compiled)) == 4
    assert "the answer 2 to" in capsys.readouterr().out
    mask[0] = torch.tensor([1, 0, 0, 0, 0])
    with pytest.raises(PipelineError, match=r"test_values_that_decide.* take more programs than the 4 that"):
        pipe.step(x, mask, target=target)


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_uses_on_several_stages_in_some_microbatches(pool: Pool, exact: bool) -> None:
    """A layer runs on one stage or on two, within one batch: on two processes as in one, and as in eager mode."""
    eager = Eager(make_reusing(), 4)
    for kind in REUSING:
        eager.step(*batch_of(kind, 4))
    theirs = {name: parameter.grad for name, parameter in eager.model.named_parameters()}
    whole, *parts = (reusing(2, exact), *pool.run(reusing, None, exact))
    assert whole.keys() == theirs.keys() == set().union(*parts)
    for found in (whole, *parts):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, theirs[name], **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.slow
def test_all_shapes_together_keep_so_many_programs() -> None:
    """Two shapes with two answers each: at most two programs, of which one is the first."""
    torch.manual_seed(0)
    model = Curious(WIDTH)
    eager = Eager(copy.deepcopy(model), 2)
    pipe = zbcompile.pipeline(model, max_shapes=2, **{**OPTIONS, "ranks": 1, "microbatches": 2})
    for rows in (2, 4):
        for length in (1, 2):
            x, mask, target = (each[:rows] for each in batch_of("full", 2))
            mask[:, length:] = 0
            assert torch.equal(pipe.step(x, mask, target=target), eager.step(x, mask, target))
            assert len(list(pipe._compiled)) <= 2


class OneRow(nn.Module):
    """Asks only in a microbatch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        full = (mask == 1).all(1, keepdim=True)
        if x.shape[0] > 1:
            return self.layer(x) * torch.where(full, 2.0, 0.5)
        return self.layer(x) * (2.0 if full else 0.5)


@pytest.mark.slow
def test_a_chunk_of_an_evaluation_that_asks() -> None:
    """Nobody would ask the other chunks: the batch runs as a whole."""
    model = OneRow()
    pipe = zbcompile.pipeline(model, **{**OPTIONS, "ranks": 1, "microbatches": 2, "schedule": "gpipe"})
    x, mask = torch.randn(4, WIDTH), torch.ones(4, WIDTH)
    pipe.compile(x, mask, target=x)
    mask[1] = 0
    torch.testing.assert_close(pipe.eval(x[:2], mask[:2]), model(x[:2], mask[:2]))


def test_only_what_all_ranks_use_counts_as_used() -> None:
    """A replica's own answers must not change what it evicts: the others would keep other programs."""
    x = torch.ones(1, WIDTH)
    guards = capture(OneRow(), (x, x), {}, x, nn.functional.mse_loss).guards
    assert guards is not None
    answers = [replace(guards, given=replace(guards.given, answers=(number,))) for number in range(4)]
    kept = ProgramCache(find_ranks(lambda: x.device, 1, None, 300.0), 3)
    for number in range(3):
        kept.add("shape", answers[number], (), ())
    assert len(kept.right("shape")) == 3
    kept.add("shape", answers[3], (), ())
    assert kept.trim()
    assert [each.number for each in kept.steps] == [0, 2, 3]


class Deaf(nn.Module):
    """Asks, and does the same whatever the answer is, also in calls of a Function, which every capture numbers anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        if flag:
            self.said = 1
        one, other = self.layers
        return Saving.apply(one(x).relu(), other.weight, other.bias, 1.0)


@pytest.mark.slow
def test_an_answer_that_decides_nothing_compiles_nothing() -> None:
    options = {"schedule": "1f1b", "ranks": 2, "microbatches": 2, "loss": nn.functional.mse_loss}
    pipe = zbcompile.pipeline(Deaf(), **options)
    x = torch.randn(4, WIDTH)
    for flag in (True, False, True):
        pipe.step(x, torch.tensor(flag), target=x)
    assert len({id(each) for each in pipe._compiled}) == 1


class Picking(nn.Module):
    """Fills what is padded with a parameter, and takes some more of the rest, however many."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.filler = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        kept, hidden = mask.bool(), 2 * self.first(x)
        hidden[~kept] = self.filler
        return self.last(hidden.mean(1)) + self.more(hidden)[kept].mean(0)


@pytest.mark.slow
def test_rows_that_a_mask_picks() -> None:
    """Every count has its program, also within one step: ten of ten rows, and eight."""
    pipe = follow(("both", "full"), "zb-h1", 2, model=Picking(), ranks=2)
    assert len(list(pipe._compiled)) == 2


class Limited(nn.Module):
    """Asks, and computes, with tensors that it keeps as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.limit = nn.Linear(WIDTH, WIDTH), torch.tensor(3)
        self.scales = [torch.tensor(2.0), torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (self.scales[0] if self.limit > 3 else self.scales[1])


@pytest.mark.slow
def test_plain_tensors_that_change_between_steps() -> None:
    """In place they count, alone as well as beside inputs; one that is replaced is read from then on."""
    model, x = Limited(), torch.randn(4, WIDTH)
    pipe = zbcompile.pipeline(model, **{**OPTIONS, "ranks": 1, "microbatches": 1})
    for change in (model.limit, model.scales[0], model.scales[1]):
        loss = pipe.step(x, target=x)
        assert torch.equal(loss, nn.functional.mse_loss(model(x), x).detach())
        change += 1
    model.scales[0] = torch.tensor(4.0)
    assert torch.equal(pipe.step(x, target=x), nn.functional.mse_loss(model(x), x).detach())


@pytest.mark.slow
def test_a_saved_program_holds_every_answer(tmp_path: Path) -> None:
    """What was compiled so far; each microbatch of a loaded program runs the graphs of its own answer."""
    pipe = follow(KINDS, "zb-h1", 2, ranks=2)
    pipe.program.save(tmp_path / "program")
    loaded = zbcompile.load(tmp_path / "program", state_dict=pipe.state_dict(full=True))
    for kind in ("both", "padded", "full"):
        x, mask, target = batch_of(kind, 2, seed=5)
        loaded.step_index = pipe.step_index
        for each in (pipe, loaded):
            for parameter in each.parameters():
                parameter.grad = None
        assert torch.equal(loaded.step(x, mask, target=target), pipe.step(x, mask, target=target))
        assert_same_tensors(gradients_of(loaded), gradients_of(pipe), "gradient of")


def test_a_saved_program_refuses_other_answers(tmp_path: Path) -> None:
    """In one line, before anything runs; with the answers that it was compiled for it runs the same bits."""
    pipe = follow(("padded",), "zb-h1", 2, ranks=2)
    pipe.program.save(tmp_path / "program")
    loaded = zbcompile.load(tmp_path / "program", state_dict=pipe.state_dict(full=True))
    x, mask, target = batch_of("padded", 2, seed=5)
    loaded.step_index = pipe.step_index
    assert torch.equal(loaded.step(x, mask, target=target), pipe.step(x, mask, target=target))
    for kind, number in (("full", 0), ("both", 0)):
        x, mask, target = batch_of(kind, 2)
        with pytest.raises(
            PipelineError, match=rf"microbatch {number} gives another answer.*mask\.all.*True, not False"
        ):
            loaded.step(x, mask, target=target)


@pytest.mark.slow
def test_a_violated_assertion_ends_the_step_on_every_rank(pool: Pool) -> None:
    message = (
        r"rank 1 failed at F1\.2 of step 1: AssertionError: microbatch 2 violates what forward requires on stage 1: "
        r".*asserting\.py:\d+  assert not x\.isnan"
    )
    for outcome in pool.outcomes(asserting.stepped_until_it_fails):
        assert outcome.error == "FaultError"
        assert re.search(message, outcome.text), outcome.text
