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
from tests.support.checkpointing import (
    PROBLEM,
    SIZE,
    State,
    begin,
    state_of,
    train_eager,
    train_pipe,
)
from tests.support.oracle import optimizer_of
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors
from zbcompile.persistence.checkpoint_directory import (
    INDEX,
    begin as begin_checkpoint,
    checkpoints_in,
    publish,
)
from zbcompile.persistence.checkpoint_files import CheckpointReader


def uninterrupted(steps: int) -> State:
    model = PROBLEM.model()
    optimizer = optimizer_of(model.parameters())
    train_eager(model, optimizer, 0, steps)
    return state_of(model, optimizer)


def assert_same_state(ours: State, theirs: State) -> None:
    assert_same_tensors(ours.weights, theirs.weights, "weight")
    assert_same_tensors(ours.moments, theirs.moments, "optimizer's")


def train_and_save(program: str, folder: str, steps: int) -> None:
    train_pipe(program, folder, steps)


@pytest.mark.slow
def test_from_one_process_to_a_pipeline(
    small_program: Callable[[str, int], Path], tmp_path: Path
) -> None:
    """A plain model is saved after three steps; a pipeline trains on, and another one starts from
    its weights."""
    model = PROBLEM.model()
    optimizer = optimizer_of(model.parameters())
    train_eager(model, optimizer, 0, 3)
    zbcompile.save_checkpoint(tmp_path, model, optimizer, step=3)
    train_pipe(str(small_program("zb-h1", 2)), str(tmp_path), 5)
    theirs = uninterrupted(5)
    pipe = zbcompile.load(small_program("zb-h1", 2), checkpoint=tmp_path)
    assert pipe.step_index == 5
    assert_same_tensors(pipe.state_dict(), theirs.weights, "weight")


def test_a_load_needs_a_compiled_pipeline(tmp_path: Path) -> None:
    """An evaluation compiles the model; the optimizer needs a step."""
    batch = PROBLEM.batches(1, SIZE)[0]
    options = {
        "schedule": "zb-h1",
        "ranks": 2,
        "microbatches": 4,
        "loss": PROBLEM.loss,
        "exact": True,
    }
    model = PROBLEM.model()
    zbcompile.save_checkpoint(
        tmp_path, model, torch.optim.AdamW(model.parameters()), step=1, extra="seen"
    )
    pipe = zbcompile.pipeline(PROBLEM.model(), **options)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for folder, required in ((tmp_path, True), (tmp_path / "none", False)):
        with pytest.raises(zbcompile.PipelineError, match=r"not compiled yet.*pipe\.compile\("):
            zbcompile.load_checkpoint(folder, pipe, optimizer, required=required)
    pipe.eval(*batch.args)
    with pytest.raises(
        zbcompile.PipelineError, match=r"its optimizer is empty\. Call pipe\.compile"
    ):
        zbcompile.load_checkpoint(tmp_path, pipe, optimizer)
    assert pipe.step_index == 0
    pipe.compile(*batch.args, target=batch.target)
    assert zbcompile.load_checkpoint(tmp_path, pipe, optimizer).extra == "seen"
    assert pipe.step_index == 1
    assert_same_tensors(pipe.state_dict(full=True), model.state_dict(), "weight")


@pytest.mark.slow
def test_every_tensor_is_written_once(
    small_program: Callable[[str, int], Path], pool: Pool, tmp_path: Path
) -> None:
    """Under dualpipe-v both ranks hold all stages; the tied matrix is in two of them."""
    pool.run(train_and_save, str(small_program("dualpipe-v", 2)), str(tmp_path), 1)
    tensors = CheckpointReader(checkpoints_in(tmp_path)[0]).metadata.state_dict_metadata
    assert all(len(value.chunks) == 1 for value in tensors.values())
    assert {key.removeprefix("model.") for key in tensors if key.startswith("model.")} == dict(
        PROBLEM.model().named_parameters()
    ).keys()
    assert "model.head.weight" not in tensors


class Normed(nn.Module):
    """Buffers that change, one of which is a number; a parameter without gradient, one that is
    frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)
        )
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.frozen
        return x


def test_buffers_groups_and_what_is_extra(tmp_path: Path) -> None:
    """All that belongs to a run comes back, also into a plain model: buffers, options per group,
    generators, extra."""
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(8, 4)
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", ranks=2, microbatches=2, loss=nn.functional.mse_loss
    )
    pipe.compile(x, target=x)

    def optimizer_over(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        first = [p for name, p in named.items() if name.endswith("weight")]
        rest = [p for name, p in named.items() if not name.endswith("weight")]
        return torch.optim.SGD(
            [{"params": first, "weight_decay": 0.5}, {"params": rest}], lr=0.1, momentum=0.9
        )

    optimizer = optimizer_over(dict(pipe.named_parameters()))
    pipe.step(x, target=x)
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.05
    zbcompile.save_checkpoint(
        tmp_path, pipe, optimizer, extra={"seen": [1, 2], "rate": torch.ones(2)}
    )
    drawn = torch.rand(3)
    second = Normed()
    remaining = optimizer_over(dict(second.named_parameters()))
    at = zbcompile.load_checkpoint(tmp_path, second, remaining)
    assert torch.equal(torch.rand(3), drawn)
    assert (at.step, at.extra["seen"], at.extra["rate"].tolist()) == (1, [1, 2], [1.0, 1.0])
    assert_same_state(state_of(second, remaining), state_of(model, optimizer))
    assert [group["lr"] for group in remaining.param_groups] == [0.1, 0.05]
    assert [group["weight_decay"] for group in remaining.param_groups] == [0.5, 0]


def test_an_interrupted_save_leaves_the_one_before(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    first = zbcompile.save_checkpoint(tmp_path, model, step=1)
    left = begin_checkpoint(tmp_path, 2)
    (left / "part-00000.safetensors").write_bytes(b"half")
    assert zbcompile.latest_checkpoint(tmp_path) == first
    assert zbcompile.load_checkpoint(tmp_path, nn.Linear(2, 2)).step == 1
    zbcompile.save_checkpoint(tmp_path, model, step=3)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000003"]


def test_old_ones_are_dropped_and_none_is_replaced(tmp_path: Path) -> None:
    """The same step again is another directory, so that there is a complete one at every moment."""
    for step in (1, 2, 2, 30, 4):
        publish(begin_checkpoint(tmp_path, step), keep=2)
    names = [path.name for path in checkpoints_in(tmp_path)]
    assert names == [
        "step-00000002.1",
        "step-00000004",
        "step-00000030",
    ]  # a later one is left alone
    assert zbcompile.latest_checkpoint(tmp_path) == tmp_path / names[-1]


def test_what_killed_runs_did_not_drop_is_dropped_by_the_next(tmp_path: Path) -> None:
    """Before its own checkpoint has its name: however many are killed there, one too many is the
    most."""
    for step in (1, 2, 3, 4):
        publish(begin_checkpoint(tmp_path, step), keep=None)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target.name == "step-00000005":
            raise KeyboardInterrupt
        return rename(path, target)

    with mock.patch.object(Path, "rename", killed), pytest.raises(KeyboardInterrupt):
        publish(begin_checkpoint(tmp_path, 5), keep=2)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000003", "step-00000004"]


def save_in(program: str, folder: str, elsewhere: str) -> None:
    """Rank 1 works in another directory."""
    before = os.getcwd()
    pipe, optimizer = begin(program)
    os.chdir(elsewhere if torch.distributed.get_rank() else folder)
    try:
        zbcompile.save_checkpoint("checkpoints", pipe, optimizer)
    finally:
        os.chdir(before)
        pipe.close()


@pytest.mark.slow
def test_a_directory_that_is_not_shared_is_refused(
    small_program: Callable[[str, int], Path], pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    outcomes = pool.outcomes(
        save_in, str(small_program("zb-h1", 2)), str(tmp_path), str(tmp_path / "elsewhere")
    )
    assert [outcome.error for outcome in outcomes] == ["PipelineError"] * 2
    assert all("need a directory that all ranks share" in outcome.text for outcome in outcomes)


def save_at(program: str, folder: str, steps: list[int]) -> None:
    pipe, optimizer = begin(program)
    try:
        zbcompile.save_checkpoint(folder, pipe, optimizer, step=steps[torch.distributed.get_rank()])
    finally:
        pipe.close()


@pytest.mark.slow
def test_ranks_that_count_other_steps_are_refused(
    small_program: Callable[[str, int], Path], pool: Pool, tmp_path: Path
) -> None:
    outcomes = pool.outcomes(save_at, str(small_program("zb-h1", 2)), str(tmp_path), [3, 4])
    assert [outcome.error for outcome in outcomes] == ["PipelineError"] * 2
    assert all(
        "different values: step is 3 on rank 0 and 4 on rank 1" in outcome.text
        for outcome in outcomes
    )
    assert not list(tmp_path.iterdir())


def test_a_step_that_is_no_count_is_not_saved(tmp_path: Path) -> None:
    for step in (-1, True, "7", 1.0):
        with pytest.raises(
            zbcompile.PipelineError, match="expected how many steps have been trained"
        ):
            zbcompile.save_checkpoint(tmp_path, nn.Linear(1, 1), step=step)  # type: ignore[arg-type]


def load_in(program: str, folder: str) -> None:
    pipe, optimizer = begin(program)
    try:
        zbcompile.load_checkpoint(folder, pipe, optimizer)
    finally:
        pipe.close()


@pytest.mark.slow
def test_a_damaged_one_is_refused_on_every_rank(
    small_program: Callable[[str, int], Path], pool: Pool, tmp_path: Path
) -> None:
    pool.run(train_and_save, str(small_program("zb-h1", 2)), str(tmp_path), 1)
    for path in checkpoints_in(tmp_path)[0].glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    outcomes = pool.outcomes(load_in, str(small_program("zb-h1", 2)), str(tmp_path))
    assert [outcome.error for outcome in outcomes] == ["PipelineError"] * 2
    assert all("has another size" in outcome.text for outcome in outcomes)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(zbcompile.PipelineError, match="holds no complete checkpoint"):
        zbcompile.load_checkpoint(tmp_path, model)
    assert zbcompile.load_checkpoint(tmp_path, model, required=False).path is None
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(zbcompile.PipelineError, match=r"extra is a pathlib\.PosixPath"):
        zbcompile.save_checkpoint(tmp_path, model, extra=Path("x"))
    zbcompile.save_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(zbcompile.PipelineError, match="saved with AdamW, but this is SGD"):
        zbcompile.load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(
        zbcompile.PipelineError, match=r"weight has shape \[2, 2\] in .* and \[2, 3\] in the model"
    ):
        zbcompile.load_checkpoint(tmp_path, nn.Linear(3, 2))
    with pytest.raises(zbcompile.PipelineError, match=r"missing nothing, unexpected \['bias'\]"):
        zbcompile.load_checkpoint(tmp_path, nn.Linear(2, 2, bias=False))
    with pytest.raises(zbcompile.PipelineError, match="not one of this process's"):
        zbcompile.save_checkpoint(tmp_path, nn.Linear(2, 2), optimizer)
    with pytest.raises(zbcompile.PipelineError, match="no checkpoint can be written"):
        zbcompile.save_checkpoint(checkpoints_in(tmp_path)[0] / INDEX, model)
    for function in (zbcompile.save_checkpoint, zbcompile.load_checkpoint):
        with pytest.raises(
            zbcompile.PipelineError,
            match=r"received a list; expected one torch optimizer. Save each",
        ):
            function(tmp_path, model, [optimizer])
    names = CheckpointReader(checkpoints_in(tmp_path)[0]).metadata.state_dict_metadata
    assert all(name.startswith(("model.", "optimizer.", "random.")) for name in names)


def save_without_frozen(folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    for layer in model:
        layer.weight.requires_grad_(False)
    x = torch.ones(4, 4)
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", microbatches=2, loss=nn.functional.mse_loss, balance=("1",)
    )
    pipe.step(x, target=x)
    zbcompile.save_checkpoint(folder, pipe, frozen=False)


def test_frozen_parameters_may_stay_out(tmp_path: Path, pool: Pool) -> None:
    """Those of another rank as well; who loads keeps its own, and another model is still
    refused."""
    pool.run(save_without_frozen, str(tmp_path))
    second = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    local = [layer.weight.clone() for layer in second]
    zbcompile.load_checkpoint(tmp_path, second)
    torch.manual_seed(0)
    saved = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    assert all(
        torch.equal(layer.weight, weight) for layer, weight in zip(second, local, strict=True)
    )
    assert all(
        torch.equal(layer.bias, theirs.bias) for layer, theirs in zip(second, saved, strict=True)
    )
    assert {
        name
        for name in CheckpointReader(checkpoints_in(tmp_path)[0]).metadata.state_dict_metadata
        if "model." in name
    } == {"model.0.bias", "model.1.bias"}
    with pytest.raises(
        zbcompile.PipelineError, match=r"missing nothing, unexpected \['0.bias', '0.weight'\]"
    ):
        zbcompile.load_checkpoint(tmp_path, nn.Sequential(nn.Identity(), nn.Linear(4, 4)))


def test_options_are_those_of_a_parameter_that_was_trained(tmp_path: Path) -> None:
    """Of an optimizer without the frozen parameters, for one that has all of them."""
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    zbcompile.save_checkpoint(tmp_path, model, torch.optim.AdamW([model.bias], lr=0.25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
    zbcompile.load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25


class Words(nn.Module):
    """An output layer of five words, tied to the embedding: four ranks have 2, 2, 1 and 0 of its
    rows."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


TOKENS = torch.arange(40).view(8, 5) % 5


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def save_sharded(directory: Path, ranks: int) -> str:
    """The program with an output layer that is sharded over so many ranks."""
    options = {"schedule": "1f1b", "microbatches": 4, "loss": loss_of, "vocab": 1, "ranks": ranks}
    zbcompile.pipeline(Words(), **options).compile(TOKENS, target=TOKENS).program.save(directory)
    return str(directory)


def train_rows(program: str, folder: str, until: int) -> State:
    """Train from the newest checkpoint on; the weights, and the moments of this rank."""
    torch.manual_seed(0)
    pipe = zbcompile.load(program, state_dict=Words().state_dict())
    optimizer = optimizer_of(pipe.parameters())
    at = zbcompile.load_checkpoint(folder, pipe, optimizer, required=False)
    for _ in range(at.step, until):
        pipe.step(TOKENS, target=TOKENS)
        optimizer.step()
        optimizer.zero_grad()
    zbcompile.save_checkpoint(folder, pipe, optimizer)
    zbcompile.save_weights(Path(folder, "weights"), pipe)
    zbcompile.load_weights(Path(folder, "weights"), pipe)
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    moments = {
        f"{names[id(p)]} {key}": value
        for p, retained in optimizer.state.items()
        for key, value in retained.items()
    }
    weights = pipe.state_dict(full=True)
    pipe.close()
    return State(weights, moments)


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_rows_of_an_output_layer_are_put_together(pool: Pool, tmp_path: Path) -> None:
    """Two ranks save, four go on (one of which has no rows), one process reads: rows in the order
    of the words."""
    for ranks, until in ((2, 2), (4, 3)):
        program = save_sharded(tmp_path / f"program-{ranks}", ranks)
        check_rows(tmp_path, pool.run(train_rows, program, str(tmp_path), until, ranks=ranks))


def check_rows(folder: Path, ranks: list[State]) -> None:
    """A plain model reads what the ranks have."""
    model, second = Words(), Words()
    optimizer = optimizer_of(model.parameters())
    zbcompile.load_checkpoint(folder, model, optimizer)
    zbcompile.load_weights(folder / "weights", second)
    result = state_of(model, optimizer)
    assert_same_tensors(result.weights, ranks[0].weights, "weight")
    assert_same_tensors(dict(second.state_dict()), ranks[0].weights, "weight in safetensors")
    for key in ("exp_avg", "exp_avg_sq"):
        rows = torch.cat([rank.moments[f"token.weight {key}"] for rank in ranks])
        assert torch.equal(result.moments[f"token.weight.{key}"], rows)


def saved_with_extra(folder: str) -> list[str]:
    """Returns what a save says whose extra differs between ranks: in a number, in a tensor, in a
    tensor that one rank lacks."""
    first, rank = PROBLEM.batches(1, SIZE)[0], dist.get_rank()
    pipe = zbcompile.pipeline(PROBLEM.model(), schedule="1f1b", microbatches=2, loss=PROBLEM.loss)
    pipe.compile(*first.args, target=first.target)
    unlike = [
        {"seen": {"rows": [1, rank]}},
        {"rate": torch.full((2,), rank)},
        {"rate": torch.ones(2) if rank else None},
    ]
    said = []
    for extra in unlike:
        try:
            zbcompile.save_checkpoint(folder, pipe, extra=extra)
        except zbcompile.PipelineError as error:
            said.append(str(error))
    zbcompile.save_checkpoint(folder, pipe, extra={"rate": torch.ones(2)})
    assert torch.equal(zbcompile.load_checkpoint(folder, pipe).extra["rate"], torch.ones(2))
    pipe.close()
    return said


@pytest.mark.slow
def test_extra_that_differs_between_ranks_is_refused(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(saved_with_extra, str(tmp_path)):
        assert len(said) == 3
        assert all("save one checkpoint with different values: " in text for text in said)
        for text, place in zip(
            said, ("[seen][dict][rows][1] is 0", "[extra.rate]", "[rate] is None"), strict=True
        ):
            assert place in text
        assert all("Pass the same on every rank" in text for text in said)


@pytest.mark.slow
def test_torchs_own_reader_reads_it(
    small_program: Callable[[str, int], Path], tmp_path: Path
) -> None:
    train_pipe(str(small_program("zb-h1", 2)), str(tmp_path), 2)
    model = PROBLEM.model()
    optimizer = optimizer_of(model.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    moved = {key: value for key, value in moments.items() if key.startswith("state.")}
    state = {"model": weights, "optimizer": moved}
    # a tied parameter is there under its first name alone
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    reader = dcp.HuggingFaceStorageReader(str(checkpoints_in(tmp_path)[-1]))
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    loaded: dict[str, Any] = {"model_state_dict": weights, "optim_state_dict": moments | moved}
    set_state_dict(model, optimizer, options=options, **loaded)
    assert_same_state(state_of(model, optimizer), uninterrupted(2))
