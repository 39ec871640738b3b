"""Bad input: one clear error on every rank, in one process and in two, and nothing hangs."""

import copy
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, WIDTH
from tests.support.pool import Pool
from tests.support.refused import ROWS, Refused, assert_refused, pipeline_of, refusals, said, train
from tests.support.training import compiled_once
from tests.zbcompile.api.test_refused_models import REFUSED
from zbcompile.schedules import build


class Masked(nn.Sequential):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x).square().mean() + mask.mean()  # type: ignore[no-any-return]


def masked(mask: Tensor, x: Tensor = ROWS, **options: Any) -> None:
    pipeline_of(Masked(), loss=None, **options).step(x, mask=mask)


class Named(MLP):
    def forward(self, x: Tensor) -> Any:
        return {"output": super().forward(x)}


class Weighted(nn.Linear):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.mse_loss(super().forward(output), target)


def with_a_loss() -> nn.Module:
    model = MLP(2)
    model.loss = F.mse_loss  # type: ignore[assignment]
    return model


def after_compiling(change: Any) -> None:
    pipe = pipeline_of(MLP(4)).compile(ROWS, target=ROWS)
    for layer in pipe.model.layers:  # in each process some of them
        change(layer)
    pipe.step(ROWS, target=ROWS)


def zeroed(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def hooked(layer: Any) -> None:
    layer.weight.register_post_accumulate_grad_hook(lambda _: None)


def step(*args: Any, model: Any = MLP, **kwargs: Any) -> None:
    pipeline_of(model(), loss=F.mse_loss if model is MLP else None).step(*args, **kwargs)


FAR, NORMED = ROWS.to("meta"), (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
OF_PIPELINE = {
    "of 6 samples .* 4 equal microbatches.*divisible by 4": lambda: train(x=ROWS[:6]),
    "no tensor with a batch dimension": lambda: step(3, model=Named, flag=True),
    r"\['mask'\] has shape \[8, 8\].*split=\{": lambda: masked(torch.ones(8, 8)),
    r"'msak', .* no.*are args\[0\], kwargs\['mask'\]": lambda: masked(FAR, split={"msak": True}),
    r"of 8 .*\['mask'\] has 6\)": lambda: masked(torch.ones(6), split={"mask": True}),
    r"\['mask'\] has 8 rows, the batch 2 \(args\[0\]\).*split={": lambda: masked(ROWS, ROWS[:2]),
    r"target has 7 rows, .* 8 \(args\[0\]\).*split={'target'": lambda: train(target=ROWS[:7]),
    r"the batch is empty: args\[0\], target": lambda: train(x=ROWS[:0]),
    r"args\[0\] requires a gradient.*detach": lambda: train(x=ROWS.clone().requires_grad_()),
    "target=, but the pipeline has no loss=": lambda: train(loss=None),
    "for 3 ranks .* there are 2": lambda: train(schedule=build("1f1b", 3, 4)),
    "microbatches=4, but .* 1f1b is for 8": lambda: train(schedule=build("1f1b", 2, 8)),
    "ranks=[03]": lambda: train(ranks=3 if dist.is_initialized() else 0),
    "nn.Module.*received list": lambda: train([nn.Linear(WIDTH, WIDTH)]),
    r"not compiled yet.*pipe\.compile": lambda: pipeline_of(MLP()).parameters(),
    r"layers\.\d\.weight was replaced by .*in place": lambda: after_compiling(zeroed),
}
OF_CAPTURE = {
    r"loss has shape \(2, 32\); expected one .*\.mean\(\)": lambda: train(loss=torch.sub),
    "returned float; expected a tensor": lambda: train(loss=lambda output, target: 1.0),
    "dtype torch.int64; expected a floating": lambda: train(loss=lambda x, y: (x > y).sum()),
    "Weighted has parameters.*MLP has": lambda: train(with_a_loss(), loss=Weighted(32, 32)),
    "returned dict without a loss.*pass loss=fn": lambda: step(ROWS, model=Named),
    r"accumulate_grad_hook on .* 'layers\.\d\.weight'": lambda: after_compiling(hooked),
    "The step got no target=, so loss=.* received None": lambda: step(ROWS),
    "takes 2 positional arguments .*is passed as target=": lambda: step(ROWS, ROWS),
    "unexpected keyword.* 'labels'.*is passed as target=": lambda: step(ROWS, labels=ROWS),
    r"args\[0\] is on meta and .* cpu: pass tensor.to": lambda: train(x=FAR, target=ROWS),
    "target is on meta and .* cpu: pass tensor.to": lambda: train(target=FAR),
    "is on meta and the model on cpu": lambda: train().eval(FAR),
}
OF_PARTITION = {
    "cut at 0 places; 4 stages need 3": lambda: train(nn.Linear(32, 32), schedule="zb-v"),
    "running_mean .* two copies": lambda: train(nn.Sequential(*NORMED), schedule="dualpipe"),
}
OF_SCHEDULE = {
    "'1f2b'; did you mean": lambda: train(schedule="1f2b"),
    "2 microbatches on 2 ranks; .*; use 4": lambda: train(schedule="dualpipe-v", microbatches=2),
}
BAD = refusals(OF_PIPELINE, OF_CAPTURE, OF_PARTITION, OF_SCHEDULE)


@pytest.mark.mostly_slow(every=4, suite=2)
@pytest.mark.parametrize("refused", BAD, ids=lambda refused: refused[1])
def test_in_one_process(refused: Refused) -> None:
    assert_refused(said(refused[2]), refused)


ALL = (*BAD, *REFUSED)


def all_said(part: int) -> list[tuple[str, str]]:
    return [said(call) for _, _, call in ALL[part::12]]


@pytest.mark.slow
@pytest.mark.mostly_slow(every=12)
@pytest.mark.parametrize("part", range(12))
def test_on_every_rank(part: int, pool: Pool) -> None:
    for results in pool.run(all_said, part):
        for result, refused in zip(results, ALL[part::12], strict=True):
            assert_refused(result, refused)


class Narrow(nn.Sequential):
    """A model whose hidden width shows in no input."""

    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH), nn.Tanh())


def other_on_rank_1(what: str) -> None:
    model, x, options = Narrow(64), ROWS, {}
    if dist.get_rank() == 1:
        model = Narrow(48) if what == "graphs" else model.double() if what == "args[0]" else model
        x = ROWS.double() if what == "args[0]" else ROWS
        options = {what: OTHER[what]} if what in OTHER else {}
        torch.__version__ = "2.12.1" if what == "torch" else torch.__version__  # type: ignore[assignment]
    environment = {what: "1"} if what.isupper() and dist.get_rank() == 1 else {}
    kind = f"Narrow {len(model[0].weight)} {x.dtype}"
    with patch.dict(os.environ, environment), compiled_once(kind, "exact" in options):
        train(model, x, **options)


OTHER = {"schedule": "gpipe", "exact": True, "timeout": 90.0}
DIFFERENCES = (*OTHER, "graphs", "args[0]", "torch", "ZBCOMPILE_ORDERED")


def hook_on_rank_1() -> None:
    model = MLP()
    if dist.get_rank() == 1:
        hooked(model.layers[2])
    train(model)


def refusal_of_other_batches(seeds: tuple[int, int], strays: int) -> tuple[int, str]:
    """The number of steps of four that ran, and what the next one raised; before step `strays` the
    last rank draws what the others do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4))
    pipe = pipeline_of(model, microbatches=2, ranks=None)
    torch.manual_seed(seeds[dist.get_rank()])
    for step in range(4):
        torch.rand(dist.get_rank() if step == strays else 0)
        x = torch.randint(1000, (4,))
        with compiled_once("embedding", exact=False):
            _, text = said(lambda x=x: pipe.step(x, target=torch.zeros(4, 4)))
        if text:
            return step, text
    return 4, ""


def disagreeing() -> Any:
    version, results = torch.__version__, [said(hook_on_rank_1)]
    for what in DIFFERENCES:
        results.append(said(lambda what=what: other_on_rank_1(what)))
        torch.__version__ = version
    batches = (((1, 1), 10), ((1, 2), 10), ((1, 1), 3))
    return results, [refusal_of_other_batches(*given) for given in batches]


@pytest.mark.slow
def test_failure_of_one_rank_reaches_all(pool: Pool) -> None:
    """Ranks that compile different programs say the same sentence, which names what differs; a
    loader without a seed would train on inputs and targets of different samples."""
    (first, loads), (second, also) = pool.run(disagreeing)
    assert (first[0][0], second[0][0]) == ("PipelineError", "CaptureError")
    says = "failed on rank 1: CaptureError: register_post_accumulate_grad_hook on the parameter"
    assert says in first[0][1]
    assert first[1:] == second[1:]
    for what, (error, text) in zip(DIFFERENCES, first[1:], strict=True):
        assert error == "PipelineError"
        assert ("different batches" if "arg" in what else "compiled different programs") in text
        assert what in text
    assert loads == also
    assert [step for step, _ in loads] == [4, 0, 3]
    between = "between rank 0 and rank 1 of the pipeline"
    assert loads[1][1].startswith(
        "the ranks of a pipeline got different batches: args[0] is 2 x int64"
    )
    assert loads[2][1].startswith(f"the integer inputs of this batch differ {between}: each")


def test_habits_of_modules() -> None:
    """Methods of modules work, or say in one line what to call."""
    pipe = pipeline_of(MLP(2))
    for call, message in ((pipe, "is not called: pipe.step"), (pipe.eval, r"use model\.eval\(\)")):
        with pytest.raises(zbcompile.PipelineError, match=message):
            call()
    for name in ("to", "half", "forward", "modules"):
        message = rf"no attribute {name}, as it is no nn\.Module: use model\.{name},"
        with pytest.raises(AttributeError, match=message):
            getattr(pipe, name)
    assert not hasattr(pipe, "nonsense")
    with pytest.raises(zbcompile.PipelineError, match="cannot be copied or pickled"):
        copy.deepcopy(pipe)
    assert pipe.train(False) is pipe
    assert not any(module.training for module in pipe.model.modules())
    pipe.step(ROWS, target=ROWS)
    pipe.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in pipe.parameters())  # type: ignore[union-attr]
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())
