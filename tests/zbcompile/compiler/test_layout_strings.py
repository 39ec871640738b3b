"""Pipeline layouts of Megatron-LM: read as it reads them, and run, empty stages included, with
eager's bits."""

import pytest
import torch
from torch import nn

import zbcompile
from tests.support.oracle import Batch, eager_step
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.layout_strings import cuts_of_layout, stages_of_layout


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*29,m|L", ("Ettt", *["tt"] * 29, "m", "L")),
        ("Et*3|(tt|)*29m|L", ("Ettt", *["tt"] * 29, "m", "L")),
        ("E|(t|)*2L", ("E", "t", "t", "L")),
        ("Ett||ttL", ("Ett", "", "ttL")),
        ("E|t*2|(t|tt|)*2 tL", ("E", "tt", "t", "tt", "t", "tt", "tL")),
    ],
)
def test_layouts_are_read(text: str, stages: tuple[str, ...]) -> None:
    assert stages_of_layout(text) == stages


@pytest.mark.parametrize("text", ["Et|tE|L", "tt|t", "Et|x|L", "Et|L|t", "(tt|*3L"])
def test_what_is_no_layout(text: str) -> None:
    with pytest.raises(ValueError, match="expected E, then t for each layer"):
        stages_of_layout(text)


def test_a_layout_too_long_is_refused_before_it_is_made() -> None:
    with pytest.raises(ValueError, match="at most 100,000 letters"):
        stages_of_layout("(t|)*99999999999L")


def test_a_typo_in_a_layout_is_explained_as_one() -> None:
    with pytest.raises(
        zbcompile.PipelineError, match=r"balance='Et\|tt\|L\*2'; expected E, then t for each layer"
    ):
        zbcompile.pipeline(Net(), ranks=2, balance="Et|tt|L*2")


def test_a_cut_is_named_by_what_stands_behind_it() -> None:
    assert cuts_of_layout("Et|||tm|L") == (*("layout:t1/2",) * 3, "layout:L/2")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def held(pipe: zbcompile.Pipeline) -> list[set[str]]:
    return [
        {name.removesuffix(".weight") for name in s.parameters if "weight" in name}
        for s in pipe.program.stages
    ]


def test_a_layout_cuts_the_model() -> None:
    """An empty stage hands on what it gets."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    torch.manual_seed(0)
    model, eager = Net(), Net()
    eager.load_state_dict(model.state_dict())
    options = {"balance": "Et|t||tt|L", "schedule": "1f1b", "ranks": 5, "microbatches": 4}
    pipe = zbcompile.pipeline(model, loss=nn.functional.mse_loss, exact=True, **options)  # type: ignore[call-overload]
    pipe.step(x, target=y)
    assert held(pipe) == [
        {"embed", "layers.0.0"},
        {"layers.1.0"},
        set(),
        {"layers.2.0", "layers.3.0"},
        {"head"},
    ]
    eager_step(eager, nn.functional.mse_loss, Batch((x,), {}, y), 4, 0)
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, eager.get_parameter(name).grad), name


def test_layers_are_counted() -> None:
    pipe = zbcompile.pipeline(
        Net(), loss=nn.functional.mse_loss, schedule="1f1b", ranks=2, balance="Ett|tL"
    )
    with pytest.raises(
        PartitionError, match=r"has 3 layers \(t\), and the model runs 4: layers.0 to layers.3"
    ):
        pipe.step(torch.zeros(4, 4), target=torch.zeros(4, 4))
