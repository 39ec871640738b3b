"""In-place writes that autograd sees in part: gradients are eager's, or the write is refused by its line."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.middle_stage import ORDERS, compile_middle, eager_gradients, run_in_order
from tests.support.training import assert_same_tensors
from zbcompile.passes.capture.export import capture
from zbcompile.passes.errors import CaptureError


class Writes(nn.Module):
    """Differentiable values written into tensors without gradients, whole and in part; a mask written under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weights[0]
        with torch.no_grad():
            positions, mask = torch.sin(h), torch.zeros_like(h)
            mask[:, 1:] = 1
        positions += h @ self.weights[1]
        part = torch.cos(h).detach()
        part[:, 2].mul_((h @ self.weights[2])[:, 2])
        constant = torch.exp(h).detach()
        constant.clamp_(max=2.0)
        return torch.tanh(h * mask + positions + part + constant @ self.weights[3])


class Overwrites(Writes):
    """Parameters' values written under no_grad; what was overwritten, whole, in a diagonal and transposed."""

    def forward(self, x: Tensor) -> Tensor:
        h, lost, square = x @ self.weights[0], x @ self.weights[1], x @ self.weights[2] @ x.T
        plain, listed = torch.zeros_like(h), torch.zeros_like(h)
        with torch.no_grad():
            plain[:, :4] = (x @ self.weights[3])[:, :4]
            torch._foreach_add_([listed], [x @ self.weights[3]])
        lost.copy_(plain)
        square.fill_diagonal_(0.0)
        turned = torch.exp(h).detach().T
        turned.masked_fill_(turned > 1, 0.5)
        return torch.tanh(h * turned.mean(0)[:, None] + lost + listed + square @ x)


class Mapped(Writes):
    """A mask made under vmap, as transformers makes some, beside a write into what was detached."""

    def forward(self, x: Tensor) -> Tensor:
        one, rows = torch.ones((), dtype=torch.bool), torch.arange(8)
        mask = torch.vmap(lambda i: torch.vmap(lambda j: (i >= j) & i.new_ones((), dtype=one.dtype))(rows))(rows)
        h = (x @ self.weights[0]).detach().mul_(2) + x @ self.weights[1]
        return torch.tanh(h @ self.weights[2] @ (self.weights[3] * mask))


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize("model", [Writes, Overwrites, Mapped])
def test_gradients_around_writes_are_eagers(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    compiled = compile_middle(model(), torch.randn(4, 8))
    expected = eager_gradients(compiled)
    found = run_in_order(compiled, ORDERS["delayed"])
    assert_same_tensors(found, expected, "gradient of")


def _under_no_grad(h: Tensor, z: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(2)
    return h * z


def _constant_through_data(h: Tensor, z: Tensor) -> Tensor:
    h.data.mul_(2)
    return h * z


def _of_both(h: Tensor, z: Tensor) -> Tensor:
    alias = h.detach()
    alias += z
    return h + torch.sin(alias)


class Around(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.write = nn.Linear(8, 8), nn.Linear(8, 8), write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.first(x) + 1, self.second(x)).square().mean()


def _as_a_list(h: Tensor, z: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_clamp_max_([h, z], 0.1)
    return h * z


@pytest.mark.parametrize("write", [_under_no_grad, _constant_through_data, _of_both, _as_a_list])
def test_a_write_that_gradients_do_not_follow_is_refused_by_its_line(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"(?s)test_detached_writes.*in place where autograd does not see it"):
        capture(Around(write), (torch.randn(4, 8),), {})


def test_such_a_write_in_the_loss_names_the_loss() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        output.data.mul_(2)
        return nn.functional.mse_loss(output, target)

    with pytest.raises(CaptureError, match=r"^loss\(output, target\) writes in place"):
        capture(nn.Linear(8, 8), (torch.randn(4, 8),), {}, torch.randn(4, 8), loss)


def _asserted(h: Tensor, z: Tensor) -> Tensor:
    mask = torch.ones_like(h).detach()
    mask[0] = 0
    torch._check_tensor_all(h.isfinite())
    return h * mask * z


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="torch 2.11 cannot trace such an assertion")
def test_a_number_that_is_only_asserted_may_stay_open() -> None:
    assert capture(Around(_asserted), (torch.randn(4, 8),), {}).guards is None
