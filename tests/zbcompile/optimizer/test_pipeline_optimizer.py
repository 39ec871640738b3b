"""The optimizer of `pipe.optimizer` updates as the same torch optimizer does in eager mode, in every
bit."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

import zbcompile
from tests.support.optimizers import Plain
from tests.support.oracle import PROBLEMS, eager_step
from tests.support.training import ROWS, Case, assert_same_tensors, pipeline_of

MICROBATCHES, STEPS, DIM = 4, 3, 8
CLIP = 0.05  # below the norm of every step
DECAYED: list[dict[str, Any]] = [
    {"params": lambda name, p: p.ndim < 2, "weight_decay": 0.0, "lr": 3e-3}
]


def eager_optimizer(
    model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    flat = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return kind(
        [{"params": flat, "weight_decay": 0.0, "lr": 3e-3}, {"params": matrices}], **options
    )


def clip(model: nn.Module) -> Tensor:
    """Clips as torch does, by the norm in double precision."""
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    norm = torch.cat(gradients).norm().float()
    nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
    return norm


@pytest.mark.mostly_slow(every=5, suite=1)
@pytest.mark.parametrize(
    ("kind", "options", "compiled"),
    [
        (AdamW, {"lr": 1e-2, "weight_decay": 0.1}, False),
        (SGD, {"lr": 0.1, "momentum": 0.9}, True),
        (RMSprop, {"lr": 1e-2}, False),
        (Adagrad, {"lr": 1e-2}, False),
        (Adam, {"lr": 1e-2, "amsgrad": True}, True),
    ],
)
def test_groups_schedulers_and_clipping_are_those_of_eager(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], compiled: bool
) -> None:
    problem = PROBLEMS["small-tied"]
    batches = problem.batches(STEPS, MICROBATCHES * ROWS)
    model, pipe = problem.model(), pipeline_of(Case("small-tied", "zb-v", 2, MICROBATCHES))
    if compiled:
        pipe.compile(*batches[0].args, target=batches[0].target)
    theirs, ours = (
        eager_optimizer(model, kind, **options),
        pipe.optimizer(kind, groups=DECAYED, clip=CLIP, **options),
    )
    rates = CosineAnnealingLR(theirs, STEPS), CosineAnnealingLR(ours, STEPS)
    for step, batch in enumerate(batches):
        expected = eager_step(model, problem.loss, batch, MICROBATCHES, step)
        assert torch.equal(pipe.step(*batch.args, target=batch.target), expected)
        norm = clip(model)
        for item in (theirs, ours, *rates):
            item.step()
        assert ours.norm is not None
        assert torch.equal(ours.norm, norm)
        assert all(p.grad is not None for p in pipe.parameters())
        theirs.zero_grad()
        ours.zero_grad()
        assert all(p.grad is None for p in pipe.parameters())
    assert_same_tensors(pipe.state_dict(full=True), model.state_dict(), "state dict:")
    assert [group["lr"] for group in ours.param_groups] == [
        group["lr"] for group in theirs.param_groups
    ]
    assert len(ours.state) == len(theirs.state)


def in_half_precision(dtype: torch.dtype) -> nn.Module:
    return PROBLEMS["mlp"].model().to(dtype)


@dataclass
class Masters:
    """The reference for parameters in half precision: float32 masters, updated from float32 sums,
    rounded once."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: nn.Module) -> "Masters":
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        return cls(
            model, AdamW([nn.Parameter(p.detach().float()) for p in model.parameters()], lr=1e-2)
        )

    def step(self) -> None:
        masters = self.optimizer.param_groups[0]["params"]
        for master, parameter in zip(masters, self.model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, self.model.parameters(), strict=True):
                parameter.copy_(master)


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_masters_in_single_precision(dtype: torch.dtype) -> None:
    """Also after the parameters were written from outside, and after the state went through a state
    dict. What is frozen has none until it trains."""
    problem, model = PROBLEMS["mlp"], in_half_precision(dtype)
    frozen = next(name for name, _ in model.named_parameters())
    theirs = Masters.of(model)
    pipe = zbcompile.pipeline(
        in_half_precision(dtype),
        schedule="zb-h1",
        ranks=2,
        microbatches=MICROBATCHES,
        loss=problem.loss,
        exact=True,
    )
    ours = pipe.optimizer(AdamW, lr=1e-2)
    for step, batch in enumerate(problem.batches(4, MICROBATCHES * ROWS)):
        half = type(batch)(tuple(x.to(dtype) for x in batch.args), {}, batch.target.to(dtype))
        for item in (model, pipe.model):
            item.get_parameter(frozen).requires_grad_(step > 0)
        eager_step(model, problem.loss, half, MICROBATCHES, step)
        pipe.step(*half.args, target=half.target)
        assert {p.grad.dtype for p in pipe.parameters() if p.requires_grad} == {torch.float32}  # type: ignore[union-attr]
        theirs.step()
        ours.step()
        ours.zero_grad()
        assert_same_tensors(
            pipe.state_dict(full=True), model.state_dict(), f"state dict after step {step}:"
        )
        if step == 1:
            saved = copy.deepcopy(ours.state_dict())
            assert {item.dtype for key, item in saved.items() if key.endswith(".master")} == {
                torch.float32
            }
            for master in ours.param_groups[0]["params"]:
                master.detach().zero_()
            ours.load_state_dict(saved)
        if step == 2:
            changed = {name: value + 1 for name, value in model.state_dict().items()}
            model.load_state_dict(changed)
            pipe.load_state_dict(changed)
            for master, parameter in zip(
                theirs.optimizer.param_groups[0]["params"], model.parameters(), strict=True
            ):
                master.detach().copy_(parameter)


class Normalised(nn.Module):
    """Blocks of nn.RMSNorm, which multiplies a weight in half precision by float32, and a linear
    layer; `tie` ties these to their neighbour's, to a distant block's ("far": on another stage), or
    not at all ("").
    """

    def __init__(self, tie: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        if tie:
            second = 1 if tie == "near" else 3
            self.norms[second].weight, self.linears[second].weight = (
                self.norms[0].weight,
                self.linears[0].weight,
            )

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return x


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("tie", ["", "near", "far"])
def test_gradients_of_half_precision_are_rounded_where_eager_rounds_them(
    tie: str, masters: bool
) -> None:
    """With masters not at all; without them each use of a parameter before the uses are added."""
    model, ours = (Normalised(tie).bfloat16() for _ in range(2))
    inputs, targets = torch.randn(2, MICROBATCHES * ROWS, DIM).bfloat16()
    pipe = zbcompile.pipeline(
        ours,
        schedule="1f1b",
        ranks=2,
        microbatches=MICROBATCHES,
        loss=nn.functional.mse_loss,
        exact=True,
    )
    if masters:
        Masters.of(model)
        pipe.optimizer(AdamW)
    pipe.step(inputs, target=targets)
    for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        (nn.functional.mse_loss(model(x), y) / MICROBATCHES).backward()
    results, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (pipe, model))
    assert_same_tensors(results, expected, "gradients:")  # type: ignore[arg-type]


def test_matrices_and_the_rest_have_an_optimizer_each() -> None:
    """And two optimizers at the same time leave each other's gradients alone."""
    problem = PROBLEMS["mlp"]
    model, pipe = problem.model(), pipeline_of(Case("mlp", "zb-h1", 2, MICROBATCHES))
    theirs = [
        Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2),
        SGD([p for p in model.parameters() if p.ndim != 2], lr=1e-2),
    ]
    ours = [
        pipe.optimizer(Muon, params=lambda _, p: p.ndim == 2, lr=1e-2),
        pipe.optimizer(SGD, params=lambda _, p: p.ndim != 2, lr=1e-2),
    ]
    for step, batch in enumerate(problem.batches(STEPS, MICROBATCHES * ROWS)):
        eager_step(model, problem.loss, batch, MICROBATCHES, step)
        pipe.step(*batch.args, target=batch.target)
        for item in (*theirs, *ours):
            item.step()
            item.zero_grad()
    assert_same_tensors(pipe.state_dict(full=True), model.state_dict(), "state dict:")


def closed(optimizer: Any) -> Any:
    optimizer.close()
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda pipe: pipe.optimizer(AdamW, overlap=True, clip=1.0),
            "before the norm of all gradients is known, by wh",
        ),
        (lambda pipe: pipe.optimizer(torch.optim.LBFGS), r"LBFGS.step\(\) needs a closure"),
        (
            lambda pipe: pipe.optimizer(AdamW, validate="never"),
            'validate=\'never\'; expected "before" or "after"',
        ),
        (lambda pipe: pipe.optimizer(AdamW, zero=2), "zero=2; expected 0 or 1"),
        (lambda pipe: pipe.optimizer(AdamW, zero=1), 'the mesh has no dimension "dp"'),
        (lambda pipe: pipe.optimizer(AdamW, clip=0.0), "clip=0.0; expected a norm above 0"),
        (lambda pipe: pipe.optimizer(AdamW, clip="1"), "clip='1'; expected a norm above 0"),
        (lambda pipe: pipe.optimizer(AdamW, groups=3), "groups=3; expected a list of groups"),
        (
            lambda pipe: pipe.optimizer(AdamW, groups={"params": callable}),
            "expected a list of groups",
        ),
        (
            lambda pipe: pipe.optimizer(AdamW, params=[nn.Parameter(torch.ones(1))]),
            r"params=\[Parameter.*\]; expected a function of a parameter's name",
        ),
        (lambda pipe: pipe.optimizer(AdamW, overlap="yes"), "overlap='yes'; expected True or"),
        (lambda pipe: pipe.optimizer(AdamW, zero=True), "zero=True; expected 0 or 1"),
        (
            lambda pipe: pipe.optimizer(AdamW, learning_rate=1),
            "AdamW cannot be made: .*learning_rate",
        ),
        (
            lambda pipe: pipe.optimizer(AdamW(pipe.options.loss and [torch.ones(1)])),
            "expected a class of torch",
        ),
        (
            lambda pipe: pipe.optimizer(AdamW, groups=[{"params": []}]),
            'has a group whose "params" is \\[\\]',
        ),
        (
            lambda pipe: pipe.optimizer(AdamW).step(),
            "is not compiled yet, so its optimizer is empty",
        ),
        (
            lambda pipe: pipe.optimizer(AdamW).load_state_dict({}),
            "optimizer is empty. Call pipe.compile with a batch",
        ),
        (
            lambda pipe: closed(pipe.optimizer(AdamW)).step(),
            "this optimizer is closed, or could not be made",
        ),
        (lambda pipe: pipe.optimizer(AdamW).add_param_group({"params": []}), "fixed. Pass them as"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make: Callable[[Any], Any], message: str) -> None:
    pipe = pipeline_of(Case("mlp", "zb-h1", 2, MICROBATCHES))
    with pytest.raises(zbcompile.PipelineError, match=message) as raised:
        make(pipe)
    assert "\n" not in str(raised.value)


def test_an_optimizer_that_cannot_take_a_parameter_says_so_once_it_is_known() -> None:
    pipe = pipeline_of(Case("mlp", "zb-h1", 2, MICROBATCHES))
    pipe.optimizer(Muon)
    batch = PROBLEMS["mlp"].batches(1, MICROBATCHES * ROWS)[0]
    with pytest.raises(zbcompile.PipelineError, match=r"Muon cannot be made: .*2D"):
        pipe.step(*batch.args, target=batch.target)
    pipe.step(*batch.args, target=batch.target)  # without it
    nothing: Any = {"params": lambda name, _: name == "nothing"}
    with pytest.raises(
        zbcompile.PipelineError,
        match=r"params= takes none of the model's \d+ parameters, the first of",
    ):
        pipe.optimizer(AdamW, **nothing)
    with pytest.raises(zbcompile.PipelineError, match=r"groups\[1\] takes none of the model's"):
        pipe.optimizer(AdamW, groups=[*DECAYED, nothing])
    pipe.step(*batch.args, target=batch.target)


def test_a_removed_option_says_what_to_do() -> None:
    pipe = zbcompile.pipeline(nn.Linear(2, 2), ranks=1, loss=nn.functional.mse_loss)
    with pytest.raises(TypeError, match="reshard_after_forward= any more: zero takes 0 or 1"):
        pipe.optimizer(AdamW, reshard_after_forward=True)
    with pytest.raises(TypeError, match=r"early= any more: overlap=True lets pipe\.step"):
        pipe.optimizer(AdamW, early=True)


def test_masters_of_an_optimizer_without_state_are_saved(tmp_path: Path) -> None:
    """After gradients were replaced; in state dicts and in checkpoints."""
    problem, model = PROBLEMS["mlp"], in_half_precision(torch.bfloat16)
    options: dict[str, Any] = {"schedule": "zb-h1", "ranks": 2, "microbatches": MICROBATCHES}
    pipe = zbcompile.pipeline(model, loss=problem.loss, **options)
    optimizer = pipe.optimizer(SGD, lr=1e-3)
    (batch,) = problem.batches(1, MICROBATCHES * ROWS)
    pipe.step(batch.args[0].bfloat16(), target=batch.target.bfloat16())
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter.grad)  # type: ignore[arg-type]
    masters = optimizer.param_groups[0]["params"]
    expected = [master.detach() - 1e-3 for master in masters]
    optimizer.step()
    assert_same_tensors(masters, expected, "master")
    saved = copy.deepcopy(optimizer.state_dict())
    zbcompile.save_checkpoint(tmp_path, pipe, optimizer)
    for load in (
        lambda: optimizer.load_state_dict(saved),
        lambda: zbcompile.load_checkpoint(tmp_path, pipe, optimizer),
    ):
        for master in masters:
            master.detach().zero_()
        load()
        assert_same_tensors(optimizer.param_groups[0]["params"], expected, "master")


class Nested(Plain):
    """Keeps a mapping for each parameter."""

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        self.state[parameter]["moments"] = {"first": parameter.grad}
        return parameter.grad


def test_state_of_several_levels_is_refused() -> None:
    pipe, (batch,) = pipeline_of(Case("mlp", "1f1b", 2, 2)), PROBLEMS["mlp"].batches(1, 4)
    optimizer = pipe.optimizer(Nested)
    pipe.step(*batch.args, target=batch.target)
    optimizer.step()
    with pytest.raises(
        zbcompile.PipelineError, match=r"keeps moments, which is a mapping .* has one level"
    ):
        optimizer.state_dict()


def test_a_closure_runs_first() -> None:
    """Lightning passes one to every step."""
    pipe = pipeline_of(Case("mlp", "1f1b", 2, 2))
    (batch,), optimizer = PROBLEMS["mlp"].batches(1, 4), pipe.optimizer(SGD, lr=0.1)
    first = optimizer.step(lambda: pipe.step(*batch.args, target=batch.target))
    assert pipe.step(*batch.args, target=batch.target) < first
