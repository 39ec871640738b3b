"""Checkpoints: saved at any number of ranks, loaded at any other, with the bits of a training that
never stopped."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zbcompile
from tests.support.checkpointing import PROBLEM, begin, state_of, train_eager, train_pipe
from tests.support.oracle import optimizer_of
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors
from zbcompile.persistence import checkpoint_directory as directory
from zbcompile.persistence.checkpoint_directory import checkpoints_in
from zbcompile.persistence.checkpoint_files import CheckpointReader

Error = zbcompile.PipelineError
Programs = Callable[[str, int], Path]
save, load = zbcompile.save_checkpoint, zbcompile.load_checkpoint


def assert_same_state(ours: Any, theirs: Any) -> None:
    assert_same_tensors(ours.weights, theirs.weights, "weight")
    assert_same_tensors(ours.moments, theirs.moments, "optimizer's")


def tensors_in(path: Path) -> dict[str, Any]:
    return CheckpointReader(path).metadata.state_dict_metadata


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_from_one_process_to_a_pipeline(small_program: Programs, tmp_path: Path) -> None:
    """A plain model is saved after three steps, and a pipeline trains on. Another pipeline starts from
    its weights, and torch's own reader reads what it saved."""
    model = PROBLEM.model()
    optimizer = optimizer_of(model.parameters())
    train_eager(model, optimizer, 0, 3)
    save(tmp_path, model, optimizer, step=3)
    train_eager(model, optimizer, 3, 5)
    train_pipe(str(small_program("zb-h1", 2)), str(tmp_path), 5)
    pipe = zbcompile.load(small_program("zb-h1", 2), checkpoint=tmp_path)
    assert pipe.step_index == 5
    assert_same_tensors(pipe.state_dict(), model.state_dict(), "weight")
    second = PROBLEM.model()
    read = optimizer_of(second.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(second, read, options=options)
    moved = {key: value for key, value in moments.items() if key.startswith("state.")}
    # a tied parameter is there under its first name alone
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    reader = dcp.HuggingFaceStorageReader(str(checkpoints_in(tmp_path)[-1]))
    state = {"model": weights, "optimizer": moved}
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    loaded: dict[str, Any] = {"model_state_dict": weights, "optim_state_dict": moments | moved}
    set_state_dict(second, read, options=options, **loaded)
    assert_same_state(state_of(second, read), state_of(model, optimizer))


def test_a_load_needs_a_compiled_pipeline(tmp_path: Path) -> None:
    """An evaluation compiles the model; the optimizer needs a step."""
    x, (model, other) = (
        torch.ones(8, 4),
        (nn.Sequential(*map(nn.Linear, (4, 4), (4, 4))) for _ in "ab"),
    )
    options = {"schedule": "zb-h1", "ranks": 2, "microbatches": 4, "loss": nn.functional.mse_loss}
    save(tmp_path, model, torch.optim.AdamW(model.parameters()), step=1, extra="seen")
    pipe = zbcompile.pipeline(other, **options)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for folder, required in ((tmp_path, True), (tmp_path / "none", False)):
        with pytest.raises(Error, match=r"not compiled yet.*pipe\.compile\("):
            load(folder, pipe, optimizer, required=required)
    pipe.eval(x)
    with pytest.raises(Error, match=r"its optimizer is empty\. Call pipe\.compile"):
        load(tmp_path, pipe, optimizer)
    assert pipe.step_index == 0
    pipe.compile(x, target=x)
    assert load(tmp_path, pipe, optimizer).extra == "seen"
    assert pipe.step_index == 1
    assert_same_tensors(pipe.state_dict(full=True), model.state_dict(), "weight")


class Normed(nn.Module):
    """Buffers that change, one of which is a number; a parameter without gradient, one that is
    frozen."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.layers = nn.Sequential(*layers)
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.frozen


def optimizer_over(model: Any) -> torch.optim.Optimizer:
    parts: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in model.named_parameters():
        parts[name.endswith("weight")].append(parameter)
    groups = [{"params": parts[1], "weight_decay": 0.5}, {"params": parts[0]}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def test_buffers_groups_and_what_is_extra(tmp_path: Path) -> None:
    """All that belongs to a run comes back, also into a plain model: buffers, options per group,
    generators, extra."""
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(8, 4)
    options = {"schedule": "1f1b", "ranks": 2, "microbatches": 2, "loss": nn.functional.mse_loss}
    pipe = zbcompile.pipeline(model, **options).compile(x, target=x)
    optimizer = optimizer_over(pipe)
    pipe.step(x, target=x)
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.05
    save(tmp_path, pipe, optimizer, extra={"seen": [1, 2], "rate": torch.ones(2)})
    drawn, second = torch.rand(3), Normed()
    remaining = optimizer_over(second)
    at = load(tmp_path, second, remaining)
    assert torch.equal(torch.rand(3), drawn)
    assert (at.step, at.extra["seen"], at.extra["rate"].tolist()) == (1, [1, 2], [1.0, 1.0])
    assert_same_state(state_of(second, remaining), state_of(model, optimizer))
    kept = [(group["lr"], group["weight_decay"]) for group in remaining.param_groups]
    assert kept == [(0.1, 0.5), (0.05, 0)]


def test_options_are_those_of_a_parameter_that_was_trained(tmp_path: Path) -> None:
    """Of an optimizer without the frozen parameters, for one that has all of them."""
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    save(tmp_path, model, torch.optim.AdamW([model.bias], lr=0.25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
    load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_old_ones_are_dropped_and_none_is_replaced(tmp_path: Path) -> None:
    """The same step again is another directory, so that there is a complete one at every moment; a
    later one is left alone. What killed runs did not drop is dropped before the next has its name."""
    for step in (1, 2, 2, 30, 4):
        directory.publish(directory.begin(tmp_path, step), keep=2)
    names = [path.name for path in checkpoints_in(tmp_path)]
    assert names == ["step-00000002.1", "step-00000004", "step-00000030"]
    assert zbcompile.latest_checkpoint(tmp_path) == tmp_path / names[-1]
    for step in (31, 32, 33):
        directory.publish(directory.begin(tmp_path, step), keep=None)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target.name == "step-00000034":
            raise KeyboardInterrupt
        return rename(path, target)

    with mock.patch.object(Path, "rename", killed), pytest.raises(KeyboardInterrupt):
        directory.publish(directory.begin(tmp_path, 34), keep=2)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000032", "step-00000033"]


def test_what_cannot_be_saved_or_loaded_is_refused(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    sgd = torch.optim.SGD(model.parameters())
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    folder = tmp_path / "run"
    assert load(folder, model, required=False).path is None
    with pytest.raises(Error, match="holds no complete checkpoint"):
        load(folder, model)
    path = save(folder, model, optimizer)
    unshaped = r"weight has shape \[2, 2\] in .* and \[2, 3\] in the model"
    listed: Any = [optimizer]
    one = "received a list; expected one torch optimizer. Save each"
    rows: list[tuple[str, Callable[[], object]]] = [
        ("wait=False needs a pipeline", lambda: save(folder, model, wait=False)),
        (r"extra is a pathlib\.PosixPath", lambda: save(folder, model, extra=Path("x"))),
        ("saved with AdamW, but this is SGD", lambda: load(folder, model, sgd)),
        (unshaped, lambda: load(folder, nn.Linear(3, 2))),
        (r"unexpected \['bias'\]", lambda: load(folder, nn.Linear(2, 2, bias=False))),
        ("not one of this process's", lambda: save(folder, other, optimizer)),
        ("no checkpoint can be written", lambda: save(path / directory.INDEX, model)),
        (one, lambda: save(folder, model, listed)),
        (one, lambda: load(folder, model, listed)),
        ("file: it is not a folder", lambda: save(tmp_path / "file", model)),
        ("link: it is not a folder", lambda: save(tmp_path / "link", model)),
    ]
    steps: list[Any] = [-1, True, "7", 1.0]
    trained = "expected how many steps have been trained"
    rows += [(trained, lambda step=step: save(folder, model, step=step)) for step in steps]  # type: ignore[misc]
    for message, act in rows:
        with pytest.raises(Error, match=message):
            act()
    assert all(name.startswith(("model.", "optimizer.", "random.")) for name in tensors_in(path))
    assert checkpoints_in(folder) == [path]


def among_ranks(program: str, folder: Path, elsewhere: Path) -> dict[str, str]:
    """Returns what rank 0 and rank 1 are told about saves and loads in which they differ."""
    (pipe, optimizer), rank, told = begin(program), dist.get_rank(), {}

    def refused(name: str, act: Callable[[], object]) -> None:
        with pytest.raises(Error) as caught:
            act()
        told[name] = str(caught.value)
        dist.barrier()

    before = os.getcwd()
    os.chdir(elsewhere if rank else folder)
    refused("folder", lambda: save("checkpoints", pipe, optimizer))
    os.chdir(before)
    refused("step", lambda: save(folder, pipe, optimizer, step=3 + rank))
    nested = {"seen": {"rows": [1, rank]}}
    refused("[seen][dict][rows][1] is 0", lambda: save(folder, pipe, extra=nested))
    refused("[extra.rate]", lambda: save(folder, pipe, extra={"rate": torch.full((2,), rank)}))
    some = {"rate": torch.ones(2) if rank else None}
    refused("[rate] is None", lambda: save(folder, pipe, extra=some))
    path = save(folder / "good", pipe, optimizer, step=1, extra={"rate": torch.ones(2)})
    assert torch.equal(load(folder / "good", pipe, optimizer).extra["rate"], torch.ones(2))
    save(folder / "cut", pipe, optimizer, step=1)
    dist.barrier()
    part = folder / "cut" / path.name / f"part-{rank:05}.safetensors"
    part.write_bytes(part.read_bytes()[:100])
    dist.barrier()
    refused("damaged", lambda: load(folder / "cut", pipe, optimizer))
    pipe.close()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        layer.weight.requires_grad_(False)
    options = {"schedule": "1f1b", "microbatches": 2, "loss": nn.functional.mse_loss}
    pipe = zbcompile.pipeline(model, balance=("1",), **options)
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    save(folder / "frozen", pipe, frozen=False)
    pipe.close()
    return told


@pytest.mark.slow
def test_ranks_save_each_tensor_once_and_are_refused_together(
    small_program: Programs, pool: Pool, tmp_path: Path
) -> None:
    """Under dualpipe-v both ranks hold all stages; the tied matrix is in two of them. Frozen
    parameters, also those of another rank, may stay out."""
    folder, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    program = str(small_program("dualpipe-v", 2))
    for told in pool.run(among_ranks, program, folder, elsewhere):
        assert "need a directory that all ranks share" in told.pop("folder")
        assert "different values: step is 3 on rank 0 and 4 on rank 1" in told.pop("step")
        assert "has another size" in told.pop("damaged")
        assert len(told) == 3
        for place, text in told.items():
            assert place in text
            assert "Pass the same on every rank" in text
    tensors = tensors_in(folder / "good" / "step-00000001")
    assert all(len(value.chunks) == 1 for value in tensors.values())
    names = {key.removeprefix("model.") for key in tensors if key.startswith("model.")}
    assert names == dict(PROBLEM.model().named_parameters()).keys()  # without the head
    check_frozen(folder / "frozen")


def check_frozen(folder: Path) -> None:
    """Who loads keeps its own, and another model is still refused."""
    torch.manual_seed(0)
    saved, second = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    local = [layer.weight.clone() for layer in second]
    load(folder, second)
    for layer, theirs, weight in zip(second, saved, local, strict=True):
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layer.bias, theirs.bias)
    names = {name for name in tensors_in(checkpoints_in(folder)[0]) if "model." in name}
    assert names == {"model.0.bias", "model.1.bias"}
    with pytest.raises(Error, match=r"missing nothing, unexpected \['0.bias', '0.weight'\]"):
        load(folder, nn.Sequential(nn.Identity(), nn.Linear(4, 4)))
