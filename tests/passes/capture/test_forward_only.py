"""Evaluation: the forward in stages has eager's bits, and keeps the parameters' stages."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPT, next_byte_loss
from tests.support.pass_graph_runner import Batch, run_forward
from zbcompile.passes.compile_step import compile_forward, compile_step


def text() -> Batch:
    tokens = torch.randint(256, (2, 16))
    return (tokens,), {}, tokens


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=4, width=32, length=16, dropout=0.1, tied=True)


def test_outputs_in_eval_mode(model: nn.Module) -> None:
    batch = text()
    compiled = compile_forward(model, *batch, ranks_of=range(4))
    assert [label.kind for label in compiled.passes] == ["F"] * 4
    assert model.training
    output = run_forward(compiled, model, batch)
    with torch.no_grad():
        assert torch.equal(output, copy.deepcopy(model).eval()(*batch[0]))


def test_the_stages_of_a_training_step_are_kept(model: nn.Module) -> None:
    batch = text()
    training = compile_step(model, *batch, next_byte_loss, ranks_of=range(4))
    compiled = compile_forward(model, *batch, ranks_of=range(4), owners=training.owners)
    assert compiled.owners == training.owners


def test_log_probabilities_of_labels(model: nn.Module) -> None:
    def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]

    batch = text()
    compiled = compile_forward(model, *batch, log_probs, ranks_of=(0, 1))
    output = run_forward(compiled, model, batch)
    with torch.no_grad():
        expected = log_probs(copy.deepcopy(model).eval()(*batch[0]), batch[2])
    assert torch.equal(output, expected)


def test_outputs_of_any_structure() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Any:
            hidden = []
            for layer in self.layers:
                x = F.relu(self.norm(layer(x)))
                hidden.append(x)
            return {"hidden": tuple(hidden), "input": x, "name": "output"}

    model = Model()
    batch: Batch = ((torch.randn(4, 8),), {}, None)
    output = run_forward(compile_forward(model, *batch, ranks_of=(0, 1)), model, batch)
    expected = copy.deepcopy(model).eval()(*batch[0])
    assert output["name"] == "output"
    assert all(map(torch.equal, output["hidden"], expected["hidden"]))
