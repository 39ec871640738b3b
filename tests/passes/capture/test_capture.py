"""Models whose forward does unusual things: loss, gradients and buffers are bitwise those of eager
mode after every step. Others are refused."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import zbcompile

WIDTH = 6
MICROBATCHES = 4
Inputs = tuple[tuple[Any, ...], dict[str, Any], Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows() -> Inputs:
    return (torch.randn(8, WIDTH),), {}, torch.randn(8, WIDTH)


class Layers(nn.Module):
    """Linear layers around a residual stream; the models below change what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def parts(inputs: Inputs) -> list[Inputs]:
    """The microbatches, every tensor cut along dimension 0."""
    leaves, structure = pytree.tree_flatten(inputs)
    cut = [
        [x.chunk(MICROBATCHES)[i] if isinstance(x, Tensor) else x for x in leaves]
        for i in range(MICROBATCHES)
    ]
    return [pytree.tree_unflatten(some, structure) for some in cut]


def eager_step(model: nn.Module, loss: Any, inputs: Inputs, step: int) -> Tensor:
    total = torch.zeros(())
    for i, (args, kwargs, target) in enumerate(parts(inputs)):
        torch.manual_seed(zbcompile.microbatch_seed(step, i))
        output = model(*args, **kwargs)
        value = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        scaled = (loss(output, target) if loss else value) / MICROBATCHES
        scaled.backward()
        total = total + scaled.detach()
    return total


def assert_equals_eager(
    make: Callable[[], nn.Module],
    schedule: str,
    inputs: Callable[[], Inputs] = rows,
    loss: Any = F.mse_loss,
) -> zbcompile.Pipeline:
    """Two steps of a pipeline of two ranks against eager accumulation."""
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    pipe = zbcompile.pipeline(
        model, schedule=schedule, ranks=2, microbatches=MICROBATCHES, loss=loss, exact=True
    )
    for step in range(2):
        args, kwargs, target = batch = inputs()
        ours = pipe.step(*args, **kwargs, **({} if target is None else {"target": target}))
        assert torch.equal(ours, eager_step(eager, loss, batch, step)), step
        for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad), (name, step)  # type: ignore[arg-type]
        for (name, buffer), other in zip(model.named_buffers(), eager.buffers(), strict=True):
            assert torch.equal(buffer, other), (name, step)
    return pipe


# Inputs and outputs


class Outcome(NamedTuple):
    loss: Tensor
    rows: Tensor


@dataclasses.dataclass
class Outputs:
    loss: Tensor | None
    rows: Tensor
    nothing: Tensor | None = None


class Returning(Layers):
    """Nested inputs by position and by keyword: a mask, positions, None, labels."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(
        self,
        x: Tensor,
        pair: Any,
        *,
        mask: Tensor,
        positions: Tensor,
        nothing: None,
        labels: Tensor,
    ) -> Any:  # type: ignore[override]
        x = super().forward(x + pair[0] * pair[1]["by"]).masked_fill(mask, 0.0)
        x = x + F.one_hot(positions, WIDTH)
        return self.kind(F.mse_loss(x, labels), x)


def nested() -> Inputs:
    positional = (torch.randn(8, WIDTH), (torch.randn(8, WIDTH), {"by": torch.randn(8, WIDTH)}))
    keywords = {
        "mask": torch.rand(8, WIDTH) > 0.5,
        "positions": torch.randint(0, WIDTH, (8,)),
        "nothing": None,
        "labels": torch.randn(8, WIDTH),
    }
    return positional, keywords, None


def model_output(loss: Tensor, logits: Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [(Outcome, "zb-v"), (Outputs, "zb-h1"), (model_output, "1f1b")],
    ids=["tuple", "class", "hf"],
)
def test_outputs_of_every_kind(kind: Callable[..., Any], schedule: str) -> None:
    """The loss is found in them, and evaluation returns them as they are: dataclasses are made
    known to torch."""
    pipe = assert_equals_eager(lambda: Returning(kind), schedule, nested, loss=None)
    args, kwargs, _ = nested()
    actual = pipe.eval(*args, **kwargs)
    expected = pipe._model.eval()(*args, **kwargs)
    assert type(actual) is type(expected)
    torch.testing.assert_close(actual.loss, expected.loss)


@pytest.mark.slow
def test_inputs_with_gaps_keep_their_strides() -> None:
    """A view of the transpose and of every second column, as a data loader may hand them out."""

    class Viewing(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.t().reshape(-1, WIDTH) if x.stride(0) == 1 else x)

    torch.manual_seed(0)
    wide, square = torch.randn(8, 2 * WIDTH), torch.randn(WIDTH, 8).t()
    for case in (wide[:, ::2], square):
        assert_equals_eager(Viewing, "1f1b", lambda case=case: ((case,), {}, torch.randn(8, WIDTH)))  # type: ignore[misc]


# What forward may do


class Normed(nn.Module):
    """Batch norm, the first one used twice: m microbatches change its statistics 2m times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.norms[0](x))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return x


class Buffers(Layers):
    """Buffers changed in place, by row, by assignment and by an input, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "rows", "last", "seen"):
            self.register_buffer(name, torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        before = self.rows[0]
        x = torch.tanh(self.layers[0](x) + before)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.rows[0] = x.detach().amax(0)
        self.last = 0.5 * self.last + x.detach().amin(0)
        x = x - self.mean.sum(0) * self.rows.sum(0) + self.last.mean(0)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        x = x + self.seen.mean(0)
        self.seen.copy_(x.detach())
        return x + before


class Random(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.layers[0](x), 0.3)
        x = F.alpha_dropout(torch.tanh(self.layers[1](x)), 0.3, True)
        x = self.layers[2](x) + torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.3))
        noise = torch.empty_like(x).normal_()
        return F.dropout1d(self.layers[3](x).unsqueeze(1), 0.5).squeeze(1) * noise


class Flexible(Layers):
    """flex_attention with a block mask in a frozen part: its backward runs on GPUs only."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            rows = self.layers[0](x)[:, None, :, None].expand(-1, 1, -1, 8).contiguous()
            blocks = create_block_mask(
                lambda b, h, q, k: q >= k, None, None, WIDTH, WIDTH, device="cpu"
            )
            seen = flex_attention(rows, rows, rows, block_mask=blocks)
        return super().forward(x + seen[:, 0, :, 0])  # type: ignore[index,union-attr]


class Silent(Layers):
    """Regions without gradients: no_grad, inference_mode, detach, .data, and one with gradients
    inside them."""

    @torch.no_grad()
    def gate(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.layers[1](x))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        with torch.inference_mode():
            seen = torch.tanh(self.layers[2](x))
        with torch.no_grad():
            scale = self.layers[3](x).mean()
            with torch.enable_grad():
                own = self.layers[0](x)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) * gate + x.detach() * scale
        return x * seen.clone() + own - 0.5 * x.data


class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x).add_(1))
        y = self.layers[1](x)
        y += x
        y = self.layers[2](y)
        y[:, 2] = y[:, 0] * 2
        y[:, 3:5] = 0.5
        y.mul_(2)
        z = self.layers[3](y)
        z.masked_fill_(y > 0, 0.5)
        z[:, :2].zero_()
        z[1] = y[0].double()
        return z


class Choosing(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = torch.cond(x.sum() > 0, lambda y: torch.tanh(self.layers[1](y)), lambda y: y * 2, (x,))
        return self.layers[3](torch.tanh(self.layers[2](x)))


class Recomputing(Layers):
    """Checkpoint regions, one inside another, with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return F.dropout(torch.tanh(self.layers[1](x)), 0.2)

        def outer(x: Tensor) -> Tensor:
            return torch.tanh(
                self.layers[2](checkpoint(inner, self.layers[0](x), use_reentrant=False))
            )

        return self.layers[3](checkpoint(outer, x, use_reentrant=False))


class Dtypes(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].double()
        self.layers[2].bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x)).double()
        x = torch.tanh(self.layers[1](x)).bfloat16()
        return self.layers[3](torch.tanh(self.layers[2](x)).float())


class Complex(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            frequencies = torch.fft.fft(layer(x))
            x = torch.fft.ifft(frequencies * frequencies.conj()).real + x
        turned = torch.view_as_complex(x.view(-1, WIDTH // 2, 2)) * torch.polar(
            torch.ones(3), torch.arange(3.0)
        )
        return torch.view_as_real(turned).flatten(1)


class Asking(Layers):
    """Goes another way when it is traced, as transformers' models do."""

    def forward(self, x: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or torch.compiler.is_exporting()
        return super().forward(2 * x if traced else x)


class Tied(Layers):
    """A whole layer used twice, a weight that is another layer's transpose, and parameters in a list
    and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = self.layers[0]
        self.listed = nn.ParameterList([torch.randn(WIDTH)])
        self.named = nn.ParameterDict({"shift": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * self.listed[0]) @ self.layers[2].weight
        return x + self.named["shift"]


class Distributed(Layers):
    """Log-probabilities of a distribution, whose checks of its arguments decide by values."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        scale = F.softplus(self.layers[0](x)) + 0.1
        chosen = torch.distributions.Categorical(logits=x).entropy().unsqueeze(-1)
        return torch.distributions.Normal(x, scale).log_prob(torch.zeros_like(x)) + chosen


class Rebound(Layers):
    """Buffers that are assigned; one of them is read on the first stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        x = x * (1 + self.calls)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x)


MODELS = (
    (Normed, "zb-h1"),
    (Distributed, "zb-h1"),
    (Rebound, "zb-v"),
    (Buffers, "1f1b"),
    (Random, "zb-v"),
    (Flexible, "1f1b"),
    (Silent, "zb-h1"),
    (InPlace, "zb-v"),
    (Choosing, "1f1b"),
    (Recomputing, "zb-v"),
    (Dtypes, "zb-v"),
    (Complex, "1f1b"),
    (Asking, "1f1b"),
    (Tied, "zb-v"),
)


@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize(("make", "schedule"), MODELS, ids=[make.__name__ for make, _ in MODELS])
def test_equals_eager(make: Callable[[], nn.Module], schedule: str) -> None:
    assert_equals_eager(make, schedule)


# What is said, and what is seen


class CastOnTwoStages(Layers):
    """A layer used at both ends of an autocast region."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for i in (0, 1, 2, 0):
                x = torch.tanh(self.layers[i](x))
        return self.layers[3](x.float())


def test_a_weight_that_autocast_casts_on_two_stages() -> None:
    """Eager casts it once and adds its gradients in bfloat16; here they are added in float32."""
    torch.manual_seed(0)
    model = CastOnTwoStages()
    eager, ((x,), kwargs, target) = copy.deepcopy(model), rows()
    options = {
        "schedule": "1f1b",
        "ranks": 2,
        "microbatches": MICROBATCHES,
        "loss": F.mse_loss,
        "exact": True,
    }
    pipe = zbcompile.pipeline(model, **options)
    assert torch.equal(
        pipe.step(x, target=target), eager_step(eager, F.mse_loss, ((x,), kwargs, target), 0)
    )
    assert "layers.0.weight" in pipe.program.shared
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        bound = 2**-7 * theirs.grad.abs().max() if name.startswith("layers.0.") else 0
        assert (ours.grad - theirs.grad).abs().max() <= bound, name


@pytest.mark.parametrize("traced", [True, False])
def test_a_model_that_only_a_trace_can_follow_is_warned_of(traced: bool) -> None:
    """The model looks at activations otherwise. Its bits are those of the path that it has for
    compilers."""

    class Looking(Layers):
        looks = True

        def forward(self, x: Tensor) -> Tensor:
            is_guarded = torch.jit.is_tracing() if traced else torch.compiler.is_compiling()
            looks = self.looks and not is_guarded
            if traced and torch.compiler.is_compiling():  # the path that is taken last
                x = x.sin()
            return super().forward(-x if looks and self.layers[0](x).sum() < 9 else x)

    model = Looking()
    eager, ((x,), kwargs, target) = copy.deepcopy(model), rows()
    eager.looks = False
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", ranks=2, microbatches=MICROBATCHES, loss=F.mse_loss, exact=True
    )
    path = "traces" if traced else "compilers"
    with pytest.warns(UserWarning, match=f"path that it has for {path}"):
        pipe.compile(x, target=target)
    assert torch.equal(
        pipe.step(x, target=target), eager_step(eager, F.mse_loss, ((x,), kwargs, target), 0)
    )
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.slow
def test_parts_of_one_flat_buffer_are_separate_parameters() -> None:
    """cuDNN's recurrent layers have such parameters; overlapping ones are refused (test_refused_models)."""

    def make() -> nn.Module:
        model = Layers()
        flat = torch.randn(2, WIDTH, WIDTH)
        for layer, weight in zip(model.layers, flat, strict=False):
            layer.weight = nn.Parameter(weight)
        return model

    assert_equals_eager(make, "1f1b")


def test_weights_changed_in_place_are_seen() -> None:
    model = Layers()
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", ranks=2, microbatches=MICROBATCHES, loss=F.mse_loss, exact=True
    )
    (x,), _, target = rows()
    pipe.compile(x, target=target)
    with torch.no_grad():
        model.layers[2].weight.mul_(2)  # type: ignore[operator, union-attr]
    model.layers[1].weight.data = torch.eye(WIDTH)  # type: ignore[union-attr]
    eager = copy.deepcopy(model)
    assert torch.equal(
        pipe.step(x, target=target), eager_step(eager, F.mse_loss, ((x,), {}, target), 0)
    )


class Copying(Layers):
    """Dropout of 0 is a copy. A copy next to its original decides in which order gradients are
    added."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.dropout(self.layers[0](x), 0.0))
        return self.layers[1](x.clone()) * x


@pytest.mark.slow
def test_copies() -> None:
    assert_equals_eager(Copying, "1f1b")


def test_a_transform_that_export_cannot_follow_is_named() -> None:
    class Differentiating(Layers):
        def forward(self, x: Tensor) -> Tensor:
            _, slope = torch.func.jvp(
                lambda y: torch.sin(self.layers[1](y)), (x,), (torch.ones_like(x),)
            )
            return super().forward(x + slope)

    pipe = zbcompile.pipeline(
        Differentiating(), schedule="1f1b", ranks=2, microbatches=2, loss=F.mse_loss
    )
    (x,), _, target = rows()
    with pytest.raises(
        zbcompile.CaptureError,
        match=r"Differentiating fails.*Write the transform of torch\.func out",
    ):
        pipe.step(x, target=target)
