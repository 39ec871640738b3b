"""Refusals with the user's line of steps that cannot be repeated; remedies have eager's bits."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.pass_graph_runner import split_as_eager, uncut_as_eager
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.compile_step import compile_graph
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.step_graph import StepGraph

WIDTH = 8
Function = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    """Two layers with a function of the module and the activation in between."""

    def __init__(self, function: Function = lambda model, x: x) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("buffer", torch.ones(WIDTH))
        self.plain = torch.ones(WIDTH)
        self.first.weight.scale = self.factor = 2.0
        self.torch_generator = torch.Generator()
        self.scale = [nn.Parameter(torch.ones(WIDTH))]
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, torch.tanh(self.first(x))))


def rows() -> Tensor:
    return torch.randn(4, WIDTH)


def export(model: nn.Module | Function, loss: Any = F.mse_loss) -> StepGraph:
    model = model if isinstance(model, nn.Module) else Model(model)
    return export_training_step(model, (rows(),), {}, rows(), loss)


def assert_equals_eager(model: nn.Module, loss: Any = F.mse_loss, **options: Any) -> StepGraph:
    return uncut_as_eager(model, ((rows(),), {}, rows()), loss, **options)


def write(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.mul_(2)


def set_data(tensor: Tensor) -> Tensor:
    tensor.data = tensor.data * 2
    return tensor


def carry(model: Model, x: Tensor) -> Tensor:
    model.plain = x.detach() + model.plain
    return model.plain * x


def carry_in_buffer(model: Model, x: Tensor) -> Tensor:
    model.buffer = x.detach().mean(0) + model.buffer
    return model.buffer * x


def decide_in_try(model: Model, x: Tensor) -> Tensor:
    try:
        return x * 2 if x.sum().item() > 0 else x * 3
    except RuntimeError:
        return x * 4


def numpys(model: Model, x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy() * 2)


class Observed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.buffer.add_(grad.mean(0))
        return grad * 2, None


CASES: dict[str, tuple[Function, str, Function | None]] = {
    "random": (
        lambda m, x: x * random.random(),
        r"draws from Python's random module \(.*test_unsupported.py:\d+\).*torch.rand",
        lambda m, x: x * torch.rand(()),
    ),
    "a generator of torch": (
        lambda m, x: x * torch.rand(WIDTH, generator=m.torch_generator),
        r"torch.Generator of its own \(.*:\d+\).*`generator=` out",
        lambda m, x: x * torch.rand(WIDTH),
    ),
    "data": (
        lambda m, x: x * set_data(m.buffer),
        r"assigns to the `.data` of a tensor \(.*:\d+\).*copy_",
        lambda m, x: x * write(m.buffer),
    ),
    "an attribute of a parameter": (
        lambda m, x: x * getattr(m.first.weight, "scale", 1.0),
        r"reads .scale of a tensor \(.*test_unsupported.py:\d+\).*Keep it on the module",
        lambda m, x: x * m.factor,
    ),
    "a plain tensor": (
        lambda m, x: x * write(m.plain),
        r"changes model.plain in place \(.*:\d+\).*register_buffer",
        None,
    ),
    "an attribute": (carry, "changes model.plain and reads it.*register_buffer", carry_in_buffer),
    "a caught error": (
        decide_in_try,
        r"catches the error.*\(.*:\d+\).*torch.where",
        lambda m, x: torch.where(x.sum() > 0, x * 2, x * 3),
    ),
    "a tensor that is no parameter": (
        lambda m, x: x * m.scale[0],
        r"not a parameter of the model \(.*:\d+\).*detach",
        lambda m, x: x * m.scale[0].detach(),
    ),
    "a buffer that the backward writes": (
        lambda m, x: Observed.apply(x, m.buffer),
        r"backward changes the buffer 'buffer'.*in forward",
        None,
    ),
    "numpy": (numpys, r"forward of Model.*:\d+\) .*numpy.*Compute with torch", None),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_remedy(name: str) -> None:
    function, message, remedy = CASES[name]
    with pytest.raises(CaptureError, match=message):
        export(function)
    if remedy is not None:
        assert_equals_eager(Model(remedy))


@torch.library.custom_op("zbcompile_tests::softplus_backward", mutates_args=())
def softplus_backward(x: Tensor, y: Tensor) -> Tensor:
    """An operator of another library that is called as one of torch's, and does something else."""
    return (x * y).sum(1)


softplus_backward.register_fake(lambda x, y: x.new_empty(len(x)))


def test_an_operator_of_another_library_with_a_name_of_torchs() -> None:
    assert_equals_eager(
        Model(lambda m, x: x * softplus_backward(x.detach(), m.plain * x.detach())[:, None])
    )


WRITES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor], str]] = {
    "an input": (lambda x: x.add_(1), F.mse_loss, r"args\[0\]"),
    "through a view": (lambda x: x[1:].mul_(2).new_zeros(()) + x, F.mse_loss, r"args\[0\]"),
    "by data": (lambda x: x.data.mul_(2), F.mse_loss, r"args\[0\]"),
    "the target": (
        lambda x: x,
        lambda output, target: F.mse_loss(output, target.mul_(2)),
        "target",
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_the_batch_are_refused(name: str) -> None:
    """Microbatches may share an input, and the user may use it again."""
    function, loss, path = WRITES[name]
    model = nn.Sequential(Written(function), nn.Linear(WIDTH, WIDTH))
    message = rf"changes {path} of the batch in place \(.*:\d+\).*clone\(\)"
    with pytest.raises(CaptureError, match=message):
        export(model, loss)
    model[0] = Written(lambda x: function(x.clone()))
    assert_equals_eager(model)


class Written(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_parameters_over_one_memory_are_refused() -> None:
    model = Model()
    model.last.weight = nn.Parameter(model.first.weight.data)
    with pytest.raises(CaptureError, match=r"'first.weight' and 'last.weight'.*clone one"):
        export(model)
    model.last.weight = model.first.weight
    assert_equals_eager(model)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"'0.weight' is sparse.*sparse=False"):
        export_training_step(model, (torch.randint(9, (4,)),), {}, rows(), F.mse_loss)


def test_a_hook_of_torch_that_replaces_a_weight() -> None:
    torch.nn.utils.spectral_norm((model := Model()).last)
    assert_equals_eager(model, in_place=True)


def test_a_parameter_in_and_outside_of_a_reentrant_checkpoint() -> None:
    """Eager mode adds its gradients in another order then."""

    def twice(model: Model, x: Tensor, reentrant: bool = True) -> Tensor:
        return checkpoint(lambda x: torch.tanh(model.last(x)), x, use_reentrant=reentrant)

    step = export(twice)
    compile_graph(step.copy(), ranks_of=(0, 1))
    with pytest.raises(CaptureError, match=r"'last.weight'.*use_reentrant=False"):
        compile_graph(step, ranks_of=(0, 1), exact=True)
    batches = [((rows(),), {}, rows()) for _ in range(3)]
    split_as_eager(Model(lambda m, x: twice(m, x, reentrant=False)), batches, F.mse_loss)


def test_dropout_in_a_branch() -> None:
    """torch.cond computes the branch again in the backward, and draws again."""
    step = export(lambda m, x: torch.cond(x.sum() > 0, F.dropout, torch.cos, (x,)))
    with pytest.raises(CaptureError, match=r"backward draws random numbers.*in forward"):
        compile_graph(step, ranks_of=(0, 1))


def ctc_loss(output: Tensor, lengths: Any, target_lengths: Any) -> Tensor:
    targets = torch.tensor([[1, 2, 3], [4, 5, 6]])
    log_probs = F.log_softmax(output, -1)[:, None].expand(4, 2, WIDTH)
    return F.ctc_loss(log_probs, targets, lengths, target_lengths)


def test_ctc_losses() -> None:
    """The shape of what the backward reads depends on the lengths. Lists of lengths are refused."""
    with pytest.raises(CaptureError, match="pass the lengths as tensors"):
        export(Model(), lambda output, target: ctc_loss(output, [4, 4], [2, 1]))
    batches = [((rows(),), {}, torch.tensor([2, 1 + index])) for index in range(3)]
    split_as_eager(Model(), batches, lambda o, target: ctc_loss(o, torch.tensor([4, 4]), target))
