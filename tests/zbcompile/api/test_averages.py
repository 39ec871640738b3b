"""Averages of a pipeline's parameters: the bits of torch's own on the unsplit model, wherever they were saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zbcompile
from tests.support.dtensor_models import LENGTH, VOCABULARY, loss_of, parallelised
from tests.support.meshes import mesh_of
from tests.support.oracle import PROBLEMS, eager_step, optimizer_of
from tests.support.pool import Pool
from tests.support.training import ROWS, Case, assert_same_tensors, pipeline_of

DECAY, STEPS = 0.9, 3
TIED, VOCAB = Case("small-tied", "zb-v", 2, 2), Case("small-dropout", "1f1b", 2, 2, exact=False)


def batches(case: Case, steps: int) -> Any:
    return PROBLEMS[case.problem].batches(steps, case.microbatches * ROWS)


def trained(pipe: zbcompile.Pipeline, ema: Any, optimizer: Any, case: Case, first: int, until: int) -> None:
    for batch in batches(case, until)[first:]:
        pipe.step(*batch.args, target=batch.target)
        optimizer.step()
        ema.update()
        optimizer.zero_grad()


def eager_average(case: Case, steps: int) -> tuple[dict[str, Tensor], Tensor]:
    """torch's average of the oracle, and its output."""
    problem = PROBLEMS[case.problem]
    model = problem.model()
    average, optimizer = (
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
        optimizer_of(model.parameters()),
    )
    for number, batch in enumerate(batches(case, steps)):
        eager_step(model, problem.loss, batch, case.microbatches, number)
        optimizer.step()
        average.update_parameters(model)
        optimizer.zero_grad()
    return dict(average.module.state_dict()), average.module.eval()(*batches(case, 1)[0].args).detach()


def averaged(case: Case, folder: str = "", resumed: bool = False) -> dict[str, Any]:
    """Train, from a checkpoint on if `resumed`; the averages and what the pipeline computes with them."""
    pipe = pipeline_of(case)
    first = batches(case, 1)[0]
    pipe.compile(*first.args, target=first.target)
    ema, optimizer = zbcompile.ema(pipe, decay=DECAY), optimizer_of(pipe.parameters())
    at = 0
    if resumed:
        at = zbcompile.load_checkpoint(folder, pipe, optimizer, ema=ema).step
        assert ema.updates == at
    trained(pipe, ema, optimizer, case, at, STEPS + 2 * resumed)
    before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    with ema.applied():
        assert "would train the averages" in said_by(lambda: pipe.step(*first.args, target=first.target))
        output = pipe.eval(*first.args)
    after = dict(pipe.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)
    if folder and not resumed:
        zbcompile.save_checkpoint(folder, pipe, optimizer, ema=ema)
    found = {"state": ema.state_dict(full=True), "output": output, "own": dict(ema.state_dict())}
    pipe.close()
    return found


@pytest.mark.slow
def test_averages_are_those_of_torch(pool: Pool, tmp_path: Path) -> None:
    """Also after they were saved on two ranks and loaded in one process under another schedule, and vice versa."""
    state, output = eager_average(TIED, STEPS)
    later, _ = eager_average(TIED, STEPS + 2)
    alone = averaged(TIED, str(tmp_path / "alone"))
    both = pool.run(averaged, TIED, str(tmp_path / "both"))
    for found in (alone, *both):
        assert_same_tensors(found["state"], state, "averages:")
        assert torch.equal(found["output"], output)
    assert both[0]["own"].keys() | both[1]["own"].keys() == state.keys() != both[0]["own"].keys()
    other = Case(TIED.problem, "1f1b", 2, TIED.microbatches)
    assert_same_tensors(averaged(other, str(tmp_path / "both"), True)["state"], later, "in one process:")
    for found in pool.run(averaged, other, str(tmp_path / "alone"), True):
        assert_same_tensors(found["state"], later, "on two ranks:")


def in_rows(folder: str) -> list[dict[str, Any]]:
    """torch's averages of whole state dicts, one after each update; ours, of a sharded output layer; these saved, and
    loaded into a new pipeline that has it whole."""
    first, found, add = batches(VOCAB, 1)[0], list[dict[str, Any]](), get_ema_multi_avg_fn(DECAY)
    for vocab in (1, "off"):
        pipe = pipeline_of(VOCAB, vocab=vocab).compile(*first.args, target=first.target)
        ema, optimizer = zbcompile.ema(pipe, decay=DECAY), optimizer_of(pipe.parameters())
        if vocab == 1:
            for step in range(STEPS):
                trained(pipe, ema, optimizer, VOCAB, step, step + 1)
                now = pipe.state_dict(full=True)
                found = found or [now]
                add(list(found[0].values()), list(now.values()), step)
            zbcompile.save_checkpoint(folder, pipe, optimizer, ema=ema)
        else:
            zbcompile.load_checkpoint(folder, pipe, optimizer, ema=ema)
        found.append(ema.state_dict(full=True))
        pipe.close()
    return found


@pytest.mark.slow
def test_averages_of_a_sharded_output_layer(pool: Pool, tmp_path: Path) -> None:
    for expected, rows, whole in pool.run(in_rows, str(tmp_path)):
        assert_same_tensors(rows, expected, "averages of rows:")
        assert_same_tensors(whole, expected, "loaded whole:")


def of_dtensors(folder: str) -> tuple[list[bool], list[bool]]:
    """Of a parallelised model: whether the averages are torch's of the DTensors, and whether they come back."""
    mesh = mesh_of(tp=dist.get_world_size())
    model = parallelised(mesh["tp"], "plain", 1)
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", microbatches=2, loss=loss_of)
    ema, optimizer = zbcompile.ema(pipe, DECAY), pipe.optimizer(torch.optim.SGD, lr=0.1)
    add = get_ema_multi_avg_fn(DECAY)
    x, y = torch.arange(8 * LENGTH).remainder(VOCABULARY).view(2, 4, LENGTH).unbind()
    expected: list[Tensor] = []
    for step in range(STEPS):
        pipe.step(x, target=y)
        optimizer.step()
        ema.update()
        optimizer.zero_grad()
        now = [value.full_tensor() if isinstance(value, DTensor) else value for value in pipe.state_dict().values()]
        expected = expected or [value.clone() for value in now]
        add(expected, now, step)
    zbcompile.save_checkpoint(folder, pipe, ema=ema)
    found = []
    for _ in range(2):
        state = ema.state_dict().values()
        wholes = [value.full_tensor() if isinstance(value, DTensor) else value for value in state]
        found.append([torch.equal(*pair) for pair in zip(wholes, expected, strict=True)])
        ema.update()
        zbcompile.load_checkpoint(folder, pipe, ema=ema)
    pipe.close()
    return found[0], found[1]


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_averages_of_dtensors(pool: Pool, tmp_path: Path) -> None:
    for at_once, loaded in pool.run(of_dtensors, str(tmp_path)):
        assert all(at_once)
        assert all(loaded)


def under_zero() -> list[Tensor]:
    """The averages of two replicas with a divided optimizer, and after as many steps without division."""
    first, states = batches(VOCAB, 1)[0], []
    for zero in (1, 0):
        pipe = pipeline_of(VOCAB, mesh=mesh_of(dp=dist.get_world_size(), pp=1))
        ema, optimizer = zbcompile.ema(pipe, decay=DECAY), pipe.optimizer(torch.optim.AdamW, lr=1e-2, zero=zero)
        pipe.compile(*first.args, target=first.target)
        trained(pipe, ema, optimizer, VOCAB, 0, STEPS)
        with ema.applied():
            pipe.eval(*first.args)
        trained(pipe, ema, optimizer, VOCAB, 0, 1)
        states.append(ema.state_dict(full=True))
        pipe.close()
    return [torch.equal(states[0][key], states[1][key]) for key in states[1]]


@pytest.mark.slow
def test_averages_beside_a_divided_optimizer(pool: Pool) -> None:
    assert all(all(each) for each in pool.run(under_zero))


def said_by(call: Any) -> str:
    with pytest.raises(zbcompile.PipelineError) as caught:
        call()
    return str(caught.value)


def test_what_averages_refuse(tmp_path: Path) -> None:
    pipe, batch = pipeline_of(TIED), batches(TIED, 1)[0]
    assert "expected a number from 0 to 1" in said_by(lambda: zbcompile.ema(pipe, decay=1.5))
    assert "received a Linear" in said_by(lambda: zbcompile.ema(torch.nn.Linear(1, 1)))  # type: ignore[arg-type]
    ema = zbcompile.ema(pipe, DECAY)
    assert "not compiled yet" in said_by(ema.update)
    pipe.step(*batch.args, target=batch.target)
    assert_same_tensors(ema.state_dict(full=True), pipe.state_dict(full=True), "before the first update:")
    with ema.applied():
        assert "would train the averages" in said_by(lambda: pipe.step(*batch.args, target=batch.target))
        assert "inside of ema.applied()" in said_by(ema.update)
        assert "inside of ema.applied()" in said_by(lambda: zbcompile.save_checkpoint(tmp_path, pipe, ema=ema))
    zbcompile.save_checkpoint(tmp_path, pipe)
    assert "holds no averages" in said_by(lambda: zbcompile.load_checkpoint(tmp_path, pipe, ema=ema))
    zbcompile.save_checkpoint(tmp_path, pipe, ema=ema, step=2)
    other = zbcompile.ema(pipe, 0.5)
    assert "averages of decay=0.9; this is 0.5" in said_by(lambda: zbcompile.load_checkpoint(tmp_path, pipe, ema=other))
    model = PROBLEMS[TIED.problem].model()
    assert "of the same pipeline" in said_by(lambda: zbcompile.load_checkpoint(tmp_path, model, ema=ema))


def saved_with_extra(folder: str) -> list[str]:
    """What a save says whose extra differs between ranks: in a number, in a tensor, in a tensor that one rank lacks."""
    first, rank = batches(TIED, 1)[0], dist.get_rank()
    pipe = pipeline_of(TIED).compile(*first.args, target=first.target)
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


def test_extra_that_differs_between_ranks_is_refused(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(saved_with_extra, str(tmp_path)):
        assert len(said) == 3
        assert all("save one checkpoint with different values: " in text for text in said)
        for text, place in zip(said, ("[seen][dict][rows][1] is 0", "[extra.rate]", "[rate] is None"), strict=True):
            assert place in text
        assert all("Pass the same on every rank" in text for text in said)
