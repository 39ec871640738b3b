"""The split decides by bytes, exactly, and never at the price of a bit; a first stage is balanced like a middle one."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.split_bytes import CUTS, operands
from benchmarks.stages import Stage, compile_stages
from tests.support.middle_stage import ORDERS, compile_middle, eager_gradients, joint_of_middle, run_in_order
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.split.saved_bytes import crossing_of
from zbcompile.passes.split.split import apply, closure
from zbcompile.passes.split.subgraphs import Assignment
from zbcompile.passes.split.weight_cut import cut_weight, is_cheap

D = 8


class Layer(nn.Module):
    """A norm that is written out, and a linear layer behind an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(D))
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return self.linear(F.gelu(y))


def waiting(assignment: Assignment) -> int:
    crossing = crossing_of(assignment)
    return crossing.kept + crossing.residue


@pytest.mark.slow
def test_no_other_choice_waits_for_less() -> None:
    """Against every choice of operations that change sides."""
    plain = closure(joint_of_middle(Layer(), torch.randn(16, D)))
    cheap = [n for n in plain.joint.module.graph.nodes if is_cheap(n) and n in plain.nodes["W"]]
    found = waiting(apply(plain, cut_weight(plain)))
    assert found == min(waiting(apply(plain, early)) for early in _subsets(cheap))
    assert found < waiting(plain)


def _subsets(nodes: list[torch.fx.Node]) -> list[frozenset[torch.fx.Node]]:
    return [frozenset(chosen) for size in range(len(nodes) + 1) for chosen in combinations(nodes, size)]


@pytest.fixture(
    scope="module", params=["gpt", pytest.param("llama", marks=[pytest.mark.slow, pytest.mark.beyond_sample])]
)
def stages(request: pytest.FixtureRequest) -> list[Stage]:
    return compile_stages(request.param, 64, 64, 2, Choices(exact=True, balance=CUTS))


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
def test_a_first_stage_is_balanced_like_a_middle_one(stages: list[Stage]) -> None:
    first, middle, _ = (stage.program.flops for stage in stages)
    assert [first[name] for name in ("F", "B", "W")] == [middle[name] for name in ("F", "B", "W")]


@pytest.mark.slow
def test_only_the_operands_of_products_wait_for_w(stages: list[Stage]) -> None:
    for stage in stages:
        assert stage.program.crossing.residue <= 1.01 * operands(stage.program.pieces["W"])


class Dropping(nn.Module):
    """Dropouts of two kinds, one of them of a transposed value, in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.sin(x.bfloat16()).t(), 0.3)
        return torch.tanh(F.alpha_dropout(y, 0.2, True)).float()


def test_a_mask_waits_as_one_byte_per_element() -> None:
    """Besides the masks, B reads x, the stage's input, and sin's and tanh's values of two bytes."""
    torch.manual_seed(0)
    compiled = compile_middle(Dropping(), torch.randn(6, D))
    outputs = compiled.middle.pieces["F"].module.graph.output_node().args[0]
    masks = [node for node in outputs if str(node.target) == "aten.bernoulli.p" or node.name.startswith("permute")]
    assert [node.meta["val"].dtype for node in masks] == [torch.bool] * 2
    expected, found = eager_gradients(compiled), run_in_order(compiled, ORDERS["at once"])
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())  # type: ignore[arg-type]
