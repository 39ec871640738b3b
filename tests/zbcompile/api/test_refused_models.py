"""Models that cannot be a pipeline: said precisely, in one process and on every rank, and nothing
hangs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate import DDP
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel

import zbcompile
from tests.support.oracle import MLP, WIDTH
from tests.support.pool import Pool
from tests.support.refused import CAPTURE, PARTITION, PIPELINE, ROWS, Refused, train
from zbcompile.passes.capture.model_checks import _WRAPPERS as WRAPPERS

# Lost in silence, if it were not refused


def loss_that_trains() -> None:
    scale = nn.Parameter(torch.ones(WIDTH))
    train(MLP(), loss=lambda output, target: F.mse_loss(output * scale, target))


def all_frozen() -> None:
    train(MLP().requires_grad_(False))


def hook_for_all_modules() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        train(MLP())
    finally:
        handle.remove()


def freezes_while_it_runs() -> None:
    class Freezing(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.layers[1].requires_grad_(False)
            return super().forward(x)

    train(Freezing(2))


# What no graph can say


def layer_added_after_the_first_step() -> None:
    pipe = train(MLP())
    pipe.model.layers.append(nn.Linear(WIDTH, WIDTH))
    pipe.step(ROWS, target=ROWS)


def data_dependent_control_flow() -> None:
    class Branching(MLP):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            return result if result.sum() > 0 else -result

    train(Branching())


def shape_from_data() -> None:
    class Picking(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            return super().forward(x[x[:, 0] > 0])

    train(Picking(2))


def derivative_along_an_input() -> None:
    class Derived(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](torch.func.jvp(torch.sin, (self.layers[0](x),), (x,))[1])  # type: ignore[no-any-return]

    train(Derived(2))


def flexible_attention() -> None:
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, WIDTH, WIDTH, device="cpu")

    class Flexible(MLP):
        def forward(self, x: Tensor) -> Tensor:
            rows = super().forward(x)[:, None, :, None].expand(-1, 1, -1, 8).contiguous()
            return flex_attention(rows, rows, rows, block_mask=blocks)[:, 0, :, 0]  # type: ignore[index,union-attr]

    train(Flexible(2))


def loss_over_some_rows() -> None:
    def over_some(output: Tensor, target: Tensor) -> Tensor:
        saved = output[:, 0] > 0
        return F.cross_entropy(output[saved], target[saved].argmax(-1))

    train(MLP(2), loss=over_some)


def lazy() -> None:
    train(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH)))


def wrapped() -> None:
    train(nn.DataParallel(MLP(2)))


def changes_a_parameter() -> None:
    class Clamping(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layers[1].weight.clamp_(-0.3, 0.3)  # type: ignore[operator, union-attr]
            return super().forward(x)

    train(Clamping(2))


def grows_a_buffer() -> None:
    class Growing(MLP):
        def __init__(self) -> None:
            super().__init__(2)
            self.register_buffer("kept", torch.zeros(1, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.kept = torch.cat([self.kept, x.detach()])
            return super().forward(x)

    train(Growing())


# What has no gradient


@torch.library.custom_op("zbcompile_tests::no_way_back", mutates_args=())
def no_way_back(x: Tensor) -> Tensor:
    return x * 2


no_way_back.register_fake(torch.empty_like)


def operation_without_a_derivative() -> None:
    class OneWay(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(no_way_back(self.layers[0](x)))

    train(OneWay(2))


# Batches and weights that do not fit


def wrong_width() -> None:
    train(MLP(2), ROWS[:, : WIDTH // 2])


def wrong_target() -> None:
    pipe = zbcompile.pipeline(
        MLP(2), schedule="1f1b", microbatches=4, loss=nn.functional.cross_entropy, ranks=2
    )
    pipe.step(ROWS, target=torch.zeros(8))


def converted_after_compiling() -> None:
    model = MLP(2)
    pipe = train(model)
    model.double()
    pipe.step(ROWS, target=ROWS)


def inference_mode() -> None:
    pipe = train(MLP(2))
    with torch.inference_mode():
        pipe.step(ROWS, target=ROWS)


# Cuts and limits that cannot be


def unknown_cut() -> None:
    train(MLP(2), balance=["layers.7"])


def little_memory() -> None:
    train(MLP(2), memory=1)


class Through(MLP):
    """An MLP of two layers, with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__(2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.between(self.layers[0](x)))  # type: ignore[no-any-return]


def average_of_all_batches() -> None:
    train(Through(nn.BatchNorm1d(WIDTH, momentum=None)))


REFUSED = (
    Refused(
        average_of_all_batches,
        CAPTURE,
        r"reads a value that depends on its inputs \(.*Give a batch norm a momentum",
    ),
    Refused(
        loss_that_trains,
        CAPTURE,
        r"reads a tensor that requires a gradient, but is not a parameter.*detach it",
    ),
    Refused(
        data_dependent_control_flow,
        CAPTURE,
        r"reads a value that depends on its inputs \(.*torch\.where",
    ),
    Refused(
        layer_added_after_the_first_step,
        PIPELINE,
        r"parameter layers\.\d+\.\w+ is new since the model was compiled",
    ),
    Refused(
        all_frozen, CAPTURE, r"does not depend on a trained parameter: there is nothing to train"
    ),
    Refused(hook_for_all_modules, CAPTURE, r"forward_hooks for all modules.*silently lost"),
    Refused(freezes_while_it_runs, CAPTURE, r"sets `requires_grad` of a parameter \(.*\.py:\d+\)"),
    Refused(
        shape_from_data,
        CAPTURE,
        r"shape of a result depends on values of the inputs \(.*\.py:\d+\).*mask",
    ),
    Refused(
        flexible_attention,
        CAPTURE,
        r"test_refused.*FlexAttention does not support backward on CPU.*Train on a GPU",
    ),
    Refused(
        loss_over_some_rows,
        CAPTURE,
        r"shape of a result depends on values of the inputs \(.*\.py:\d+\).*ignore_index",
    ),
    Refused(lazy, CAPTURE, r"module 1 \(LazyLinear\) is lazy"),
    Refused(
        wrapped,
        CAPTURE,
        r"the model itself.* is a DataParallel, which cannot be captured\. Pass model\.module",
    ),
    Refused(
        changes_a_parameter, CAPTURE, r"forward writes a parameter \(.*after the optimizer's step"
    ),
    Refused(
        grows_a_buffer,
        CAPTURE,
        r"replaces the buffer kept \(float32\[1, 32\]\) by float32\[3, 32\]",
    ),
    Refused(
        operation_without_a_derivative,
        CAPTURE,
        r"no_way_back\.default but no autograd formula.*register_autograd",
    ),
    Refused(
        wrong_width,
        CAPTURE,
        r"forward of MLP, called with \(float32\[2, 16\]\), fails .*same reduction dim",
    ),
    Refused(
        wrong_target,
        CAPTURE,
        r"the loss cross_entropy, called with \(float32\[2, 32\], float32\[2\]\), fails",
    ),
    Refused(
        converted_after_compiling,
        PIPELINE,
        r"was float32\[32, 32\] on (?:cpu|meta) .* is float64.*new pipeline|belongs to rank \d",
    ),
    Refused(inference_mode, PIPELINE, r"inside torch\.inference_mode"),
    Refused(unknown_cut, PARTITION, r"names 'layers\.7', which is neither a module that"),
    Refused(derivative_along_an_input, CAPTURE, r"torch\.export of Derived fails"),
    Refused(little_memory, PARTITION, r"memory=1 bytes per rank is too small"),
)


@pytest.mark.mostly_slow(every=9, suite=3)
@pytest.mark.parametrize("refused", REFUSED, ids=str)
def test_in_one_process(refused: Refused) -> None:
    refused.here()


ON_RANKS = [each for i, each in enumerate(REFUSED) if each.error != CAPTURE or i % 4 == 0]


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize("refused", ON_RANKS, ids=str)
def test_on_every_rank(refused: Refused, pool: Pool) -> None:
    refused.everywhere(pool)


# Hooks that run when autograd adds to `.grad`: a compiled stage would lose them in silence


def hooked() -> None:
    model = MLP()
    model.layers[2].weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[union-attr, operator]
    train(model)


def test_hooks_on_accumulated_gradients(pool: Pool) -> None:
    with pytest.raises(
        zbcompile.CaptureError, match=r"'layers\.2\.weight'.*register_hook\(hook\)"
    ) as caught:
        hooked()
    assert [(o.error, o.text) for o in pool.outcomes(hooked)] == [
        ("CaptureError", str(caught.value))
    ] * 2


def test_wrappers_are_known_by_the_names_of_torchs_classes() -> None:
    classes = (
        *(
            nn.DataParallel,
            DistributedDataParallel,
            FullyShardedDataParallel,
            FSDPModule,
            torch.jit.ScriptModule,
        ),
        *(DDP, ReplicateModule),
    )
    assert {cls.__name__ for cls in classes} == WRAPPERS.keys()
    assert all(cls.__module__.startswith("torch.") for cls in classes)
