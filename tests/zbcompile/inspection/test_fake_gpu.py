"""`--fake` for a GPU that is not there: the graphs are those of its kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zbcompile.compile
from zbcompile.inspect import main
from zbcompile.passes import gpu
from zbcompile.passes.graph.gpu_kernels import kernel_of
from zbcompile.passes.torch_private import FakeTensorMode, make_fx

TARGET = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        rows, tokens = x.shape[:2]
        q, k, v = self.qkv(x).view(rows, tokens, 3, 2, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + F.dropout(self.out(y), 0.1) + torch.arange(32, device=x.device)

class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x).float().square().mean()

def example(device=None):
    with torch.device(device) if device else torch.autocast("cpu", enabled=False):
        return Net(Block(), Block()).to(torch.bfloat16), (torch.ones(2, 8, 32, dtype=torch.bfloat16),)

def placed(): return example("cuda")
def moved():
    model, (x,) = example()
    return model.to("cuda"), (x.cuda(),)
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(TARGET)
    return tmp_path / "net.py"


def graphs(of: str, folder: Path, *options: str) -> str:
    assert main([of, "--fake", "--schedule", "zb-h1", "--graphs", str(folder), *options]) == 0
    return "".join(file.read_text() for file in sorted(folder.iterdir()))


@pytest.mark.slow
@pytest.mark.skipif(gpu.is_available(), reason="there is a GPU")
def test_graphs_are_those_of_the_gpu(target: Path, tmp_path: Path) -> None:
    """Dropout in one kernel, flash attention for CUDA, tensors made there; whoever says that the
    model is there."""
    found = graphs(f"{target}:example", tmp_path / "asked", "--device", "cuda")
    dropout, attention = "native_dropout", "_scaled_dot_product_flash_attention"
    for kernel in (dropout, f"{dropout}_backward", attention, f"{attention}_backward"):
        assert f"aten.{kernel}.default(" in found
    assert "_for_cpu" not in found
    assert graphs(f"{target}:placed", tmp_path / "placed") == found
    assert graphs(f"{target}:moved", tmp_path / "moved") == found


def test_a_device_is_that_of_fake_tensors(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{target}:example", "--device", "cuda"]) == 2
    assert "--device cuda places the fake tensors of --fake. Add --fake" in capsys.readouterr().err
    asked = (
        f"{target}:example",
        "--fake",
        "--device",
        "cuda",
        "--output",
        str(tmp_path / "program"),
    )
    assert zbcompile.compile.main(asked) == 2
    assert "compile where the program is to run" in capsys.readouterr().err


@pytest.fixture
def absent() -> Iterator[torch.device]:
    with FakeTensorMode():
        yield gpu.ABSENT


@pytest.mark.parametrize(
    ("dtype", "width", "mask", "kernel"),
    [
        (torch.bfloat16, 64, None, "_scaled_dot_product_flash_attention"),
        (torch.float32, 64, None, "_scaled_dot_product_efficient_attention"),
        (torch.bfloat16, 64, torch.bool, "_scaled_dot_product_efficient_attention"),
        (torch.bfloat16, 320, None, "_scaled_dot_product_efficient_attention"),
        (torch.bfloat16, 36, None, "bmm"),
    ],
)
def test_the_kernel_of_attention(
    dtype: torch.dtype, width: int, mask: torch.dtype | None, kernel: str, absent: torch.device
) -> None:
    """As torch documents its choice on CUDA."""
    operation = torch.ops.aten.scaled_dot_product_attention.default
    given = [torch.empty(2, 4, 8, width, dtype=dtype, device=absent) for _ in range(3)]
    bias = None if mask is None else torch.ones(8, 8, dtype=mask, device=absent)

    def attention(*values: Tensor) -> Tensor:
        result: Tensor = kernel_of(operation, values)(*values, bias)
        return result

    traced = make_fx(attention)(*given)
    assert f"aten.{kernel}.default(" in traced.code
    assert kernel_of(operation, (nn.Parameter(torch.ones(1)),)) is operation
