"""Python state that changes between steps: every step computes with what it is now, bit for bit,
and says what is new since the nearest program, or refuses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zbcompile
from tests.support.oracle import Batch, eager_step
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors, gradients_of
from tests.zbcompile.program_cache import changing
from tests.zbcompile.program_cache.changing import STEPS, WIDTH, Net, scaled
from zbcompile.passes.torch_private_hooks import forward_hook_tables


def pipeline_of(net: nn.Module, loss: Any = F.mse_loss, **more: Any) -> zbcompile.Pipeline:
    options = {"schedule": "1f1b", "ranks": 2, "microbatches": 2, "exact": True, **more}
    return zbcompile.pipeline(net, loss=loss, **options)


def batch(step: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def compare(pipe: zbcompile.Pipeline, net: nn.Module, loss: Any = F.mse_loss) -> None:
    """The next step equals eager's: loss, gradients and buffers. The net goes on from ours."""
    step, before = pipe.step_index, copy.deepcopy(dict(net.named_buffers()))
    ours = pipe.step(batch(step), target=batch(step))
    results, after = gradients_of(net), copy.deepcopy(dict(net.named_buffers()))
    net.zero_grad()
    for name, buffer in net.named_buffers():
        buffer.copy_(before[name])
    assert torch.equal(ours, eager_step(net, loss, Batch((batch(step),), {}, batch(step)), 2, step))
    assert_same_tensors(results, gradients_of(net), "gradient of")
    assert_same_tensors(after, dict(net.named_buffers()), "buffer")
    net.zero_grad()


def refuses(pipe: zbcompile.Pipeline, message: str, error: Any = zbcompile.CaptureError) -> None:
    with pytest.raises(error, match=message):
        pipe.step(batch(0), target=batch(0))


@pytest.fixture
def notices(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    return lambda: [x for x in capsys.readouterr().out.splitlines() if "compiling again" in x]


@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize("named", STEPS)
def test_a_change_is_seen(
    named: str, notices: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the next step; the steps before it, and after it, compute with what was there."""
    monkeypatch.setattr(changing, "TAU", 1.0)
    monkeypatch.setitem(changing.TABLE, "scale", 1.0)
    middle, change, loss_of = STEPS[named]
    net = Net(middle)
    loss = loss_of(net)
    pipe = pipeline_of(net, loss)
    compare(pipe, net, loss)
    exec(change, {"net": net, "loss": loss, "changing": changing, "nn": nn})
    compare(pipe, net, loss)
    compare(pipe, net, loss)
    (notice,) = notices()
    assert named in notice


@pytest.mark.slow
def test_autocast_the_default_dtype_and_a_new_shape_are_named(
    notices: Callable[[], list[str]],
) -> None:
    net = Net(lambda net, x: x * torch.finfo(torch.get_default_dtype()).bits)
    pipe = pipeline_of(net)
    compare(pipe, net)
    with torch.autocast("cpu", torch.bfloat16):
        compare(pipe, net)
    x = batch(2)
    try:
        torch.set_default_dtype(torch.float64)
        torch.testing.assert_close(pipe.step(x, target=x).float(), F.mse_loss(net(x), x).float())
    finally:
        torch.set_default_dtype(torch.float32)
    pipe.step(batch(0, 6), target=batch(0, 6))
    says = ("autocast: None -> torch.bfloat16 ", "default dtype: torch.float32 -> torch.float64 ")
    says += ("microbatches of args[0][3, 4], target[3, 4] ",)
    assert all(f"for {a}" in b for a, b in zip(says, notices(), strict=True))


@pytest.mark.slow
def test_an_old_program_comes_back_and_what_changes_often_is_better_a_tensor(
    notices: Callable[[], list[str]],
) -> None:
    net = Net(lambda net, x: x * net.alpha)
    pipe = pipeline_of(net)
    for net.alpha in (1.0, 2.0, 1.0, 3.0, 2.0, 4.0):
        compare(pipe, net)
    said = notices()
    assert ["pass it as a tensor" in line for line in said] == [False, False, True]
    assert "(change 3 of it; pass it as a tensor) (program 4" in said[2]


@pytest.mark.slow
def test_what_is_not_compared_counts_after_recompile() -> None:
    """A class attribute is read once."""

    class Scaled(Net):
        factor = 1.0

    net = Scaled(lambda net, x: x * net.factor)
    pipe = pipeline_of(net)
    compare(pipe, net)
    Scaled.factor = 2.0
    pipe.recompile()
    compare(pipe, net)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval(batch(1)), net(batch(1)))


seen: list[int] = []
calls = 0


def counts_in_a_global(net: Any, x: Tensor) -> Tensor:
    global calls
    calls += 1
    return x * calls


def counting_in_a_closure() -> Callable[[Any, Tensor], Tensor]:
    times = 1.0

    def counts(net: Any, x: Tensor) -> Tensor:
        nonlocal times
        times += 1.0
        return x * times

    return counts


def counts_deep_inside(net: Any, x: Tensor) -> Tensor:
    net.table["a"][0]["b"] += 1.0
    return x * net.table["a"][0]["b"]


def switches_a_mode(net: Any, x: Tensor) -> Tensor:
    x = net.drop(x)
    net.drop.training = False
    return x


class CountingLoss:
    calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output, target) * self.calls


WRITES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    r"model\.table": counts_deep_inside,
    r"\S+\.calls": counts_in_a_global,
    "times in the closure of": counting_in_a_closure(),
    r"model\.drop\.training": switches_a_mode,
    r"model\.recent": lambda n, x: n.recent.append(n.recent[-1] + 1) or x * n.recent[-1],
    r"model\.config\.tau": lambda n, x: (
        setattr(n.config, "tau", n.config.tau + 1) or x * n.config.tau
    ),
    r"model\.last": lambda n, x: setattr(n, "last", x) or x,
    r"\S+\.seen": lambda n, x: seen.append(1) or x,
    r"loss\.calls": scaled,
}


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("path", WRITES)
def test_what_forward_changes_is_traced_once_and_put_back_with_a_warning(
    path: str, notices: Callable[[], list[str]]
) -> None:
    """A step computes with what was there before it, and changes of it outside of forward compile
    nothing."""
    net: Any = Net(WRITES[path])
    net.table, net.drop.p = {"a": [{"b": 1.0}]}, 0.0
    loss = CountingLoss() if "loss" in path else F.mse_loss
    names, half = set(vars(net)), batch(0)[:2]
    x = torch.cat([half, half])
    pipe = pipeline_of(net, loss)
    with pytest.warns(UserWarning, match=f"forward changes {path}.*runs no Python"):
        ours = pipe.step(x, target=x)
    assert set(vars(net)) == names
    assert (net.drop.training, net.table, seen) == (True, {"a": [{"b": 1.0}]}, [])
    assert torch.equal(ours, loss(copy.deepcopy(net)(half), half))
    pipe.step(x, target=x)
    assert not notices()
    seen.clear()


@pytest.mark.parametrize(
    "middle",
    [
        lambda n, x: n.add_module(f"new{len(n._modules)}", nn.Identity()) or x * len(n._modules),
        lambda n, x: setattr(n.layers[0], "weight", nn.Parameter(n.layers[1].weight * 0.5)) or x,
        lambda n, x: x if n.layers[0].weight.grad is None else x * 2,
        lambda n, x: setattr(n.layers[0].weight, "grad", None) or x,
        lambda n, x: x * n.layers[0].weight._version,
    ],
    ids=["module", "parameter", "asks for a gradient", "removes it", "version"],
)
def test_what_forward_changes_of_the_model_is_refused(
    middle: Callable[[Net, Tensor], Tensor],
) -> None:
    refuses(pipeline_of(Net(middle)), "forward (replaces|writes|reads)")


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_the_node_that_accumulates_a_gradient_is_refused(late: bool) -> None:
    net = Net(scaled)
    weight, pipe = net.layers[0].weight, pipeline_of(net)
    if late:
        compare(pipe, net)
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr, operator]
    node.register_prehook(lambda *_: None)
    refuses(pipe, r"AccumulateGrad node on the parameter 'layers\.0\.weight'")


@pytest.mark.parametrize(
    "change", [lambda m: m._forward_hooks.clear(), lambda m: m.register_forward_hook(print)]
)
def test_a_hook_that_changes_hooks_is_refused_and_leaves_what_there_was(change: Any) -> None:
    """In eager mode each microbatch runs with others; every one was like the first."""
    net = Net(scaled)
    handle = net.layers[0].register_forward_hook(
        lambda module, args, output: change(module) and None, always_call=True
    )
    before = [dict(table) for table in forward_hook_tables(net.layers[0])]
    refuses(pipeline_of(net), r"forward changes the hooks of model\.layers\.0")
    assert [dict(table) for table in forward_hook_tables(net.layers[0])] == before
    handle.remove()
    compare(pipeline_of(net), net)


class Twice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        return results * 2 if func is F.linear else results


def test_a_function_mode_around_a_step_is_refused() -> None:
    """The mode of torch.device is allowed: it acts where tensors are made."""
    net = Net(scaled)
    pipe = pipeline_of(net)
    for _ in range(2):
        with torch.device("cpu"):
            compare(pipe, net)
        with Twice():
            refuses(pipe, "the torch function mode Twice is on")


def changed_on_one_rank() -> None:
    """A step, and another one after a change that the other rank does not make."""
    net = Net(lambda net, x: x * net.alpha)
    pipe = pipeline_of(net, ranks=None, timeout=10)
    pipe.step(batch(0), target=batch(0))
    net.alpha = 1.0 + dist.get_rank()
    pipe.step(batch(0), target=batch(0))


@pytest.mark.slow
def test_a_change_on_one_rank_ends_all(pool: Pool) -> None:
    for outcome in pool.outcomes(changed_on_one_rank):
        assert "model.alpha: 1.0 -> 2.0" in outcome.text
        assert outcome.error == "FaultError"


class Shifted(nn.Module):
    """A buffer behind a layer: a cut between them would have the same bytes as one behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x)) + self.shift
        return self.drop(x + 0.125 if self.training else x) * 2.0


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(
    "change", [lambda m: m.eval(), lambda m: m.requires_grad_(False), lambda m: m.drop.eval()]
)
def test_buffers_stay_on_their_stages(
    change: Callable[[Any], Any], notices: Callable[[], list[str]]
) -> None:
    """The cuts of a further program are not between a buffer and its stage; the change is named."""
    net = nn.Sequential(*(Shifted() for _ in range(4)))
    pipe = pipeline_of(net, schedule="zb-h1", ranks=3)
    compare(pipe, net)
    change(net[1])
    compare(pipe, net)
    (notice,) = notices()
    assert "for microbatches" not in notice


class Scaling:
    """A hook of modules and parameters with a number."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, *args: Any) -> Tensor:
        return args[-1] * self.factor


@pytest.mark.slow
def test_values_that_hooks_read_are_compared() -> None:
    net, scaling, factor = Net(scaled), Scaling(), 1.0
    net.layers[0].register_forward_hook(scaling)
    net.layers[1].weight.register_hook(lambda gradient: gradient * factor)  # type: ignore[operator, union-attr]
    pipe = pipeline_of(net)
    compare(pipe, net)
    scaling.factor = 2.0
    compare(pipe, net)
    factor = 2.0
    compare(pipe, net)


def test_layers_that_are_gone_are_named() -> None:
    """The other remedy, layers that forward skips, is among STEPS."""
    net = Net(scaled)
    pipe = pipeline_of(net)
    compare(pipe, net)
    net.layers = net.layers[:2]
    message = r"layers\.2\.(weight|bias) was there when the model .*self\.active"
    refuses(pipe, message, zbcompile.PipelineError)


@pytest.mark.slow
def test_evaluations_see_changes() -> None:
    net = Net(lambda net, x: x * net.alpha)
    pipe = pipeline_of(net)
    for net.alpha in (1.0, 2.0, 1.0):
        with torch.no_grad():
            torch.testing.assert_close(pipe.eval(batch(1)), net(batch(1)))


@pytest.mark.slow
@pytest.mark.beyond_sample
def test_functions_of_one_name_have_closures_and_defaults_of_their_own() -> None:
    def scaling(rate: float) -> Any:
        return lambda x, shift=0.0: x * rate + shift

    net: Any = Net(lambda net, x: net.second(net.function(x)))
    net.function, net.second = scaling(1.0), scaling(1.0)
    pipe = pipeline_of(net)
    compare(pipe, net)
    net.second.__closure__[0].cell_contents = 2.0
    compare(pipe, net)
    net.second.__defaults__ = net.function.__defaults__ = (1.0,)
    compare(pipe, net)
