"""Refusals with the user's line of steps that cannot be repeated; remedies have eager's bits."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.pass_graph_runner import Runner, differences, eager_step, run_uncut
from zbcompile import schedules
from zbcompile.passes.capture.export import ExportOptions, export_training_step
from zbcompile.passes.compile_step import compile_graph
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.step_graph import StepGraph

WIDTH = 8


class Model(nn.Module):
    """Two layers with a function of the module and the activation in between."""

    def __init__(self, function: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("buffer", torch.ones(WIDTH))
        self.plain = torch.ones(WIDTH)
        self.first.weight.scale = self.factor = 2.0  # type: ignore[assignment]
        self.torch_generator = torch.Generator()
        self.scale = [nn.Parameter(torch.ones(WIDTH))]
        self.calls = 0
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, torch.tanh(self.first(x))))  # type: ignore[no-any-return]


def rows() -> Tensor:
    return torch.randn(4, WIDTH)


def export(function: Callable[[Model, Tensor], Tensor], loss: Any = F.mse_loss) -> StepGraph:
    return export_training_step(Model(function), (rows(),), {}, rows(), loss)


def assert_equals_eager(model: nn.Module, loss: Any = F.mse_loss) -> StepGraph:
    batch = ((rows(),), {}, rows())
    step = export_training_step(model, *batch, loss)
    assert not differences(run_uncut(step, model, batch), eager_step(model, [batch], loss, 0))
    return step


class Case(NamedTuple):
    function: Callable[[Model, Tensor], Any]
    message: str
    remedy: Callable[[Model, Tensor], Any] | None = None


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


def decide_in_try(x: Tensor) -> Tensor:
    try:
        return x * 2 if x.sum().item() > 0 else x * 3
    except RuntimeError:
        return x * 4


@torch.library.custom_op("zbcompile_tests::softplus_backward", mutates_args=())
def softplus_backward(x: Tensor, y: Tensor) -> Tensor:
    """An operator of another library that is called as one of torch's, and does something else."""
    return (x * y).sum(1)


@softplus_backward.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(len(x))


def test_an_operator_of_another_library_with_a_name_of_torchs() -> None:
    assert_equals_eager(
        Model(lambda m, x: x * softplus_backward(x.detach(), m.plain * x.detach())[:, None])
    )


CASES = {
    "random": Case(
        lambda m, x: x * random.random(),
        r"draws from Python's random module \(.*test_unsupported.py:\d+\).*torch.rand",
        lambda m, x: x * torch.rand(()),
    ),
    "a generator of torch": Case(
        lambda m, x: x * torch.rand(WIDTH, generator=m.torch_generator),
        r"torch.Generator of its own \(.*:\d+\).*`generator=` out",
        lambda m, x: x * torch.rand(WIDTH),
    ),
    "data": Case(
        lambda m, x: x * set_data(m.buffer),
        r"assigns to the `.data` of a tensor \(.*:\d+\).*copy_",
        lambda m, x: x * write(m.buffer),
    ),
    "an attribute of a parameter": Case(
        lambda m, x: x * getattr(m.first.weight, "scale", 1.0),
        r"reads .scale of a tensor \(.*test_unsupported.py:\d+\).*Keep it on the module",
        lambda m, x: x * m.factor,
    ),
    "a plain tensor": Case(
        lambda m, x: x * write(m.plain),
        r"changes model.plain in place \(.*:\d+\).*register_buffer",
        lambda m, x: x * write(m.buffer),
    ),
    "an attribute": Case(
        carry, "changes model.plain and reads it.*register_buffer", carry_in_buffer
    ),
    "a caught error": Case(
        lambda m, x: decide_in_try(x),
        r"catches the error.*\(.*:\d+\).*torch.where",
        lambda m, x: torch.where(x.sum() > 0, x * 2, x * 3),
    ),
    "a tensor that is no parameter": Case(
        lambda m, x: x * m.scale[0],
        r"not a parameter of the model \(.*:\d+\).*detach",
        lambda m, x: x * m.scale[0].detach(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_remedy(name: str) -> None:
    case = CASES[name]
    with pytest.raises(CaptureError, match=case.message):
        export(case.function)
    if case.remedy is not None:
        assert_equals_eager(Model(case.remedy))


def test_numbers_that_forward_seeds_itself_are_constants() -> None:
    def shuffle(model: Model, x: Tensor) -> Tensor:
        np.random.seed(3)
        return x[:, torch.from_numpy(np.random.permutation(WIDTH))]

    assert_equals_eager(Model(shuffle))


WRITES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor], str]] = {
    "an input": (lambda x: x.add_(1), F.mse_loss, r"args\[0\]"),
    "through a view": (lambda x: x[1:].mul_(2).new_zeros(()) + x, F.mse_loss, r"args\[0\]"),
    "by data": (lambda x: x.data.mul_(2), F.mse_loss, r"args\[0\]"),
    "without gradients": (write, F.mse_loss, r"args\[0\]"),
    "the target": (
        lambda x: x,
        lambda output, target: F.mse_loss(output, target.mul_(2)),
        "target",
    ),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("copy", [False, True])
def test_writes_into_the_batch_are_refused(name: str, copy: bool) -> None:
    """Microbatches may share an input, and the user may use it again."""
    function, loss, path = WRITES[name]

    class Writes(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(function(x.clone() if copy else x))

    if not copy:
        message = rf"changes {path} of the batch in place \(.*:\d+\).*clone\(\)"
        with pytest.raises(CaptureError, match=message):
            export_training_step(Writes(lambda m, x: x), (rows(),), {}, rows(), loss)
    elif path != "target":
        assert_equals_eager(Writes(lambda m, x: x))


def test_a_buffer_that_the_backward_writes_is_refused() -> None:
    class Observed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
            ctx.buffer = buffer
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            ctx.buffer.add_(grad.mean(0))
            return grad * 2, None

    with pytest.raises(CaptureError, match=r"backward changes the buffer 'buffer'.*in forward"):
        export(lambda m, x: Observed.apply(x, m.buffer))


def test_remedies_of_the_checks() -> None:
    lazy = nn.Sequential(nn.LazyLinear(WIDTH))
    lazy(rows())
    assert_equals_eager(lazy)
    assert_equals_eager(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.1)))
    assert_equals_eager(nn.DataParallel(nn.Linear(WIDTH, WIDTH)).module)


def test_parameters_over_one_memory_are_refused() -> None:
    model = Model(lambda m, x: x)
    model.last.weight = nn.Parameter(model.first.weight.data)
    with pytest.raises(CaptureError, match=r"'first.weight' and 'last.weight'.*clone one"):
        export_training_step(model, (rows(),), {}, rows(), F.mse_loss)
    model.last.weight = model.first.weight
    assert_equals_eager(model)


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_are_refused(sparse: bool) -> None:
    model = nn.Sequential(nn.Embedding(9, WIDTH, sparse=sparse), nn.Linear(WIDTH, WIDTH))
    batch = ((torch.randint(9, (4,)),), {}, rows())
    if sparse:
        with pytest.raises(CaptureError, match=r"'0.weight' is sparse.*sparse=False"):
            export_training_step(model, *batch, F.mse_loss)
    else:
        export_training_step(model, *batch, F.mse_loss)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "pruned"])
def test_hooks_of_torch_that_replace_a_weight(kind: str) -> None:
    model = Model(lambda m, x: x)
    if kind == "pruned":
        torch.nn.utils.prune.l1_unstructured(model.last, "weight", 0.5)
    else:
        getattr(torch.nn.utils, kind)(model.last)
    batch = ((rows(),), {}, rows())
    step = export_training_step(model, *batch, F.mse_loss)
    result = run_uncut(step, model, batch)
    assert not differences(result, eager_step(model, [batch], F.mse_loss, 0, in_place=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_parameter_in_and_outside_of_a_reentrant_checkpoint(reentrant: bool) -> None:
    def twice(model: Model, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(model.last(x)), x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    batches = [((rows(),), {}, rows()) for _ in range(3)]
    model = Model(twice)
    step = export_training_step(model, *batches[0], F.mse_loss)
    compile_graph(step.copy(), ranks_of=(0, 1))
    if reentrant:
        with pytest.raises(CaptureError, match=r"'last.weight'.*use_reentrant=False"):
            compile_graph(step, ranks_of=(0, 1), exact=True)
        return
    compiled = compile_graph(step, ranks_of=(0, 1), exact=True)
    orders = schedules.build("zb-h1", ranks=2, microbatches=3).orders
    result = Runner(compiled, model, batches, seed=0).run(orders)
    assert not differences(result, eager_step(model, batches, F.mse_loss, 0))


def test_modules_that_forward_replaces() -> None:
    def replace(model: Model, x: Tensor) -> Tensor:
        if model.calls == 0:
            model.calls, model.last = 1, nn.Linear(WIDTH, WIDTH)
        return x

    model = Model(replace)
    last = model.last
    with pytest.raises(CaptureError, match=r"submodule of model, .*Call the model once"):
        export_training_step(model, (rows(),), {}, rows(), F.mse_loss)
    assert model.last is last
    model(rows())
    assert_equals_eager(model)


def test_hooks_stay_if_the_first_attempt_fails() -> None:
    def install(model: Model, x: Tensor) -> Tensor:
        if not getattr(model, "_installed", False):
            model._installed = model.first.register_forward_hook(lambda *call: call[2] * 1.5)
        if not torch.compiler.is_compiling() and x.sum() > 0:
            return x
        return x

    model = Model(install)
    with pytest.warns(UserWarning, match="path that it has for compilers"):
        export_training_step(model, (rows(),), {}, rows(), F.mse_loss)
    assert len(model.first._forward_hooks) == 1


@pytest.mark.parametrize("inside", [True, False])
def test_dropout_in_a_branch(inside: bool) -> None:
    """torch.cond computes the branch again in the backward, and draws again."""

    def branch(model: Model, x: Tensor) -> Tensor:
        drop: Any = F.dropout if inside else torch.sin
        y: Any = torch.cond(x.sum() > 0, drop, torch.cos, (x if inside else F.dropout(x),))
        return y  # type: ignore[no-any-return]

    step = export(branch)
    if inside:
        with pytest.raises(CaptureError, match=r"backward draws random numbers.*in forward"):
            compile_graph(step, ranks_of=(0, 1))
    else:
        compile_graph(step, ranks_of=(0, 1))


def doubled(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


def branch(x: Tensor, copy: bool) -> Tensor:
    true: Any = (lambda x: x.clone()) if copy else (lambda x: x)
    return torch.cond(x.sum() > 0, true, torch.sin, (x,))  # type: ignore[return-value]


def ctc_loss(output: Tensor, lengths: Any, target_lengths: Any) -> Tensor:
    targets = torch.tensor([[1, 2, 3], [4, 5, 6]])
    log_probs = F.log_softmax(output, -1)[:, None].expand(4, 2, WIDTH)
    return F.ctc_loss(log_probs, targets, lengths, target_lengths)


ERRORS = {
    "numpy": Case(
        lambda m, x: x + doubled(x), r":\d+\) .*numpy.*Compute with torch", lambda m, x: x + 2 * x
    ),
    "aliases": Case(
        lambda m, x: branch(x, copy=False), r"clone\(\)", lambda m, x: branch(x, copy=True)
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_torch_are_explained(name: str) -> None:
    case = ERRORS[name]
    with pytest.raises(CaptureError, match=f"forward of Model.*{case.message}"):
        export(case.function)
    if case.remedy is not None and name != "aliases":
        assert_equals_eager(Model(case.remedy))
    elif case.remedy is not None:
        export(case.remedy)


def test_ctc_losses() -> None:
    """The shape of what the backward reads depends on the lengths. Lists of lengths are refused."""
    model = Model(lambda m, x: x)
    with pytest.raises(CaptureError, match="pass the lengths as tensors"):
        export_training_step(
            model, (rows(),), loss_fn=lambda output, target: ctc_loss(output, [4, 4], [2, 1])
        )
    batches = [((rows(),), {}, torch.tensor([2, 1 + index])) for index in range(3)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ctc_loss(output, torch.tensor([4, 4]), target)

    step = export_training_step(model, *batches[0], loss)
    compiled = compile_graph(step, ranks_of=(0, 1), exact=True)
    result = Runner(compiled, model, batches, seed=0).run(
        schedules.build("zb-h1", ranks=2, microbatches=3).orders
    )
    assert not differences(result, eager_step(model, batches, loss, 0))


def test_ctc_losses_with_padded_labels() -> None:
    """Transformers computes the loss like this: the labels are selected by a mask."""

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        log_probs = F.log_softmax(output, -1)[:, None].expand(4, 2, WIDTH)
        mask = labels >= 0
        return F.ctc_loss(log_probs, labels.masked_select(mask), torch.tensor([4, 4]), mask.sum(-1))

    model, batch = Model(lambda m, x: x), ((rows(),), {}, torch.tensor([[1, 2], [3, -100]]))
    with pytest.raises(CaptureError, match=r"shape of a result.*static_inputs"):
        export_training_step(model, *batch, loss)
    options = ExportOptions(static_inputs=("target",))
    step = export_training_step(model, *batch, loss, options)
    assert not differences(run_uncut(step, model, batch), eager_step(model, [batch], loss, 0))
