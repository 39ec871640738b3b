"""Bad input: one clear error on every rank, in one process and in two, and nothing hangs."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, WIDTH
from tests.support.pool import Pool
from tests.support.refused import CAPTURE, PARTITION, PIPELINE, ROWS, SCHEDULE, Refused, train
from zbcompile.schedules import build

# The batch


def indivisible_batch() -> None:
    train(MLP(), ROWS[:6])


def batch_without_tensors() -> None:
    zbcompile.pipeline(MLP(), schedule="1f1b", microbatches=2, ranks=2).step(3, flag=True)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layers(x).square().mean() + mask.mean()


def masked(**options: Any) -> None:
    zbcompile.pipeline(Masked(), schedule="1f1b", microbatches=4, ranks=2, **options).step(
        ROWS, mask=torch.ones(8, 8)
    )


def ambiguous_leaf() -> None:
    masked()


def split_of_unknown_input() -> None:
    masked(split={"msak": True})


def split_that_does_not_divide() -> None:
    pipe = zbcompile.pipeline(
        Masked(), schedule="1f1b", microbatches=4, ranks=2, split={"mask": True}
    )
    pipe.step(ROWS, mask=torch.ones(6))


class Scaled(MLP):
    def forward(self, scale: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale.sum()


def first_tensor_is_no_batch() -> None:
    pipe = zbcompile.pipeline(Scaled(), schedule="1f1b", microbatches=2, ranks=2, loss=F.mse_loss)
    pipe.step(torch.ones(2), ROWS, target=ROWS)


def target_of_other_length() -> None:
    pipe = zbcompile.pipeline(MLP(), schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss)
    pipe.step(ROWS, target=ROWS[:7])


def empty_batch() -> None:
    train(MLP(), ROWS[:0])


def input_that_requires_a_gradient() -> None:
    train(MLP(), ROWS.clone().requires_grad_())


def target_without_loss() -> None:
    train(MLP(), loss=None)


# The schedule


def too_many_stages() -> None:
    train(nn.Linear(WIDTH, WIDTH), schedule="zb-v")


def schedule_for_other_ranks() -> None:
    train(MLP(), schedule=build("1f1b", ranks=3, microbatches=4))


def schedule_for_other_microbatches() -> None:
    train(MLP(), schedule=build("1f1b", ranks=2, microbatches=8), microbatches=4)


def unknown_schedule() -> None:
    train(MLP(), schedule="1f2b")


def inadmissible_microbatches() -> None:
    train(MLP(), schedule="dualpipe-v", microbatches=2)


def buffers_in_two_model_copies() -> None:
    train(
        nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)), schedule="dualpipe"
    )


def ranks_that_are_not_there() -> None:
    if dist.is_initialized():
        train(MLP(), ranks=3)
    else:
        train(MLP(), ranks=0)


# The loss


def loss_not_scalar() -> None:
    train(MLP(), loss=lambda output, target: (output - target).square())


def loss_not_a_tensor() -> None:
    train(MLP(), loss=lambda output, target: 1.0)


def loss_of_integers() -> None:
    train(MLP(), loss=lambda output, target: (output > target).sum())


def loss_with_parameters_of_a_model_with_a_loss() -> None:
    class Weighted(nn.Linear):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
            return F.mse_loss(super().forward(output), target)

    model = MLP()
    model.loss = F.mse_loss  # type: ignore[assignment]
    train(model, loss=Weighted(WIDTH, WIDTH))


def no_loss_anywhere() -> None:
    class Named(MLP):
        def forward(self, x: Tensor) -> Any:
            return {"output": super().forward(x)}

    zbcompile.pipeline(Named(), schedule="1f1b", microbatches=4, ranks=2).step(ROWS)


# What is not a model


def not_a_module() -> None:
    train([nn.Linear(WIDTH, WIDTH)])  # type: ignore[arg-type]


# The order of calls


def uncompiled(use: str) -> Any:
    return getattr(
        zbcompile.pipeline(MLP(), schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss), use
    )


def parameters_before_compiling() -> None:
    uncompiled("parameters")()


def hook_after_compiling() -> None:
    model = MLP()
    pipe = zbcompile.pipeline(model, schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss)
    pipe.compile(ROWS, target=ROWS)
    for layer in model.layers:  # in each process some of them
        layer.weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[union-attr, operator]
    pipe.step(ROWS, target=ROWS)


def replaced_parameter() -> None:
    model = MLP()
    pipe = zbcompile.pipeline(model, schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss)
    pipe.compile(ROWS, target=ROWS)
    for layer in model.layers:
        layer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))  # type: ignore[assignment]
    pipe.step(ROWS, target=ROWS)


BAD = (
    Refused(
        indivisible_batch, PIPELINE, r"batch of 6 samples .* 4 equal microbatches.*divisible by 4"
    ),
    Refused(batch_without_tensors, PIPELINE, r"no tensor with a batch dimension"),
    Refused(ambiguous_leaf, PIPELINE, r"kwargs\['mask'\] has shape \[8, 8\].*split=\{"),
    Refused(
        split_of_unknown_input,
        PIPELINE,
        r"'msak', which is not an input; the inputs are args\[0\], kwargs\['mask'\]",
    ),
    Refused(
        split_that_does_not_divide,
        PIPELINE,
        r"batch of 8 samples \(kwargs\['mask'\] has 6\).*among \[1, 2\]",
    ),
    Refused(
        first_tensor_is_no_batch,
        PIPELINE,
        r"args\[0\] has 2 rows, the batch 8 \(args\[1\], target\).*split={",
    ),
    Refused(
        target_of_other_length,
        PIPELINE,
        r"target has 7 rows, the batch 8 \(args\[0\]\).*split={'target': False}",
    ),
    Refused(empty_batch, PIPELINE, r"the batch is empty: args\[0\], target"),
    Refused(input_that_requires_a_gradient, PIPELINE, r"args\[0\] requires a gradient.*detach"),
    Refused(target_without_loss, PIPELINE, r"target=, but the pipeline has no loss="),
    Refused(too_many_stages, PARTITION, r"can be cut at 0 places; 4 stages need 3"),
    Refused(schedule_for_other_ranks, PIPELINE, r"for 3 ranks .* there are 2"),
    Refused(
        schedule_for_other_microbatches, PIPELINE, r"microbatches=4, but the schedule 1f1b is for 8"
    ),
    Refused(unknown_schedule, SCHEDULE, r"'1f2b'; did you mean"),
    Refused(
        inadmissible_microbatches, SCHEDULE, r"dualpipe-v: 2 microbatches on 2 ranks; .*; use 4"
    ),
    Refused(
        buffers_in_two_model_copies,
        PARTITION,
        r"buffer 1.running_mean is changed .* two copies .* dualpipe-v",
    ),
    Refused(ranks_that_are_not_there, PIPELINE, r"ranks=[03]"),
    Refused(
        loss_not_scalar, CAPTURE, r"loss has shape \(2, 32\); expected one element.*\.mean\(\)"
    ),
    Refused(
        loss_not_a_tensor,
        CAPTURE,
        r"loss function returned float; expected a tensor with one element",
    ),
    Refused(loss_of_integers, CAPTURE, r"dtype torch.int64; expected a floating-point number"),
    Refused(
        loss_with_parameters_of_a_model_with_a_loss,
        CAPTURE,
        r"Weighted has parameters.*MLP has another attribute",
    ),
    Refused(no_loss_anywhere, CAPTURE, r"returned dict without a loss.*pass loss=fn"),
    Refused(not_a_module, PIPELINE, r"nn.Module.*received list"),
    Refused(parameters_before_compiling, PIPELINE, r"not compiled yet.*pipe\.compile"),
    Refused(
        hook_after_compiling,
        CAPTURE,
        r"register_post_accumulate_grad_hook on the parameter 'layers\.\d\.weight'",
    ),
    Refused(
        replaced_parameter, PIPELINE, r"layers\.\d\.weight was replaced by another tensor.*in place"
    ),
)


@pytest.mark.parametrize("refused", BAD, ids=str)
def test_in_one_process(refused: Refused) -> None:
    refused.here()


@pytest.mark.mostly_slow(every=40)
@pytest.mark.parametrize("refused", BAD, ids=str)
def test_on_every_rank(refused: Refused, pool: Pool) -> None:
    refused.everywhere(pool)


# Ranks that disagree


def hook_on_rank_1() -> None:
    model = MLP()
    if dist.get_rank() == 1:
        model.layers[2].weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[union-attr, operator]
    train(model)


def test_failure_of_one_rank_reaches_all(pool: Pool) -> None:
    first, second = pool.outcomes(hook_on_rank_1)
    assert second.error == "CaptureError"
    assert first.error == "PipelineError"
    assert (
        "failed on rank 1: CaptureError: register_post_accumulate_grad_hook on the parameter"
        in first.text
    )


class Narrow(nn.Module):
    """An MLP whose hidden width shows in no input."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def other_on_rank_1(what: str) -> None:
    second = dist.get_rank() == 1
    hidden = 48 if what == "width" and second else 64
    depth = 5 if what == "depth" and second else 6
    model = MLP(depth) if what == "depth" else Narrow(hidden)
    if what == "dtype" and second:
        model = model.double()
    x = ROWS.double() if what == "dtype" and second else ROWS
    options: dict[str, Any] = {
        "schedule": "gpipe" if what == "schedule" and second else "1f1b",
        "microbatches": 2 if what == "microbatches" and second else 4,
        "exact": what == "exact" and second,
        "loss_reduction": "sum" if what == "loss_reduction" and second else "mean",
        "seed": 5 if what == "seed" and second else 0,
    }
    train(model, x[:4] if what == "batch" and second else x, **options)


DIFFERENCES = (
    "width",
    "depth",
    "dtype",
    "batch",
    "schedule",
    "microbatches",
    "exact",
    "loss_reduction",
    "seed",
)


@pytest.mark.mostly_slow(every=9, suite=3)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_compile_different_programs(what: str, pool: Pool) -> None:
    """Everywhere the same sentence, which names what differs."""
    first, second = pool.outcomes(other_on_rank_1, what)
    assert first.error == second.error == "PipelineError", first.trace + second.trace
    assert first.text == second.text
    batch = what in ("batch", "dtype", "microbatches")
    assert (
        "args[0] of this batch differs" if batch else "the ranks compiled different programs"
    ) in first.text


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (1, {}, "The step got no target=, so loss=.* received None"),
        (2, {}, "takes 2 positional arguments .*is passed as target=: pipe.step"),
        (
            1,
            {"labels": torch.ones(4, 2)},
            "unexpected keyword argument 'labels'.*is passed as target=",
        ),
    ],
)
def test_a_target_in_another_place(args: int, kwargs: dict[str, torch.Tensor], says: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", ranks=2, microbatches=2, loss=nn.functional.mse_loss
    )
    with pytest.raises(zbcompile.CaptureError, match=says):
        pipe.step(*[torch.ones(4, 2)] * args, **kwargs)


def test_a_batch_on_another_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", ranks=2, microbatches=2, loss=nn.functional.mse_loss
    )
    here, far = torch.ones(4, 2), torch.ones(4, 2, device="meta")
    message = "is on meta and the model on cpu: pass tensor.to"
    for x, target, which in ((far, here, r"args\[0\]"), (here, far, "target")):
        with pytest.raises(zbcompile.CaptureError, match=f"{which} {message}"):
            pipe.step(x, target=target)
    pipe.compile(here, target=here)
    with pytest.raises(zbcompile.CaptureError, match=message):
        pipe.eval(far)


def test_habits_of_modules() -> None:
    """Methods of modules work, or say in one line what to call."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", ranks=2, microbatches=2, loss=nn.functional.mse_loss
    )
    for call, message in ((pipe, "is not called: pipe.step"), (pipe.eval, r"use model\.eval\(\)")):
        with pytest.raises(zbcompile.PipelineError, match=message):
            call()
    for name in ("to", "cuda", "half", "forward", "modules"):
        with pytest.raises(
            AttributeError,
            match=rf"no attribute {name}, as it is no nn\.Module: use model\.{name},",
        ):
            getattr(pipe, name)
    assert not hasattr(pipe, "nonsense")
    with pytest.raises(zbcompile.PipelineError, match="cannot be copied or pickled"):
        copy.deepcopy(pipe)
    assert pipe.train(False) is pipe
    assert not any(module.training for module in model.modules())
    x = torch.ones(2, 2)
    pipe.step(x, target=x)
    pipe.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in pipe.parameters())  # type: ignore[union-attr]
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())


def refusal_of_other_batches(seeds: tuple[int, int], strays: int) -> tuple[int, str]:
    """The number of steps of five that ran, and what the next one raised; before step `strays` the
    last rank draws what the others do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4))
    pipe = zbcompile.pipeline(model, schedule="1f1b", microbatches=2, loss=nn.functional.mse_loss)
    torch.manual_seed(seeds[dist.get_rank()])
    for step in range(5):
        torch.rand(dist.get_rank() if step == strays else 0)
        try:
            pipe.step(torch.randint(1000, (4,)), target=torch.zeros(4, 4))
        except zbcompile.PipelineError as error:
            return step, str(error)
    return 5, ""


@pytest.mark.slow
def test_other_batches_on_other_ranks_are_refused(pool: Pool) -> None:
    """In the first step and in later ones: a loader without a seed would train on inputs and
    targets of different samples."""
    assert pool.run(refusal_of_other_batches, (1, 1), 10) == [(5, "")] * 2
    first, second = pool.run(refusal_of_other_batches, (1, 2), 10)
    assert first == second
    assert first[0] == 0
    assert first[1].startswith(
        "args[0] of this batch differs between rank 0 and rank 1 of the pipeline, and every rank"
    )
    first, second = pool.run(refusal_of_other_batches, (1, 1), 3)
    assert first == second
    assert first[0] == 3
    assert first[1].startswith(
        "the integer inputs of this batch differ between rank 0 and rank 1 of the pipeline: each"
    )
