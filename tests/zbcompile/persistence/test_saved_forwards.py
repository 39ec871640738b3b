"""Programs that hold a forward: evaluation without the model's source."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
import zbcompile.compile
import zbcompile.inspect
from gpt import GPT, next_byte_loss
from zbcompile.cli.target import load_example

Error = zbcompile.PipelineError
TARGET = f"{__file__}:small"
PLAN = ["--schedule", "zb-h1", "--ranks", "2", "--microbatches", "4", "--output"]
inspect = zbcompile.inspect.main


def small() -> zbcompile.Example:
    """A GPT whose loss is a function of its output."""
    model = GPT(layers=1, width=16, heads=2, length=8, dropout=0.1, tied=True)
    tokens = torch.arange(16).view(2, 8) % 5
    return zbcompile.Example(model, (tokens,), loss=next_byte_loss, target=tokens)


@pytest.fixture(scope="module")
def full() -> tuple[nn.Module, Tensor, Tensor]:
    """The model of the target, two of its microbatches, and their log-probabilities in eager."""
    example = load_example(TARGET)
    tokens = torch.cat([example.args[0], example.args[0].flip(0)])
    with torch.no_grad():
        logp = torch.log_softmax(example.model.eval()(tokens), -1)
    return example.model, tokens, logp.gather(-1, tokens[..., None])[..., 0]


@pytest.mark.slow
def test_a_forward_alone(tmp_path: Path, full: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """No backward graph is in the directory; inspect reads it."""
    model, tokens, expected = full
    assert zbcompile.compile.main([TARGET, *PLAN, str(tmp_path), "--only", "log_probs"]) == 0
    assert not any('"BW"' in path.read_text() for path in tmp_path.glob("rank-*.json"))
    pipe = zbcompile.load(tmp_path, state_dict=model.state_dict())
    assert torch.equal(pipe.log_probs(tokens, labels=tokens), expected)
    short = tokens[:, :5]
    with pytest.raises(Error, match="does not divide into these"):
        pipe.log_probs(short, labels=short)
    with pytest.raises(Error, match="holds log_probs alone, and no step to train with"):
        pipe.step(tokens, target=tokens)
    with pytest.raises(Error, match="holds log_probs, and cannot compute eval"):
        pipe.eval(tokens)
    with pytest.raises(Error, match=r"microbatches\[0\] is .* \(args, kwargs, labels\)"):
        pipe.log_probs(microbatches=[((tokens,), {})])
    assert inspect([str(tmp_path)]) == 0
    assert "schedule      forward-only\nranks         2\n" in capsys.readouterr().out
    assert inspect([str(tmp_path), "--graphs", str(tmp_path / "graphs")]) == 0
    names = sorted(path.name for path in tmp_path.glob("*/*_*.py"))
    assert names == ["stage0_F.py", "stage1_F.py"]
    assert inspect([str(tmp_path), "--graph", "1.B"]) == 2
    assert "the program is a forward alone, which has no B" in capsys.readouterr().err


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"rows": self.layers(x), "count": x.shape[0]}


def counting() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Counting(), (torch.ones(2, 4),)


def test_numbers_are_those_of_one_microbatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch of several would have others; --vocab without an output layer to shard is refused."""
    arguments = [f"{__file__}:counting", "--only", "eval", *PLAN, str(tmp_path)]
    assert zbcompile.compile.main(arguments) == 0
    pipe = zbcompile.load(tmp_path, state_dict=Counting().state_dict())
    assert pipe.eval(torch.ones(2, 4))["count"] == 2
    with pytest.raises(Error, match=r"numbers that may depend on the rows.*Pass batches of 2,"):
        pipe.eval(torch.ones(4, 4))
    assert zbcompile.compile.main([*arguments, "--vocab", "1"]) == 2
    assert "--only eval has none. Leave --vocab out" in capsys.readouterr().err
