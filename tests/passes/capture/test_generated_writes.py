"""Generated forwards that write into views, detached tensors and buffers, inside and outside
no_grad: what eager runs has eager's loss, gradients and buffers, bit for bit, or is refused."""

import copy
import random
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.pass_graph_runner import run_uncut
from tests.support.training import assert_same_tensors
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.errors import CaptureError

COMPARED, LINES, MICROBATCHES = 4, 7, 2
VIEWS = (
    "[:, :2]",
    "[1:3]",
    ".T",
    ".view(-1)",
    "[0]",
    "[None]",
    ".diagonal()",
    ".detach()",
    ".data",
    ".clone()",
)
VALUES = (
    "torch.tanh({a})",
    "{a} + fit({b}, {a})",
    "{a} * fit({b}, {a})",
    "torch.where({a} > 0, {a}, fit({b}, {a}))",
)
WRITES = (
    *(
        "{a}.mul_(2)",
        "{a}.add_(fit({b}, {a}))",
        "{a}.copy_(fit({b}, {a}))",
        "{a}.clamp_(-1, 1)",
        "{a}.zero_()",
    ),
    *(
        "{a}.masked_fill_({a} > 0, 0.5)",
        "{a}[0] = 0.3",
        "{a}[..., :1] = fit({b}, {a})[..., :1]",
        "{a}.sigmoid_()",
    ),
    *(
        "{a}.lerp_(fit({b}, {a}), 0.5)",
        "{a}.index_add_(0, torch.tensor([0]), fit({b}, {a})[:1])",
        "{a}.fill_(0.5)",
    ),
    *(
        "torch._foreach_add_([{a}], [fit({b}, {a})])",
        "{a}.index_put_((torch.tensor([0]),), torch.ones(()))",
    ),
    *(
        "self.buffer = fit({a}, self.buffer).detach()",
        "self.buffer.add_(fit({a}, self.buffer).detach())",
    ),
)


def fit(source: Tensor, into: Tensor) -> Tensor:
    """`source` in the shape of `into`, and in memory of its own: a write into what it reads is
    undefined."""
    flat = source.reshape(-1)
    return flat.repeat(-(-into.numel() // flat.numel()))[: into.numel()].view(into.shape)


class Generator:
    """Lines of a forward; what was made last is read and written most."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = ["x", "self.buffer", "zeros", "z", "h"]
        self.lines: list[str] = []

    def name(self) -> str:
        return self.names[-1 - min(int(self.random.expovariate(0.5)), len(self.names) - 1)]

    def line(self, indent: str, depth: int = 0) -> None:
        a, b, kind = self.name(), self.name(), self.random.random()
        if kind < 0.4:
            self.write(indent, self.random.choice(WRITES).format(a=a, b=b))
        elif kind < 0.55 and depth < 2:
            self.write(
                indent, f"with torch.{self.random.choice(('no_grad', 'no_grad', 'enable_grad'))}():"
            )
            for _ in range(self.random.randint(1, 3)):
                self.line(f"    {indent}", depth + 1)
        else:
            form = self.random.choice(VALUES) if kind < 0.75 else "{a}" + self.random.choice(VIEWS)
            self.names.append(f"v{len(self.names)}")
            self.write(indent, f"{self.names[-1]} = {form.format(a=a, b=b)}")

    def write(self, indent: str, line: str) -> None:
        self.lines.append(indent + line)

    def forward(self) -> str:
        for _ in range(LINES):
            self.line("    ")
        read = {self.names[-1], *self.random.sample(self.names, 3)}
        terms = [
            f"({name} * torch.cos({name}.detach() + {i})).sum()"
            for i, name in enumerate(sorted(read))
        ]
        first = (
            "    x = x.clone()\n    h, z, zeros = self.layer(x), x @ self.weight, torch.zeros(4, 4)"
        )
        returned = f"    return (self.layer.bias * x).sum() + {' + '.join(terms)}"
        return "\n".join(["def forward(self, x):", first, *self.lines, returned])


def model_of(source: str) -> nn.Module:
    actual: dict[str, Any] = {}
    exec(source, {"torch": torch, "fit": fit}, actual)
    model = type("Generated", (nn.Module,), actual)()
    torch.manual_seed(0)
    model.layer, model.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
    model.register_buffer("buffer", torch.randn(4, 4))
    return model


Results = tuple[list[Tensor], dict[str, Tensor | None], Tensor]


def in_eager(model: nn.Module, inputs: list[Tensor]) -> Results | None:
    """Losses, gradients and buffer; None if eager itself refuses the model."""
    losses = []
    try:
        for x in inputs:
            losses.append(model(x.clone()))
            losses[-1].backward()
    except (RuntimeError, IndexError):
        return None
    return losses, {name: p.grad for name, p in model.named_parameters()}, model.buffer


def exported(model: nn.Module, inputs: list[Tensor]) -> Results:
    step = export_training_step(model, (inputs[0],), {})
    losses, sums = [], dict.fromkeys(name for name, _ in model.named_parameters())
    for x in inputs:
        result = run_uncut(step, model, ((x,), {}, None))
        losses += result.losses
        for name, gradient in result.gradients.items():
            sums[name] = gradient if sums[name] is None else sums[name] + gradient
        model.buffer.copy_(result.buffers["buffer"])
    return losses, sums, model.buffer


@pytest.mark.slow
def test_what_eager_runs_is_equal_or_refused() -> None:
    compared, refused = 0, []
    for seed in count():
        source = Generator(seed).forward()
        model = model_of(source)
        inputs = [torch.randn(4, 4) for _ in range(MICROBATCHES)]
        expected = in_eager(copy.deepcopy(model), inputs)
        if expected is None:
            continue
        try:
            actual = exported(model, inputs)
        except CaptureError as error:
            refused.append(str(error))
            continue
        for one, other, what in zip(actual, expected, ("loss", "gradients", "buffer"), strict=True):
            named = [{what: each} if isinstance(each, Tensor) else each for each in (one, other)]
            assert_same_tensors(*named, f"{source}\n{what}:")
        compared += 1
        if compared == COMPARED:
            break
    assert all("autograd does not see it" in text for text in refused), refused
