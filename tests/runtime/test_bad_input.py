"""Bad input: one clear error on every rank, in one process and in two, and nothing hangs."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.oracle import MLP, WIDTH
from tests.runtime.pool import Pool
from zbcompile.schedules import build

ROWS = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)


def train(
    model: nn.Module, x: Tensor = ROWS, schedule: Any = "1f1b", microbatches: int | None = 4, **options: Any
) -> None:
    """Build a pipeline of two ranks and run a step."""
    options = {"loss": F.mse_loss, "ranks": 2} | options
    pipe = zbcompile.pipeline(model, schedule=schedule, microbatches=microbatches, **options)
    pipe.step(x, target=x)


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
    zbcompile.pipeline(Masked(), schedule="1f1b", microbatches=4, ranks=2, **options).step(ROWS, mask=torch.ones(8, 8))


def ambiguous_leaf() -> None:
    masked()


def split_of_unknown_input() -> None:
    masked(split={"msak": True})


def split_of_other_size() -> None:
    pipe = zbcompile.pipeline(Masked(), schedule="1f1b", microbatches=4, ranks=2, split={"mask": True})
    pipe.step(ROWS, mask=torch.ones(5))


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
    train(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)), schedule="dualpipe")


def schedule_of_wrong_type() -> None:
    train(MLP(), schedule=7)


def no_microbatches() -> None:
    train(MLP(), microbatches=0)


def unknown_reduction() -> None:
    train(MLP(), loss_reduction="max")


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


def loss_not_callable() -> None:
    train(MLP(), loss="mse")


def loss_with_parameters() -> None:
    class Weighted(nn.Linear):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
            return F.mse_loss(super().forward(output), target)

    train(MLP(), loss=Weighted(WIDTH, WIDTH))


def no_loss_anywhere() -> None:
    class Named(MLP):
        def forward(self, x: Tensor) -> Any:
            return {"output": super().forward(x)}

    zbcompile.pipeline(Named(), schedule="1f1b", microbatches=4, ranks=2).step(ROWS)


def output_is_no_loss() -> None:
    zbcompile.pipeline(MLP(), schedule="1f1b", microbatches=4, ranks=2).step(ROWS)


# The model


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 3


def custom_function() -> None:
    class Custom(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Doubled.apply(super().forward(x)))  # type: ignore[arg-type]

    train(Custom())


DOUBLED = Doubled.apply  # as many models keep it: bound before any capture


def custom_function_in_a_variable() -> None:
    class Custom(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(DOUBLED(super().forward(x)))  # type: ignore[arg-type]

    train(Custom())


def loss_that_trains() -> None:
    scale = nn.Parameter(torch.ones(WIDTH))
    train(MLP(), loss=lambda output, target: F.mse_loss(output * scale, target))


def data_dependent_control_flow() -> None:
    class Branching(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    train(Branching())


def compiled_model() -> None:
    train(torch.compile(MLP()))  # type: ignore[arg-type]


def compiled_in_place() -> None:
    model = MLP()
    model.compile()
    train(model)


def compiled_child() -> None:
    model = MLP()
    model.layers[3] = torch.compile(model.layers[3])  # type: ignore[assignment]
    train(model)


def sparse_embedding() -> None:
    model = nn.Sequential(nn.Embedding(4, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    zbcompile.pipeline(model, schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss).step(
        torch.zeros(8, dtype=torch.int64), target=ROWS
    )


def shared_memory() -> None:
    model = MLP()
    model.layers[1].weight = nn.Parameter(model.layers[0].weight.detach())  # type: ignore[union-attr]
    train(model)


def all_frozen() -> None:
    train(MLP().requires_grad_(False))


def hook_for_all_modules() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        train(MLP())
    finally:
        handle.remove()


def not_a_module() -> None:
    train([nn.Linear(WIDTH, WIDTH)])  # type: ignore[arg-type]


def function_without_module() -> None:
    zbcompile.pipeline(lambda: WIDTH, schedule="1f1b", microbatches=4, ranks=2)()


# The order of calls


def uncompiled(use: str) -> Any:
    return getattr(zbcompile.pipeline(MLP(), schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss), use)


def parameters_before_compiling() -> None:
    uncompiled("parameters")()


def named_parameters_before_compiling() -> None:
    uncompiled("named_parameters")()


def state_dict_before_compiling() -> None:
    uncompiled("state_dict")()


def load_state_dict_before_compiling() -> None:
    uncompiled("load_state_dict")({})


def program_before_compiling() -> None:
    uncompiled("program")


def eval_before_compiling() -> None:
    uncompiled("eval")(ROWS)


def hook_after_compiling() -> None:
    model = MLP()
    pipe = zbcompile.pipeline(model, schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss)
    pipe.compile(ROWS, target=ROWS)
    model.layers[3].register_forward_hook(lambda *_: None)
    pipe.step(ROWS, target=ROWS)


def replaced_parameter() -> None:
    model = MLP()
    pipe = zbcompile.pipeline(model, schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss)
    pipe.compile(ROWS, target=ROWS)
    for layer in model.layers:
        layer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))  # type: ignore[assignment]
    pipe.step(ROWS, target=ROWS)


PIPELINE, CAPTURE, PARTITION, SCHEDULE = "PipelineError", "CaptureError", "PartitionError", "ScheduleError"
BAD: list[tuple[Callable[[], None], str, str]] = [
    (indivisible_batch, PIPELINE, r"batch of 6 samples .* 4 equal microbatches.*divisible by 4"),
    (batch_without_tensors, PIPELINE, r"no tensor with a batch dimension"),
    (ambiguous_leaf, PIPELINE, r"kwargs\['mask'\] has shape \[8, 8\].*split=\{"),
    (split_of_unknown_input, PIPELINE, r"'msak', which no input has; the inputs are args\[0\], kwargs\['mask'\]"),
    (split_of_other_size, PIPELINE, r"kwargs\['mask'\] of shape \[5\], but the batch size is 8"),
    (input_that_requires_a_gradient, PIPELINE, r"args\[0\] requires a gradient.*detach"),
    (target_without_loss, PIPELINE, r"target=, but the pipeline has no loss="),
    (too_many_stages, PARTITION, r"at most 2 stages; the schedule needs 4"),
    (schedule_for_other_ranks, PIPELINE, r"for 3 ranks .* there are 2"),
    (schedule_for_other_microbatches, PIPELINE, r"microbatches=4, but the schedule 1f1b is for 8"),
    (unknown_schedule, SCHEDULE, r"'1f2b'; did you mean"),
    (inadmissible_microbatches, SCHEDULE, r"dualpipe-v: 2 microbatches on 2 ranks; .* nearest that work: 4"),
    (buffers_in_two_model_copies, "CompileError", r"buffer 1.running_mean is changed .* two copies .* dualpipe-v"),
    (schedule_of_wrong_type, PIPELINE, r"schedule= is a int; expected a name"),
    (no_microbatches, PIPELINE, r"microbatches=0; expected a positive number"),
    (unknown_reduction, PIPELINE, r"loss_reduction='max'; expected"),
    (ranks_that_are_not_there, PIPELINE, r"ranks=[03]"),
    (loss_not_scalar, CAPTURE, r"loss has shape \(2, 32\); expected a scalar.*\.mean\(\)"),
    (loss_not_a_tensor, CAPTURE, r"loss is a float; expected a scalar tensor"),
    (loss_of_integers, CAPTURE, r"dtype torch.int64; expected a floating-point scalar"),
    (loss_not_callable, PIPELINE, r"loss= is a str; expected a function"),
    (loss_with_parameters, CAPTURE, r"Weighted has parameters of its own"),
    (no_loss_anywhere, CAPTURE, r"returned dict without a loss.*pass loss=fn"),
    (output_is_no_loss, CAPTURE, r"loss has shape \(2, 32\).*pass loss=fn"),
    (custom_function, CAPTURE, r"custom autograd.Function .*Doubled.*custom_op"),
    (custom_function_in_a_variable, CAPTURE, r"custom autograd.Function .*Doubled.*custom_op"),
    (loss_that_trains, CAPTURE, r"reads scale, which requires a gradient"),
    (data_dependent_control_flow, CAPTURE, r"torch.export cannot capture Branching.*control flow"),
    (compiled_model, CAPTURE, r"already wrapped by torch.compile"),
    (compiled_in_place, CAPTURE, r"already wrapped by torch.compile"),
    (compiled_child, CAPTURE, r"layers\.3 .*already wrapped by torch.compile"),
    (sparse_embedding, CAPTURE, r"module 0 \(Embedding\) has sparse=True"),
    (shared_memory, CAPTURE, r"layers\.0\.weight and layers\.1\.weight .* same memory"),
    (all_frozen, CAPTURE, r"no parameter of MLP requires a gradient"),
    (hook_for_all_modules, CAPTURE, r"forward_hooks for all modules.*lost in silence"),
    (not_a_module, PIPELINE, r"nn.Module.*received list"),
    (function_without_module, PIPELINE, r"expected an nn.Module to pipeline, received int"),
    (parameters_before_compiling, PIPELINE, r"not compiled yet.*pipe\.compile"),
    (named_parameters_before_compiling, PIPELINE, r"not compiled yet"),
    (state_dict_before_compiling, PIPELINE, r"not compiled yet"),
    (load_state_dict_before_compiling, PIPELINE, r"not compiled yet"),
    (program_before_compiling, PIPELINE, r"not compiled yet"),
    (eval_before_compiling, PIPELINE, r"not compiled yet"),
    (hook_after_compiling, CAPTURE, r"layers\.3 .*forward_hooks.*Remove"),
    (replaced_parameter, PIPELINE, r"layers\.\d\.weight was replaced by another tensor.*in place"),
]
IDS = [function.__name__ for function, _, _ in BAD]


@pytest.mark.parametrize(("function", "error", "message"), BAD, ids=IDS)
def test_in_one_process(function: Callable[[], None], error: str, message: str) -> None:
    with pytest.raises(Exception, match=_anywhere(message)) as caught:
        function()
    assert type(caught.value).__name__ == error


@pytest.mark.parametrize(("function", "error", "message"), BAD, ids=IDS)
def test_on_every_rank(function: Callable[[], None], error: str, message: str, pool: Pool) -> None:
    for outcome in pool.outcomes(function):
        assert outcome.error == error, outcome.trace
        assert re.search(_anywhere(message), outcome.text), outcome.text


def _anywhere(message: str) -> str:
    return f"(?s){message}"


# Hooks: a compiled stage would lose every one of them in silence


HOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "register_forward_pre_hook": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "register_forward_hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "register_full_backward_pre_hook": lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
    "register_full_backward_hook": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "register_hook": lambda layer: layer.weight.register_hook(lambda _: None),
    "register_post_accumulate_grad_hook": lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda _: None),
}


def hooked(kind: str) -> None:
    model = MLP()
    HOOKS[kind](model.layers[2])  # type: ignore[arg-type]
    train(model)


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks(kind: str, pool: Pool) -> None:
    with pytest.raises(zbcompile.CaptureError, match=r"layers\.2.*hook.*[Rr]emove") as caught:
        hooked(kind)
    assert [(o.error, o.text) for o in pool.outcomes(hooked, kind)] == [("CaptureError", str(caught.value))] * 2


# Ranks that disagree


def hook_on_rank_1() -> None:
    model = MLP()
    if dist.get_rank() == 1:
        model.layers[2].register_forward_hook(lambda *_: None)
    train(model)


def test_failure_of_one_rank_reaches_all(pool: Pool) -> None:
    first, second = pool.outcomes(hook_on_rank_1)
    assert second.error == "CaptureError"
    assert first.error == "PipelineError"
    assert "failed on rank 1: CaptureError: module layers.2" in first.text


class Narrow(nn.Module):
    """An MLP whose hidden width shows in no input."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def other_on_rank_1(what: str) -> None:
    other = dist.get_rank() == 1
    hidden = 48 if what == "width" and other else 64
    depth = 5 if what == "depth" and other else 6
    model = MLP(depth) if what == "depth" else Narrow(hidden)
    if what == "dtype" and other:
        model = model.double()
    x = ROWS.double() if what == "dtype" and other else ROWS
    options: dict[str, Any] = {
        "schedule": "gpipe" if what == "schedule" and other else "1f1b",
        "microbatches": 2 if what == "microbatches" and other else 4,
        "exact": what == "exact" and other,
        "loss_reduction": "sum" if what == "loss_reduction" and other else "mean",
        "seed": 5 if what == "seed" and other else 0,
    }
    train(model, x[:4] if what == "batch" and other else x, **options)


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


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_compile_different_programs(what: str, pool: Pool) -> None:
    """Everywhere the same sentence, which names what differs."""
    first, second = pool.outcomes(other_on_rank_1, what)
    assert first.error == second.error == "PipelineError", first.trace + second.trace
    assert first.text == second.text
    assert "the ranks compiled different programs" in first.text
