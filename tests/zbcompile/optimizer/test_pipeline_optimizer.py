"""The optimizer of `pipe.optimizer` updates as the same torch optimizer does in eager mode, in every
bit."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import CosineAnnealingLR

import zbcompile
from tests.support.optimizers import Plain
from tests.support.oracle import MLP, PROBLEMS, Batch, eager_step
from tests.support.training import ROWS, Case, assert_same_tensors, pipeline_of

MICROBATCHES, STEPS = 4, 3
CLIP = 0.05  # below the norm of every step
DECAYED: Any = [{"params": lambda name, p: p.ndim < 2, "weight_decay": 0.0, "lr": 3e-3}]
OPTIONS: Any = {"schedule": "zb-h1", "ranks": 2, "microbatches": MICROBATCHES, "exact": True}


def pipe_and_batches(problem: str = "short-mlp", count: int = 1) -> tuple[Any, list[Batch]]:
    pipe = pipeline_of(Case(problem, "zb-h1", 2, MICROBATCHES))
    return pipe, PROBLEMS[problem].batches(count, MICROBATCHES * ROWS)


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adam"])
def test_groups_schedulers_and_clipping_are_those_of_eager(name: str) -> None:
    """Made before the first batch, or after it."""
    pipe, batches = pipe_and_batches("small-tied", STEPS)
    model, loss = PROBLEMS["small-tied"].model(), PROBLEMS["small-tied"].loss
    kind, more = getattr(torch.optim, name), {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}
    options = {"lr": 1e-2, "weight_decay": 0.1, **more.get(name, {})}
    if name == "SGD":
        pipe.compile(*batches[0].args, target=batches[0].target)
    flat = {**DECAYED[0], "params": [p for p in model.parameters() if p.ndim < 2]}
    theirs = kind([flat, {"params": [p for p in model.parameters() if p.ndim >= 2]}], **options)
    ours = pipe.optimizer(kind, groups=DECAYED, clip=CLIP, **options)
    rates = CosineAnnealingLR(theirs, STEPS), CosineAnnealingLR(ours, STEPS)
    for step, batch in enumerate(batches):
        expected = eager_step(model, loss, batch, MICROBATCHES, step)
        assert torch.equal(pipe.step(*batch.args, target=batch.target), expected)
        gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        norm = torch.cat(gradients).norm().float()
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        for item in (theirs, ours, *rates):
            item.step()
        assert torch.equal(ours.norm, norm)
        theirs.zero_grad()
        ours.zero_grad()
        assert all(p.grad is None for p in pipe.parameters())
    assert_same_tensors(pipe.state_dict(full=True), model.state_dict(), "state dict:")
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    assert len(ours.state) == len(theirs.state)


class Masters:
    """The reference for parameters in half precision: float32 masters, updated from float32 sums,
    rounded once."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.masters = model, [nn.Parameter(p.float()) for p in model.parameters()]
        self.optimizer = AdamW(self.masters, lr=1e-2)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            parameter.detach().copy_(master)


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_masters_in_single_precision(dtype: torch.dtype) -> None:
    """Also after the parameters were written from outside, and after the state went through a state
    dict. What is frozen has none until it trains."""
    model, second = MLP(4).to(dtype), MLP(4).to(dtype)
    second.load_state_dict(model.state_dict())
    theirs, loss = Masters(model), nn.functional.mse_loss
    pipe = zbcompile.pipeline(second, loss=loss, **OPTIONS)
    ours = pipe.optimizer(AdamW, lr=1e-2)
    for step in range(4):
        x = torch.randn(MICROBATCHES * ROWS, 32).to(dtype)
        for item in (model, second):
            item.layers[0].weight.requires_grad_(step > 0)  # type: ignore[operator, union-attr]
        eager_step(model, loss, Batch((x,), {}, x), MICROBATCHES, step)
        pipe.step(x, target=x)
        assert {p.grad.dtype for p in pipe.parameters() if p.requires_grad} == {torch.float32}  # type: ignore[union-attr]
        theirs.step()
        ours.step()
        ours.zero_grad()
        assert_same_tensors(pipe.state_dict(full=True), model.state_dict(), f"after step {step}:")
        if step == 1:
            saved = copy.deepcopy(ours.state_dict())
            masters = [item for key, item in saved.items() if key.endswith(".master")]
            assert {item.dtype for item in masters} == {torch.float32}
            ours.param_groups[0]["params"][0].detach().zero_()
            ours.load_state_dict(saved)
        if step == 2:
            changed = {name: value + 1 for name, value in model.state_dict().items()}
            model.load_state_dict(changed)
            pipe.load_state_dict(changed)
            for master, parameter in zip(theirs.masters, model.parameters(), strict=True):
                master.detach().copy_(parameter)


def test_two_optimizers_leave_each_others_gradients_alone() -> None:
    """And a closure runs first: Lightning passes one to every step."""
    pipe, batches = pipe_and_batches(count=STEPS)
    model, loss = PROBLEMS["short-mlp"].model(), PROBLEMS["short-mlp"].loss
    theirs = [Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)]
    theirs += [SGD([p for p in model.parameters() if p.ndim != 2], lr=1e-2)]  # type: ignore[list-item]
    ours = [pipe.optimizer(Muon, params=lambda _, p: p.ndim == 2, lr=1e-2)]
    ours += [pipe.optimizer(SGD, params=lambda _, p: p.ndim != 2, lr=1e-2)]
    for step, batch in enumerate(batches):
        expected = eager_step(model, loss, batch, MICROBATCHES, step)
        run = lambda batch=batch: pipe.step(*batch.args, target=batch.target)  # noqa: E731
        assert torch.equal(ours[0].step(run), expected)
        for item in (*theirs, ours[1]):
            item.step()
        for item in (*theirs, *ours):
            item.zero_grad()
    assert_same_tensors(pipe.state_dict(full=True), model.state_dict(), "state dict:")


def closed(optimizer: Any) -> Any:
    optimizer.close()
    return optimizer


WRONG: dict[str, Callable[[Any], Any] | dict[str, Any]] = {
    "before the norm of all gradients is known, by wh": {"overlap": True, "clip": 1.0},
    'validate=\'never\'; expected "before" or "after"': {"validate": "never"},
    "zero=2; expected 0 or 1": {"zero": 2},
    "zero=True; expected 0 or 1": {"zero": True},
    'the mesh has no dimension "dp"': {"zero": 1},
    "clip=0.0; expected a norm above 0": {"clip": 0.0},
    "clip='1'; expected a norm above 0": {"clip": "1"},
    "groups=3; expected a list of groups": {"groups": 3},
    "expected a list of groups": {"groups": {"params": callable}},
    r"params=\[1\]; expected a function of a parameter's name": {"params": [1]},
    "overlap='yes'; expected True or": {"overlap": "yes"},
    "AdamW cannot be made: .*learning_rate": {"learning_rate": 1},
    'has a group whose "params" is \\[\\]': {"groups": [{"params": []}]},
    "reduce_dtype=torch.int8; expected a dtype of floating-point": {"reduce_dtype": torch.int8},
    "reduce_dtype='bfloat16'; expected a dtype": {"reduce_dtype": "bfloat16"},
    r"LBFGS.step\(\) needs a closure": lambda pipe: pipe.optimizer(torch.optim.LBFGS),
    "expected a class of torch": lambda pipe: pipe.optimizer(AdamW([torch.ones(1)])),
    "is not compiled yet, so its opt": lambda pipe: pipe.optimizer(AdamW).step(),
    "empty. Call pipe.compile with a": lambda pipe: pipe.optimizer(AdamW).load_state_dict({}),
    "this optimizer is closed, or cou": lambda pipe: closed(pipe.optimizer(AdamW)).step(),
    "fixed. Pass them as": lambda pipe: pipe.optimizer(AdamW).add_param_group({"params": []}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_is_refused_in_one_line(message: str) -> None:
    pipe, call = pipe_and_batches()[0], WRONG[message]
    with pytest.raises(zbcompile.PipelineError, match=message) as raised:
        pipe.optimizer(AdamW, **call) if isinstance(call, dict) else call(pipe)
    assert "\n" not in str(raised.value)


def test_an_optimizer_that_cannot_take_a_parameter_says_so_once_it_is_known() -> None:
    pipe, (batch,) = pipe_and_batches()
    pipe.optimizer(Muon)
    with pytest.raises(zbcompile.PipelineError, match=r"Muon cannot be made: .*2D"):
        pipe.step(*batch.args, target=batch.target)
    pipe.step(*batch.args, target=batch.target)  # without it
    nothing: Any = {"params": lambda name, _: name == "nothing"}
    with pytest.raises(zbcompile.PipelineError, match=r"params= takes none of the model's \d+ par"):
        pipe.optimizer(AdamW, **nothing)
    with pytest.raises(zbcompile.PipelineError, match=r"groups\[1\] takes none of the model's"):
        pipe.optimizer(AdamW, groups=[*DECAYED, nothing])
    optimizer = pipe.optimizer(Nested)
    pipe.step(*batch.args, target=batch.target)
    optimizer.step()
    says = r"keeps moments, which is a mapping .* has one level"
    with pytest.raises(zbcompile.PipelineError, match=says):
        optimizer.state_dict()
    with pytest.raises(TypeError, match="reshard_after_forward= any more: zero takes 0 or 1"):
        pipe.optimizer(AdamW, reshard_after_forward=True)
    with pytest.raises(TypeError, match=r"early= any more: overlap=True lets pipe\.step"):
        pipe.optimizer(AdamW, early=True)


class Nested(Plain):
    """Keeps a mapping for each parameter."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        self.state[parameter]["moments"] = {"first": gradient}
        return gradient


def test_masters_of_an_optimizer_without_state_are_saved(tmp_path: Path) -> None:
    """After gradients were replaced; in state dicts and in checkpoints."""
    pipe = zbcompile.pipeline(MLP(4).bfloat16(), loss=nn.functional.mse_loss, **OPTIONS)
    optimizer, x = pipe.optimizer(SGD, lr=1e-3), torch.ones(8, 32).bfloat16()
    pipe.step(x, target=x)
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter.grad)  # type: ignore[arg-type]
    masters = optimizer.param_groups[0]["params"]
    expected = [master.detach() - 1e-3 for master in masters]
    optimizer.step()
    assert_same_tensors(masters, expected, "master")
    saved = copy.deepcopy(optimizer.state_dict())
    zbcompile.save_checkpoint(tmp_path, pipe, optimizer)
    load = lambda: zbcompile.load_checkpoint(tmp_path, pipe, optimizer)  # noqa: E731
    for restore in (lambda: optimizer.load_state_dict(saved), load):
        for master in masters:
            master.detach().zero_()
        restore()
        assert_same_tensors(optimizer.param_groups[0]["params"], expected, "master")
