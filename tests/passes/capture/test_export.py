"""An exported step is the training step: its results have the bits of eager mode."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pass_graph_runner import differences, eager_step, run_uncut
from zbcompile.passes.capture.export import ExportOptions, export_training_step
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.source_location import LINE

WIDTH = 8


class Repeated(nn.Module):
    """Applies one layer `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + torch.tanh(self.layer(x))
        return x


def assert_equals_eager(model: nn.Module, *args: Any, loss: Any = F.mse_loss, **kwargs: Any) -> Any:
    batch = (args, kwargs, torch.randn(4, WIDTH))
    step = export_training_step(model, *batch, loss)
    assert not differences(run_uncut(step, model, batch), eager_step(model, [batch], loss, 0))
    return step


def test_a_loss_module_has_gradients_of_its_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = (self.scale * (output - target)).square().mean()
            return loss, {"error": loss / 2}

    batch = ((torch.randn(4, WIDTH),), {}, torch.randn(4, WIDTH))
    step = export_training_step(Repeated(1), *batch, Scaled(), ExportOptions(returns="metrics"))
    assert set(step.gradients) == {"layer.weight", "layer.bias", "loss_function.scale"}
    assert step.output_structure is not None
    assert step.output_structure.rebuild(["value"]) == {"error": "value"}


def test_a_tied_buffer_that_forward_writes() -> None:
    class Counts(Repeated):
        def __init__(self) -> None:
            super().__init__(1)
            self.register_buffer("count", torch.zeros(WIDTH))
            self.register_buffer("alias", self.count)

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return super().forward(x) * self.alias

    step = assert_equals_eager(Counts(), torch.randn(4, WIDTH))
    assert set(step.buffers) == {"count"}
    assert dict(step.tied_names) == {"alias": "count"}


class Decaying(nn.Module):
    """A module that assigns its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 0.9
        return x * self.scale


@pytest.mark.parametrize("shared", [Decaying(), nn.BatchNorm1d(WIDTH)], ids=["assigned", "norm"])
def test_a_module_with_two_paths_that_writes_its_buffers(shared: nn.Module) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, WIDTH), shared]
    step = assert_equals_eager(nn.Sequential(*layers), torch.randn(4, WIDTH))
    assert all(name.startswith("1.") for name in step.buffer_updates)


def test_values_that_depend_on_no_input_may_be_read() -> None:
    class Positions(Repeated):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(4)
            if bool((positions.diff() == 1).all()) and positions.tolist()[-1] == 3:
                x = x * 2
            return super().forward(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no other path of the model is taken
        assert_equals_eager(Positions(1), torch.randn(4, WIDTH))


def test_tensors_of_numbers_that_were_computed() -> None:
    """Transformers computes positions of images like this from their sizes."""

    class Positions(Repeated):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            ends = [length.max() + 1 for length in lengths]
            halves = torch.tensor([length.double() / 3 for length in lengths])
            assert halves.dtype == torch.float64
            return super().forward(x) * torch.tensor(ends)[:, None] + halves.sin().sum().float()

    batch = ((torch.randn(4, WIDTH), torch.tensor([1, 2, 3, 4])), {}, torch.randn(4, WIDTH))
    model = Positions(1)
    with pytest.raises(CaptureError, match=rf"reads a value.*{__file__}:\d+.*static_inputs"):
        export_training_step(model, *batch, F.mse_loss)
    step = export_training_step(
        model, *batch, F.mse_loss, ExportOptions(static_inputs=("args[1]",))
    )
    assert not differences(run_uncut(step, model, batch), eager_step(model, [batch], F.mse_loss, 0))


def test_refusals_name_the_static_inputs() -> None:
    class Reads(Repeated):
        def forward(self, x: Tensor, lengths: Tensor, mask: Tensor, by: str = "") -> Tensor:
            x = super().forward(x)
            if by == "activation":
                return x * int(x.sum())
            return x * int((lengths * mask).max()) + x[mask.bool()].sum()

    model = Reads(1)
    mask, lengths = torch.ones(4, dtype=torch.long), torch.tensor([1, 2, 3, 4])
    kwargs: dict[str, Any] = {"lengths": lengths, "mask": mask}
    args, target = (torch.randn(4, WIDTH),), torch.randn(4, WIDTH)
    with pytest.raises(CaptureError, match=r'pass static_inputs=\("lengths", "mask"\)'):
        export_training_step(model, args, kwargs, target, F.mse_loss)
    options = ExportOptions(static_inputs=("lengths", "mask"))
    step = export_training_step(model, args, kwargs, target, F.mse_loss, options)
    batch = (args, kwargs, target)
    assert not differences(run_uncut(step, model, batch), eager_step(model, [batch], F.mse_loss, 0))
    with pytest.raises(
        CaptureError,
        match=r"reads a value[^=]*\(torch\.where, masks; use torch.stack for lists\)\. Remove",
    ):
        export_training_step(model, args, {**kwargs, "by": "activation"}, target, F.mse_loss)


def test_hooks_on_parameters_run() -> None:
    model = Repeated(3)
    model.layer.weight.register_hook(lambda grad: grad * 0.5)
    batch = ((torch.randn(4, WIDTH),), {}, torch.randn(4, WIDTH))
    step = export_training_step(model, *batch, F.mse_loss)
    result = run_uncut(step, model, batch)
    (F.mse_loss(model(*batch[0]), batch[2])).backward()
    assert torch.equal(result.gradients["layer.weight"], model.layer.weight.grad)


def test_writes_to_grad_in_a_backward_are_refused() -> None:
    class WritesGrad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            weight.grad = grad.t() @ x
            return grad @ weight, None

    class Model(Repeated):
        def forward(self, x: Tensor) -> Tensor:
            return WritesGrad.apply(super().forward(x), self.layer.weight)

    with pytest.raises(CaptureError, match=r"layer.weight.grad itself"):
        export_training_step(Model(1), (torch.randn(4, WIDTH),), loss_fn=lambda o, t: o.sum())


def test_nodes_name_the_users_line() -> None:
    step = assert_equals_eager(Repeated(1), torch.randn(4, WIDTH))
    tanh = next(node for node in step.calls() if "tanh" in str(node.target))
    assert tanh.meta["custom"][LINE].partition(":")[0] == __file__


def test_compiled_submodules_run_as_they_are() -> None:
    model = Repeated(2)
    model.layer.compile()
    assert_equals_eager(model, torch.randn(4, WIDTH))


def test_a_function_without_a_gradient_for_a_parameter() -> None:
    class Unmoved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (weight,) = ctx.saved_tensors
            return grad @ weight.t(), None

    class Model(Repeated):
        def __init__(self) -> None:
            super().__init__(1)
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return Unmoved.apply(super().forward(x), self.weight)

    step = assert_equals_eager(Model(), torch.randn(4, WIDTH))
    assert step.gradients["weight"] is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_are_annotated(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    from zbcompile.passes.capture.checkpoint_hints import checkpoint_region

    class Model(Repeated):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layer(x))
            x = checkpoint(self.layer, F.dropout(x, 0.3), use_reentrant=reentrant)
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    step = assert_equals_eager(Model(2), torch.randn(4, WIDTH))
    regions = {checkpoint_region(node) for node in step.forward_nodes()}
    assert regions == {None, 0, 1}


def test_a_reentrant_region_without_gradients_trains_nothing() -> None:
    """Eager mode loses the gradients of weights if no argument of the region requires one."""
    from torch.utils.checkpoint import checkpoint

    class Model(Repeated):
        def __init__(self) -> None:
            super().__init__(1)
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(checkpoint(self.first, x, use_reentrant=True))

    step = assert_equals_eager(Model(), torch.randn(4, WIDTH))
    assert step.gradients["first.weight"] is None


@pytest.mark.parametrize("p", [0.025, 0.1, 0.5])
def test_dropout_has_eagers_bits_in_any_layout(p: float) -> None:
    class Model(Repeated):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(F.dropout(x.t(), p).t()), p)

    assert_equals_eager(Model(1), torch.randn(4, WIDTH))


def test_parameters_on_the_meta_device() -> None:
    """The graph is that of real parameters, also for another shape of the batch."""
    model = Repeated(2)
    empty = Repeated(2).to("meta")
    for rows in (4, 6):
        batch = ((torch.randn(rows, WIDTH),), {}, torch.randn(rows, WIDTH))
        texts = [
            str(export_training_step(each, *batch, F.mse_loss).graph) for each in (model, empty)
        ]
        assert texts[0] == texts[1]


def test_autocast_and_attention_on_the_meta_device() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.layer(x)[None, None]
                return F.scaled_dot_product_attention(x, x, x)[0, 0]

    batch = ((torch.randn(4, WIDTH),), {}, torch.randn(4, WIDTH))
    texts = [
        str(export_training_step(model, *batch, lambda o, t: o.float().sum()).graph)
        for model in (Attention(), Attention().to("meta"))
    ]
    assert texts[0] == texts[1]
    assert "flash_attention" in texts[0]


@pytest.mark.parametrize("write", ["in place", "data", "data in place", "assigned"])
def test_writes_to_parameters_are_refused(write: str) -> None:
    class Writes(Repeated):
        def forward(self, x: Tensor) -> Tensor:
            if write == "in place":
                with torch.no_grad():
                    self.layer.weight.clamp_(-0.1, 0.1)
            elif write == "data in place":
                self.layer.weight.data.clamp_(-0.1, 0.1)
            elif write == "data":
                self.layer.weight.data = self.layer.weight.data.clamp(-0.1, 0.1)
            else:
                self.layer.weight = nn.Parameter(self.layer.weight * 2)
            return super().forward(x)

    with pytest.raises(CaptureError, match=r"forward writes a parameter|assigns to the `.data`"):
        export_training_step(Writes(1), (torch.randn(4, WIDTH),), loss_fn=lambda o, t: o.sum())


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "batch norm": (nn.BatchNorm1d(WIDTH), (0, 2, 1)),
    "batch norm, channels last": (nn.BatchNorm2d(WIDTH), (0, 3, 1, 2)),
    "layer norm": (nn.LayerNorm(5), (0, 2, 1)),
    "group norm": (nn.GroupNorm(2, WIDTH), (0, 2, 1)),
    "gated convolution": (nn.Sequential(nn.Conv1d(WIDTH, 16, 1), nn.GLU(1)), (0, 2, 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_fake_strides_are_those_of_the_kernels(name: str) -> None:
    layer, order = LAYERS[name]

    class Permuted(Repeated):
        def __init__(self) -> None:
            super().__init__(1)
            self.norm = layer

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.layer(x).permute(order))
            return x.permute([order.index(dim) for dim in range(x.ndim)])

    shape = (4, 5, WIDTH) if len(order) == 3 else (4, 5, 3, WIDTH)
    model, batch = Permuted(), ((torch.randn(shape),), {}, torch.randn(shape))
    step = export_training_step(model, *batch, F.mse_loss)
    assert not differences(run_uncut(step, model, batch), eager_step(model, [batch], F.mse_loss, 0))
