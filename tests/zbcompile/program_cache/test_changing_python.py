"""Python state that changes between steps: every step computes with what it is now, bit for bit, or refuses."""

import contextlib
import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, strategies
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zbcompile
from tests.support import shared_captures
from tests.support.changing import ROWS, STEPS, Net, batch, eager, saved, scaled
from tests.support.generated import examples
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from zbcompile.passes.torch_private import forward_hook_tables


@pytest.fixture(autouse=True)
def _captured_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether two models are captured alike is the question here."""
    monkeypatch.setattr(shared_captures, "sketch", lambda *given: None)


def pipeline_of(net: nn.Module, loss: Any = F.mse_loss) -> zbcompile.Pipeline:
    return zbcompile.pipeline(net, schedule="1f1b", ranks=2, microbatches=2, loss=loss, exact=True)


def compare(pipe: zbcompile.Pipeline, net: Net, loss: Any, step: int) -> None:
    """A step equals eager's: loss, gradients and buffers. The net goes on from ours."""
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    ours = pipe.step(batch(step), target=batch(step))
    found = {name: p.grad for name, p in net.named_parameters()}
    after = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.zero_grad()
    for name, buffer in net.named_buffers():
        buffer.copy_(buffers[name])
    theirs = eager(net, loss, batch(step), step)
    assert torch.equal(ours, theirs), f"{ours} and {theirs}"
    for name, parameter in net.named_parameters():
        one, other = found[name], parameter.grad
        assert (one is None) == (other is None), name
        assert one is None or other is None or torch.equal(one, other), name
    for name, buffer in net.named_buffers():
        assert torch.equal(after[name], buffer), name
    net.zero_grad()


@pytest.mark.mostly_slow(every=12, suite=6)
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
def test_the_notice_names_the_value_and_the_old_program_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net(lambda net, x: net.drop(x))
    pipe = pipeline_of(net)
    for p in (0.1, 0.5, 0.1, 0.5, 0.1):
        net.drop.p = p
        compare(pipe, net, F.mse_loss, pipe.step_index)
    said = [line for line in capsys.readouterr().out.splitlines() if "compiling again" in line]
    assert len(said) == 1
    assert "model.drop.p, changed from 0.1 to 0.5 (program 2" in said[0]


def test_what_nobody_reads_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Counters of a trainer, what is kept for inspection, and equal values in other objects."""
    net = Net(lambda net, x: x * net.alpha)
    pipe = pipeline_of(net)
    for step in range(3):
        net.global_step, net.alpha, net.last = step, float("1.0"), batch(step)  # type: ignore[assignment]
        compare(pipe, net, F.mse_loss, step)
    assert "compiling again" not in capsys.readouterr().out


@pytest.mark.slow
def test_evaluations_see_changes(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net(lambda net, x: x * net.alpha)
    pipe = pipeline_of(net)
    pipe.step(batch(0), target=batch(0))
    for alpha in (1.0, 2.0, 1.0):
        net.alpha = alpha
        with torch.no_grad():
            torch.testing.assert_close(pipe.eval(batch(1)), net(batch(1)))
    assert capsys.readouterr().out.count("compiling eval again for model.alpha, changed from 1.0 to 2.0") == 1


@pytest.mark.slow
def test_evaluations_see_what_trains_if_forward_asks(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise it makes no difference, and an evaluation is not compiled for it."""
    asks = Net(lambda net, x: x * sum(each.requires_grad for each in net.parameters()))
    said = "eval again for model.layers.2.bias.requires_grad, changed from True to False"
    for net, times in ((asks, 1), (Net(scaled), 0)):
        pipe = pipeline_of(net)
        pipe.step(batch(0), target=batch(0))
        for trains in (True, False, True):
            net.layers[2].bias.requires_grad_(trains)
            with torch.no_grad():
                torch.testing.assert_close(pipe.eval(batch(1)), net(batch(1)))
        out = capsys.readouterr().out
        assert out.count(said) == out.count("eval again") == times


@pytest.mark.slow
@examples(2)
@given(strategies.lists(strategies.sampled_from(["alpha", "p", "keep", "active", "kind"]), min_size=2, max_size=3))
def test_any_changes_in_any_order(changes: list[str]) -> None:
    """Values go up and down; each step is eager's."""

    def middle(net: Net, x: Tensor) -> Tensor:
        kept = torch.cat([x[:, : net.keep], x[:, net.keep :] * net.alpha], 1)
        return net.drop(getattr(torch, net.config.kind)(kept))

    net = Net(middle)
    pipe = pipeline_of(net)
    compare(pipe, net, F.mse_loss, 0)
    for step, change in enumerate(changes, 1):
        net.alpha = 3.0 - net.alpha if change == "alpha" else net.alpha
        net.drop.p = 0.6 - net.drop.p if change == "p" else net.drop.p
        net.keep = 5 - net.keep if change == "keep" else net.keep
        net.active = 5 - net.active if change == "active" else net.active
        net.config.kind = "sin" if change == "kind" else net.config.kind
        compare(pipe, net, F.mse_loss, step)


def counts(net: Any, x: Tensor) -> Tensor:
    net.active_calls = getattr(net, "active_calls", 0) + 1
    return x * net.active_calls


seen: list[int] = []


def collects(net: Any, x: Tensor) -> Tensor:
    seen.append(1)
    return x * len(seen)


def remembers(net: Any, x: Tensor) -> Tensor:
    previous, net.previous = getattr(net, "previous", 0.0), x.detach()
    return x + previous


def counts_in_class(net: Any, x: Tensor) -> Tensor:
    Net.calls = getattr(Net, "calls", 0) + 1  # type: ignore[attr-defined]
    return x * Net.calls  # type: ignore[attr-defined, no-any-return]


def counted(n: list[int] = [0]) -> int:  # noqa: B006
    n[0] += 1
    return n[0]


def counts_in_default(net: Any, x: Tensor) -> Tensor:
    return x * counted()


def counts_in_all_attributes(net: Any, x: Tensor) -> Tensor:
    net.__dict__["active"] += 1
    return x * net.active  # type: ignore[no-any-return]


def counts_in_a_list(net: Any, x: Tensor) -> Tensor:
    net.table["a"] = net.table["a"] + 1
    return x * net.table["a"]  # type: ignore[no-any-return]


def switches_its_mode(net: Any, x: Tensor) -> Tensor:
    net.training = not net.training
    return x * 2 if net.training else x


def switches_the_mode_of_a_layer(net: Any, x: Tensor) -> Tensor:
    x = net.drop(x)
    net.drop.eval()
    return x


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


CHANGES = [
    *(counts, collects, remembers, counts_in_class, counts_in_default, counts_in_all_attributes, counts_in_a_list),
    *(switches_its_mode, switches_the_mode_of_a_layer, adds_modules, replaces_a_parameter),
    *(asks_for_a_gradient, removes_a_gradient, asks_for_a_version),
]


@pytest.mark.parametrize("middle", CHANGES)
def test_what_forward_changes_and_reads_is_refused(middle: Callable[[Net, Tensor], Tensor]) -> None:
    net, before = Net(middle), copy.copy(seen)
    with pytest.raises(zbcompile.CaptureError, match=r"forward (changes|replaces|asks)"):
        pipeline_of(net).step(batch(0), target=batch(0))
    assert seen == before
    assert not hasattr(Net, "calls")
    assert counted.__defaults__ == ([0],)
    assert net.training
    assert not hasattr(net, "previous")


@pytest.mark.slow
def test_what_forward_only_keeps_is_put_back() -> None:
    """No fake tensor stays behind, and a flag that forward sets once stays set."""

    def middle(net: Any, x: Tensor) -> Tensor:
        net.last = net.shift = x
        if not net.flag:
            return x
        net.flag = False
        return x

    net = Net(middle)
    shift = net.shift
    pipe = pipeline_of(net)
    compare(pipe, net, F.mse_loss, 0)
    assert net.flag is False
    net = Net(middle)
    shift = net.shift
    pipeline_of(net).step(batch(0), target=batch(0))
    assert net.shift is shift
    assert "last" not in vars(net)


def test_new_parameters_are_refused_by_name() -> None:
    net = Net(scaled)
    pipe = pipeline_of(net)
    pipe.step(batch(0), target=batch(0))
    net.layers.append(nn.Linear(4, 4))
    with pytest.raises(zbcompile.PipelineError, match=r"parameter layers\.3\.(weight|bias) is new since"):
        pipe.step(batch(0), target=batch(0))


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_the_node_that_accumulates_a_gradient_is_refused(late: bool) -> None:
    net = Net(scaled)
    weight, pipe = net.layers[0].weight, pipeline_of(net)
    if late:
        pipe.step(batch(0), target=batch(0))
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr, operator]
    node.register_prehook(lambda *_: None)
    with pytest.raises(zbcompile.CaptureError, match=r"layers\.0\.weight has hooks on the node that accumulates"):
        pipe.step(batch(0), target=batch(0))


def removes_itself(module: Any, args: Any, output: Tensor) -> Tensor:
    module._forward_hooks.clear()
    return output * 2


def registers_another(module: nn.Module, args: Any, output: Tensor) -> None:
    module.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("hook", [removes_itself, registers_another])
def test_a_hook_that_changes_hooks_is_refused(hook: Callable[..., Any]) -> None:
    """In eager mode each microbatch runs with others; every one was like the first. A refusal leaves what there was."""
    net = Net(scaled)
    handle = net.layers[0].register_forward_hook(hook, always_call=True)
    before = [dict(table) for table in forward_hook_tables(net.layers[0])]
    with pytest.raises(zbcompile.CaptureError, match=r"forward changes the hooks of model\.layers\.0"):
        pipeline_of(net).step(batch(0), target=batch(0))
    assert [dict(table) for table in forward_hook_tables(net.layers[0])] == before
    handle.remove()
    compare(pipeline_of(net), net, F.mse_loss, 0)


def test_a_trace_that_fails_leaves_nothing_for_the_next_one() -> None:
    """Forward computes a shape with a number that it reads, for which it is traced twice: the second trace found the
    state that the first one had left, and the step lost what only a first microbatch does."""
    state = types.SimpleNamespace(begun=False)

    class Reading(Net):
        def forward(self, x: Tensor, n: Tensor) -> Tensor:  # type: ignore[override]
            x = self.layers[0](x)
            if not state.begun:
                state.begun, x = True, x * 3
            return x[:, :2].repeat(1, int(n.max().item()))

    with pytest.raises(zbcompile.CaptureError, match=r"forward changes state in the closure of .*\.begun"):
        pipeline_of(Reading(scaled)).step(batch(0), torch.full((ROWS,), 2), target=batch(0))
    assert not state.begun


class Twice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.linear else found


def test_a_function_mode_around_a_step_is_refused() -> None:
    """That of torch.device is no such mode: it acts where tensors are made."""
    net = Net(scaled)
    pipe = pipeline_of(net)
    for _ in range(2):
        with torch.device("cpu"):
            compare(pipe, net, F.mse_loss, 0)
        with Twice(), pytest.raises(zbcompile.CaptureError, match="the torch function mode Twice is on"):
            pipe.step(batch(0), target=batch(0))


def test_the_default_dtype_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    net, x = Net(lambda net, x: x * torch.finfo(torch.get_default_dtype()).bits), batch(1)
    pipe = pipeline_of(net)
    compare(pipe, net, F.mse_loss, 0)
    try:
        torch.set_default_dtype(torch.float64)
        torch.testing.assert_close(pipe.step(x, target=x), eager(net, F.mse_loss, x, 1), check_dtype=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert "compiling again for the default dtype float64" in capsys.readouterr().out


@pytest.mark.slow
def test_log_probabilities_see_changes() -> None:
    net = Net(lambda net, x: x * net.alpha)
    pipe, labels = pipeline_of(net), torch.tensor([0, 1, 2, 3])
    for alpha in (1.0, 2.0):
        net.alpha = alpha
        with torch.no_grad():
            expected = net(batch(0)).log_softmax(-1)[range(4), labels]
        torch.testing.assert_close(pipe.log_probs(batch(0), labels=labels), expected)


def changed_on_one_rank(replicas: int) -> None:
    """A step, and another one after a change that the other rank does not make."""
    net = Net(lambda net, x: x * net.alpha)
    mesh = mesh_of(dp=replicas, pp=2 // replicas)
    pipe = zbcompile.pipeline(net, mesh=mesh, schedule="1f1b", microbatches=2, loss=F.mse_loss)
    pipe.step(batch(0), target=batch(0))
    net.alpha = 1.0 + dist.get_rank()
    pipe.step(batch(0), target=batch(0))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_change_on_one_rank_ends_all(replicas: int, pool: Pool) -> None:
    for outcome in pool.outcomes(changed_on_one_rank, replicas):
        assert "model.alpha, changed from 1.0 to 2.0" in outcome.text
        assert outcome.error == ("FaultError" if replicas == 1 else "PipelineError")


def test_layers_that_are_gone_are_named() -> None:
    net = Net(scaled)
    pipe = pipeline_of(net)
    pipe.step(batch(0), target=batch(0))
    net.layers = net.layers[:2]
    with pytest.raises(zbcompile.PipelineError, match=r"layers\.2\.(weight|bias) was there when the model"):
        pipe.step(batch(0), target=batch(0))


def test_a_capture_leaves_containers_that_others_share() -> None:
    net = Net(lambda net, x: x * net.table["w"][0])
    net.table = {"w": net.numbers}  # type: ignore[assignment]
    pipe = pipeline_of(net)
    compare(pipe, net, F.mse_loss, 0)
    net.numbers[0] = 3.0
    compare(pipe, net, F.mse_loss, 1)


@pytest.mark.slow
def test_a_loss_may_read_the_model() -> None:
    net = Net(scaled)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * net.alpha + net.layers[0].weight.square().sum()

    pipe = pipeline_of(net, loss)
    for step, net.alpha in enumerate((1.0, 2.0)):
        compare(pipe, net, loss, step)
