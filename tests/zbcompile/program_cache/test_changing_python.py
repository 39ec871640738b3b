"""Python state that changes between steps: every step computes with what it is now, bit for bit, or
refuses."""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zbcompile
from tests.support.changing import ROWS, STEPS, WIDTH, Net, batch, eager, saved, scaled
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from zbcompile.passes.torch_private_hooks import forward_hook_tables


def pipeline_of(net: nn.Module, loss: Any = F.mse_loss) -> zbcompile.Pipeline:
    return zbcompile.pipeline(net, schedule="1f1b", ranks=2, microbatches=2, loss=loss, exact=True)


def compare(pipe: zbcompile.Pipeline, net: Net, loss: Any, step: int) -> None:
    """A step equals eager's: loss, gradients and buffers. The net goes on from ours."""
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    ours = pipe.step(batch(step), target=batch(step))
    results = {name: p.grad for name, p in net.named_parameters()}
    after = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.zero_grad()
    for name, buffer in net.named_buffers():
        buffer.copy_(buffers[name])
    theirs = eager(net, loss, batch(step), step)
    assert torch.equal(ours, theirs), f"{ours} and {theirs}"
    for name, parameter in net.named_parameters():
        one, second = results[name], parameter.grad
        assert (one is None) == (second is None), name
        assert one is None or second is None or torch.equal(one, second), name
    for name, buffer in net.named_buffers():
        assert torch.equal(after[name], buffer), name
    net.zero_grad()


@pytest.mark.mostly_slow(every=6, suite=2)
@pytest.mark.parametrize("name", STEPS)
def test_a_change_is_seen(name: str) -> None:
    """In the next step; the steps before it, and after it, compute with what was there."""
    case = STEPS[name]
    with contextlib.contextmanager(saved)():
        net, loss = Net(case.middle), case.loss()
        pipe = pipeline_of(net, loss)
        compare(pipe, net, loss, 0)
        case.change(net, loss)
        compare(pipe, net, loss, 1)
        compare(pipe, net, loss, 2)


@pytest.mark.slow
def test_the_notice_names_the_value_and_the_old_program_comes_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = Net(lambda net, x: net.drop(x))
    pipe = pipeline_of(net)
    for p in (0.1, 0.5, 0.1, 0.5, 0.1):
        net.drop.p = p
        compare(pipe, net, F.mse_loss, pipe.step_index)
    said = [line for line in capsys.readouterr().out.splitlines() if "compiling again" in line]
    assert len(said) == 1
    assert "model.drop.p: 0.1 -> 0.5 (program 2" in said[0]


def test_a_value_that_changes_often_is_better_a_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net(lambda net, x: x * net.alpha)
    pipe = pipeline_of(net)
    for step in range(4):
        net.alpha = 1.0 + step
        compare(pipe, net, F.mse_loss, step)
    said = [line for line in capsys.readouterr().out.splitlines() if "compiling again" in line]
    assert ["pass it as a tensor" in line for line in said] == [False, False, True]
    assert "for model.alpha: 3.0 -> 4.0 (change 3 of it; pass it as a tensor) (program 4" in said[2]


def test_what_is_not_compared_counts_after_recompile() -> None:
    """A class attribute is read once."""

    class Scaled(Net):
        factor = 1.0

    net = Scaled(lambda net, x: x * net.factor)  # type: ignore[attr-defined]
    pipe = pipeline_of(net)
    compare(pipe, net, F.mse_loss, 0)
    Scaled.factor = 2.0
    loss = pipe.step(batch(1), target=batch(1))
    assert not torch.equal(loss, eager(net, F.mse_loss, batch(1), 1))
    net.zero_grad()
    pipe.recompile()
    compare(pipe, net, F.mse_loss, 2)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval(batch(1)), net(batch(1)))


seen: list[int] = []


def counts(net: Any, x: Tensor) -> Tensor:
    net.active_calls = getattr(net, "active_calls", 0) + 1
    return x


def collects(net: Any, x: Tensor) -> Tensor:
    seen.append(1)
    return x


def keeps(net: Any, x: Tensor) -> Tensor:
    net.last = net.shift = x
    return x


def counts_in_a_list(net: Any, x: Tensor) -> Tensor:
    net.table["a"] = net.table["a"] + 1
    return x


def counts_deep_inside(net: Any, x: Tensor) -> Tensor:
    net.table["a"][0]["b"] += 1.0
    return x * net.table["a"][0]["b"]


def counts_in_a_deque(net: Any, x: Tensor) -> Tensor:
    net.recent.append(net.recent[-1] + 1.0)
    return x * net.recent[-1]


def counts_in_a_config(net: Any, x: Tensor) -> Tensor:
    net.config.tau += 1.0
    return x * net.config.tau


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


class CountingLoss:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output, target) * self.calls


calls = 0


@pytest.mark.parametrize(
    ("middle", "loss", "path"),
    [
        (counts_deep_inside, F.mse_loss, r"model\.table"),
        (counts_in_a_deque, F.mse_loss, r"model\.recent"),
        (counts_in_a_config, F.mse_loss, r"model\.config\.tau"),
        (counts_in_a_global, F.mse_loss, r"\S+\.calls"),
        (counting_in_a_closure(), F.mse_loss, "times in the closure of"),
        (scaled, CountingLoss(), r"loss\.calls"),
    ],
)
def test_a_count_of_forwards_is_traced_once_with_a_warning(
    middle: Callable[[Any, Tensor], Tensor], loss: Any, path: str
) -> None:
    """However often a capture runs forward, a step computes with the number from before it."""
    net: Any = Net(middle)
    net.table = {"a": [{"b": 1.0}]}
    half = batch(0)[: ROWS // 2]
    x = torch.cat([half, half])
    pipe = pipeline_of(net, loss)
    with pytest.warns(UserWarning, match=f"forward changes {path}.*runs no Python"):
        ours = pipe.step(x, target=x)
    assert torch.equal(ours, loss(net(half), half))


def switches_the_mode_of_a_layer(net: Any, x: Tensor) -> Tensor:
    x = net.drop(x)
    net.drop.training = False
    return x


@pytest.mark.parametrize(
    ("middle", "path"),
    [
        (counts, "model.active_calls"),
        (collects, "seen"),
        (keeps, "model.last"),
        (counts_in_a_list, "model.table"),
        (switches_the_mode_of_a_layer, "model.drop.training"),
    ],
)
def test_what_forward_changes_is_put_back_with_a_warning(
    middle: Callable[[Net, Tensor], Tensor], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And leaves the key: a change of it outside of forward compiles nothing."""
    net, before = Net(middle), copy.copy(seen)
    local = dict(vars(net), table=dict(net.table))
    pipe = pipeline_of(net)
    with pytest.warns(
        UserWarning, match=rf"forward changes \S*{path}\. A compiled step runs no Python"
    ):
        pipe.step(batch(0), target=batch(0))
    assert seen == before
    assert vars(net).keys() == local.keys()
    assert all(vars(net)[name] is local[name] for name in ("shift", "alpha"))
    assert net.table == local["table"]
    assert net.drop.training
    net.table["a"] += middle is counts_in_a_list
    pipe.step(batch(1), target=batch(1))
    assert "compiling again" not in capsys.readouterr().out


def adds_modules(net: Any, x: Tensor) -> Tensor:
    net.add_module(f"new{len(net._modules)}", nn.Identity())
    return x * len(net._modules)


def replaces_a_parameter(net: Any, x: Tensor) -> Tensor:
    net.layers[0].weight = nn.Parameter(net.layers[0].weight.detach() * 0.5)
    return x


def asks_for_a_gradient(net: Any, x: Tensor) -> Tensor:
    return x if net.layers[0].weight.grad is None else x * 2


def removes_a_gradient(net: Any, x: Tensor) -> Tensor:
    net.layers[0].weight.grad = None
    return x


def asks_for_a_version(net: Any, x: Tensor) -> Tensor:
    return x * net.layers[0].weight._version  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "middle",
    [
        adds_modules,
        replaces_a_parameter,
        asks_for_a_gradient,
        removes_a_gradient,
        asks_for_a_version,
    ],
)
def test_what_forward_changes_of_the_model_is_refused(
    middle: Callable[[Net, Tensor], Tensor],
) -> None:
    with pytest.raises(zbcompile.CaptureError, match=r"forward (replaces|writes|reads)"):
        pipeline_of(Net(middle)).step(batch(0), target=batch(0))


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("change", ["frozen", "autocast", "closure", "partial"])
def test_what_is_in_the_key_compiles_again(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    factor = 2.0

    def loss(output: Tensor, target: Tensor, power: float) -> Tensor:
        return ((output - target).abs() ** power).mean() * factor

    net, judge = Net(scaled), functools.partial(loss, power=2.0)
    pipe = pipeline_of(net, judge)
    compare(pipe, net, judge, 0)
    net.layers[0].bias.requires_grad_(change != "frozen")
    factor = 3.0 if change == "closure" else factor
    judge.keywords["power"] = 3.0 if change == "partial" else 2.0
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        compare(pipe, net, judge, 1)
    assert capsys.readouterr().out.count("compiling again for") == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_the_node_that_accumulates_a_gradient_is_refused(late: bool) -> None:
    net = Net(scaled)
    weight, pipe = net.layers[0].weight, pipeline_of(net)
    if late:
        pipe.step(batch(0), target=batch(0))
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr, operator]
    node.register_prehook(lambda *_: None)
    with pytest.raises(
        zbcompile.CaptureError, match=r"AccumulateGrad node on the parameter 'layers\.0\.weight'"
    ):
        pipe.step(batch(0), target=batch(0))


def removes_itself(module: Any, args: Any, output: Tensor) -> Tensor:
    module._forward_hooks.clear()
    return output * 2


def registers_another(module: nn.Module, args: Any, output: Tensor) -> None:
    module.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("hook", [removes_itself, registers_another])
def test_a_hook_that_changes_hooks_is_refused(hook: Callable[..., Any]) -> None:
    """In eager mode each microbatch runs with others; every one was like the first. A refusal
    leaves what there was."""
    net = Net(scaled)
    handle = net.layers[0].register_forward_hook(hook, always_call=True)
    before = [dict(table) for table in forward_hook_tables(net.layers[0])]
    with pytest.raises(
        zbcompile.CaptureError, match=r"forward changes the hooks of model\.layers\.0"
    ):
        pipeline_of(net).step(batch(0), target=batch(0))
    assert [dict(table) for table in forward_hook_tables(net.layers[0])] == before
    handle.remove()
    compare(pipeline_of(net), net, F.mse_loss, 0)


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
            compare(pipe, net, F.mse_loss, 0)
        with (
            Twice(),
            pytest.raises(zbcompile.CaptureError, match="the torch function mode Twice is on"),
        ):
            pipe.step(batch(0), target=batch(0))


def changed_on_one_rank(replicas: int) -> None:
    """A step, and another one after a change that the other rank does not make."""
    net = Net(lambda net, x: x * net.alpha)
    mesh = mesh_of(dp=replicas, pp=2 // replicas)
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "timeout": 10}
    pipe = zbcompile.pipeline(net, mesh=mesh, loss=F.mse_loss, **options)
    pipe.step(batch(0), target=batch(0))
    net.alpha = 1.0 + dist.get_rank()
    pipe.step(batch(0), target=batch(0))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.beyond_sample)])
def test_a_change_on_one_rank_ends_all(replicas: int, pool: Pool) -> None:
    for outcome in pool.outcomes(changed_on_one_rank, replicas):
        named = (
            "model.alpha: 1.0 -> 2.0" if replicas == 1 else "values that forward reads in Python"
        )
        assert named in outcome.text
        assert outcome.error == ("FaultError" if replicas == 1 else "PipelineError")


class Shifted(nn.Module):
    """A buffer behind a layer: a cut between them would have the same bytes as one behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x)) + self.shift
        return self.drop(x + 0.125 if self.training else x) * 2.0


@pytest.mark.mostly_slow(every=4, suite=1)
@pytest.mark.parametrize("change", ["dropout", "frozen", "eval", "replaced"])
def test_buffers_stay_on_their_stages(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The cuts of a further program are not between a buffer and its stage; the change is named."""
    net: Any = nn.Sequential(*(Shifted() for _ in range(4)))
    options: dict[str, Any] = {"schedule": "zb-h1", "ranks": 3, "microbatches": 2}
    pipe = zbcompile.pipeline(net, loss=F.mse_loss, exact=True, **options)
    compare(pipe, net, F.mse_loss, 0)
    if change == "dropout":
        net[1].drop.p = 0.5
    elif change == "frozen":
        net[0].requires_grad_(False)
    elif change == "replaced":
        net[1].drop = nn.Dropout(0.5)
    else:
        net[1].eval()
    compare(pipe, net, F.mse_loss, 1)
    output = capsys.readouterr().out
    assert "compiling again for" in output
    assert "compiling again for microbatches" not in output


class Scaling:
    """A hook of modules and parameters with a number."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, *args: Any) -> Tensor:
        return args[-1] * self.factor


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("kind", ["module", "parameter"])
@pytest.mark.parametrize("form", ["object", "closure"])
def test_values_that_hooks_read_are_compared(kind: str, form: str) -> None:
    net, scaling = Net(scaled), Scaling()
    factor = 1.0
    hook = scaling if form == "object" else lambda *args: args[-1] * factor
    if kind == "module":
        net.layers[1].register_forward_hook(hook)
    else:
        net.layers[1].weight.register_hook(hook)  # type: ignore[union-attr]
    pipe = pipeline_of(net)
    compare(pipe, net, F.mse_loss, 0)
    scaling.factor = factor = 2.0
    compare(pipe, net, F.mse_loss, 1)


def test_layers_that_are_gone_are_named() -> None:
    """The other remedy, layers that forward skips, is among STEPS."""
    net = Net(scaled)
    pipe = pipeline_of(net)
    pipe.step(batch(0), target=batch(0))
    net.layers = net.layers[:2]
    message = r"layers\.2\.(weight|bias) was there when the model .*self\.active"
    with pytest.raises(zbcompile.PipelineError, match=message):
        pipe.step(batch(0), target=batch(0))


def test_the_default_dtype_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    net, x = Net(lambda net, x: x * torch.finfo(torch.get_default_dtype()).bits), batch(1)
    pipe = pipeline_of(net)
    compare(pipe, net, F.mse_loss, 0)
    try:
        torch.set_default_dtype(torch.float64)
        loss, expected = pipe.step(x, target=x), eager(net, F.mse_loss, x, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(loss, expected, check_dtype=False)
    assert (
        "compiling again for default dtype: torch.float32 -> torch.float64"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_evaluations_and_log_probabilities_see_changes() -> None:
    net = Net(lambda net, x: x * net.alpha)
    pipe, labels = pipeline_of(net), torch.tensor([0, 1, 2, 3])
    pipe.step(batch(0), target=batch(0))
    for net.alpha in (1.0, 2.0, 1.0):
        with torch.no_grad():
            expected = net(batch(1))
        torch.testing.assert_close(pipe.eval(batch(1)), expected)
        torch.testing.assert_close(
            pipe.log_probs(batch(1), labels=labels), expected.log_softmax(-1)[range(4), labels]
        )


def test_functions_of_one_name_have_closures_and_defaults_of_their_own() -> None:
    def scaling(rate: float) -> Any:
        return lambda x, shift=0.0: x * rate + shift

    net: Any = Net(lambda net, x: net.second(net.function(x)))
    net.function, net.second = scaling(1.0), scaling(1.0)
    pipe = pipeline_of(net)
    compare(pipe, net, F.mse_loss, 0)
    net.second.__closure__[0].cell_contents = 2.0
    compare(pipe, net, F.mse_loss, 1)
    net.second.__defaults__ = (1.0,)
    compare(pipe, net, F.mse_loss, 2)
    net.function.__defaults__ = (1.0,)
    compare(pipe, net, F.mse_loss, 3)


def test_a_capture_leaves_containers_that_others_share() -> None:
    net: Any = Net(lambda net, x: x * net.table["w"][0])
    net.table = {"w": net.numbers}
    pipe = pipeline_of(net)
    compare(pipe, net, F.mse_loss, 0)
    net.numbers[0] = 3.0
    compare(pipe, net, F.mse_loss, 1)


def test_a_loss_may_read_the_model() -> None:
    net = Net(scaled)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * net.alpha + net.layers[0].weight.square().sum()  # type: ignore[union-attr, operator]

    pipe = pipeline_of(net, loss)
    for step, net.alpha in enumerate((1.0, 2.0)):
        compare(pipe, net, loss, step)
