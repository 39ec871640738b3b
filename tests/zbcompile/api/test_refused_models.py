"""Models that cannot be a pipeline: said precisely, before anything is lost in silence. On ranks:
test_bad_input.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate import DDP
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel

from tests.support.oracle import MLP, WIDTH
from tests.support.refused import ROWS, Refused, assert_refused, refusals, said, train
from zbcompile.passes.capture.model_checks import _WRAPPERS as WRAPPERS


class Through(MLP):
    """An MLP of two layers, with something between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(2)
        self.between, self.norm = between, nn.BatchNorm1d(WIDTH, momentum=None)
        self.register_buffer("kept", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.between(self, self.layers[0](x)))  # type: ignore[no-any-return]


def through(between: Callable[[Any, Tensor], Tensor]) -> None:
    train(Through(between))


def loss_that_trains() -> None:
    scale = nn.Parameter(torch.ones(WIDTH))
    train(loss=lambda output, target: F.mse_loss(output * scale, target))


def hook_for_all_modules() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        train()
    finally:
        handle.remove()


def grown_by_a_layer() -> None:
    pipe = train()
    pipe.model.layers.append(nn.Linear(WIDTH, WIDTH))
    pipe.step(ROWS, target=ROWS)


def flexible_attention(net: Any, x: Tensor) -> Tensor:
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, WIDTH, WIDTH, device="cpu")
    rows = x[:, None, :, None].expand(-1, 1, -1, 8).contiguous()
    return flex_attention(rows, rows, rows, block_mask=blocks)[:, 0, :, 0]  # type: ignore[index, return-value]


def over_some_rows(output: Tensor, target: Tensor) -> Tensor:
    saved = output[:, 0] > 0
    return F.cross_entropy(output[saved], target[saved].argmax(-1))


def clamped(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.layers[1].weight.clamp_(-0.3, 0.3)
    return x


def grown(net: Any, x: Tensor) -> Tensor:
    net.kept = torch.cat([net.kept, x.detach()])
    return x


@torch.library.custom_op("zbcompile_tests::no_way_back", mutates_args=())
def no_way_back(x: Tensor) -> Tensor:
    return x * 2


no_way_back.register_fake(torch.empty_like)


def converted() -> None:
    pipe = train()
    pipe.model.double()
    pipe.step(ROWS, target=ROWS)


def inference_mode() -> None:
    pipe = train()
    with torch.inference_mode():
        pipe.step(ROWS, target=ROWS)


def hooked() -> None:
    model: Any = MLP(2)
    model.layers[1].weight.register_post_accumulate_grad_hook(lambda _: None)
    train(model)


LAZY = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH))
DEPENDS = r"depends on (?:values of the|its) inputs \(.*\.py:\d+\)"
BETWEEN = {  # what stands between two layers
    rf"a value that {DEPENDS}.*Give a batch norm a momentum": lambda n, x: n.norm(x),
    rf"a value that {DEPENDS}.*torch\.where": lambda n, x: x if x.sum() > 0 else -x,
    rf"shape of a result {DEPENDS}.*mask": lambda n, x: x[x[:, 0] > 0],
    r"sets `requires_grad` of .*\.py:\d+": lambda n, x: n.layers[1].requires_grad_(False) and x,
    "test_refused.*FlexAttention.* not support backward on CPU.*on a GPU": flexible_attention,
    r"writes a parameter \(.*after the optimizer's step": clamped,
    r"replaces the buffer kept \(float32\[1, 32\]\) by float32\[3, 32\]": grown,
    r"no_way_back\.default but no autograd formula.*register_autograd": lambda n, x: no_way_back(x),
    "torch.export of Through fails": lambda n, x: torch.func.jvp(torch.sin, (x,), (ROWS[:2],))[1],
}
OF_CAPTURE: dict[str, Callable[[], object]] = {
    **{message: partial(through, between) for message, between in BETWEEN.items()},
    "tensor that requires a gradient, but is not a parameter.*detach it": loss_that_trains,
    "does not depend on a trained parameter": lambda: train(MLP(2).requires_grad_(False)),
    "forward_hooks for all modules.*silently lost": hook_for_all_modules,
    rf"shape of a result {DEPENDS}.*ignore_index": lambda: train(loss=over_some_rows),
    r"module 1 \(LazyLinear\) is lazy": lambda: train(LAZY),
    r"is a DataParallel.*Pass model\.module": lambda: train(nn.DataParallel(MLP(2))),
    r"forward of MLP, called with \(float32\[2, 16\]\), fails": lambda: train(x=ROWS[:, :16]),
    r"loss cross_entropy, called with .*\[2\]\), fails": lambda: train(
        target=torch.zeros(8), loss=F.cross_entropy
    ),
    r"'layers\.1\.weight'.*register_hook\(hook\)": hooked,
}
OF_PIPELINE = {
    r"parameter layers\.\d+\.\w+ is new since the model was compiled": grown_by_a_layer,
    r"was float32.* on (?:cpu|meta) .* is float64.*new pipeline|belongs to rank \d": converted,
    r"inside torch\.inference_mode": inference_mode,
}
OF_PARTITION = {
    r"'layers\.7', which is neither a module": lambda: train(balance=["layers.7"]),
    "memory=1 bytes per rank is too small": lambda: train(memory=1),
}
REFUSED = refusals(OF_PIPELINE, OF_CAPTURE, OF_PARTITION, {})


@pytest.mark.mostly_slow(every=8, suite=4)
@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused[1])
def test_in_one_process(refused: Refused) -> None:
    assert_refused(said(refused[2]), refused)


def test_wrappers_are_known_by_the_names_of_torchs_classes() -> None:
    classes = (nn.DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    classes = (*classes, torch.jit.ScriptModule, DDP, ReplicateModule)
    assert {cls.__name__ for cls in classes} == WRAPPERS.keys()
    assert all(cls.__module__.startswith("torch.") for cls in classes)
