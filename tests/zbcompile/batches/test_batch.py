"""How a batch becomes microbatches, and what happens when its shape changes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, WIDTH, Batch, eager_step, microbatch_loss
from tests.support.pool import Pool
from tests.support.training import Trained, assert_same_tensors, gradients_of, join


class Conditioned(nn.Module):
    """Takes a batch, a nested keyword, a table that belongs to all samples, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(
        self, x: Tensor, extra: dict[str, Tensor], *, table: Tensor, scale: float = 1.0
    ) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale + extra["shift"] @ table
        return x


def conditioned() -> Conditioned:
    torch.manual_seed(0)
    return Conditioned()


def inputs(size: int, wide: int) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(1)
    return (
        torch.randn(size, WIDTH),
        {"shift": torch.randn(size, wide)},
        torch.randn(wide, WIDTH),
        torch.randn(size, WIDTH),
    )


def by_hand(
    model: nn.Module, x: Tensor, extra: dict[str, Tensor], table: Tensor, goal: Tensor, count: int
) -> Tensor:
    """Eager accumulation with the table whole and everything else cut."""
    total = torch.zeros(())
    for part, shift, target in zip(
        x.chunk(count), extra["shift"].chunk(count), goal.chunk(count), strict=True
    ):
        loss = F.mse_loss(model(part, {"shift": shift}, table=table, scale=0.5), target) / count
        loss.backward()
        total = total + loss.detach()
    return total


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(
    ("wide", "split"),
    [(1, {}), (5, {"table": False}), (8, {"table": False, "args[1]": True})],
    ids=str,
)
def test_nested_keywords_replicated_tables_and_numbers(wide: int, split: dict[str, bool]) -> None:
    """A table of one row is replicated, another one if `split=` says so, also if it is as long as
    the batch."""
    x, extra, table, goal = inputs(8, wide)
    model, second = conditioned(), conditioned()
    pipe = zbcompile.pipeline(
        model, schedule="zb-v", microbatches=4, ranks=2, loss=F.mse_loss, exact=True, split=split
    )
    loss = pipe.step(x, extra, table=table, scale=0.5, target=goal)
    assert torch.equal(loss, by_hand(second, x, extra, table, goal, 4))
    assert_same_tensors(gradients_of(pipe), gradients_of(second), "gradient of")


def rows(size: int) -> Batch:
    torch.manual_seed(size)
    return Batch((torch.randn(size, WIDTH),), {}, torch.randn(size, WIDTH))


def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP()


def train_on_sizes(sizes: tuple[int, ...]) -> tuple[Trained, list[list[str]]]:
    """A step per size; also which parameters this process holds after each."""
    pipe = zbcompile.pipeline(
        mlp(), schedule="zb-h1", microbatches=4, ranks=2, loss=F.mse_loss, exact=True
    )
    losses, gradients, allocated = [], [], []
    for size in sizes:
        batch = rows(size)
        losses.append(pipe.step(*batch.args, target=batch.target))
        gradients.append(gradients_of(pipe))
        allocated.append([name for name, _ in pipe.named_parameters()])
        for parameter in pipe.parameters():
            parameter.grad = None
    return Trained(losses, gradients, {}), allocated


@pytest.mark.slow
def test_another_shape_compiles_again(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    """With a notice, with eager's bits, and with every parameter on the rank where it was."""
    sizes = (8, 12, 8)
    alone, _ = train_on_sizes(sizes)
    notices = [line for line in capsys.readouterr().out.splitlines() if "compiling again" in line]
    assert len(notices) == 1
    assert "args[0][3, 32]" in notices[0]
    model = mlp()
    for step, size in enumerate(sizes):
        model.zero_grad()
        assert torch.equal(alone.losses[step], eager_step(model, F.mse_loss, rows(size), 4, step))
        assert_same_tensors(alone.gradients[step], gradients_of(model), "gradient of")
    shares = pool.run(train_on_sizes, sizes)
    for _, allocated in shares:
        assert all(names == allocated[0] for names in allocated)
    joined = join([trained for trained, _ in shares])
    for ours, theirs in zip(joined.gradients, alone.gradients, strict=True):
        assert_same_tensors(ours, theirs, "gradient of")


def test_microbatches_omitted(capsys: pytest.CaptureFixture[str]) -> None:
    """The smallest admitted number from twice the stages on, said once."""
    pipe = zbcompile.pipeline(mlp(), schedule="zb-v", ranks=2, loss=F.mse_loss)
    batch = rows(16)
    for _ in range(2):
        pipe.step(*batch.args, target=batch.target)
    assert pipe.program.schedule.microbatches == 8
    assert capsys.readouterr().out.count("microbatches= not given; using 8") == 1


@pytest.mark.slow
def test_schedule_object_and_csv_file(tmp_path: Any) -> None:
    """A `Schedule` and a CSV file run like the name that they came from."""
    schedule = zbcompile.schedules.build("zb-h1", ranks=2, microbatches=4)
    path = tmp_path / "order.csv"
    zbcompile.schedules.save(schedule, str(path))
    batch = rows(8)
    results = []
    for arguments in ("ZB_H1", schedule, str(path)):
        pipe = zbcompile.pipeline(
            mlp(), schedule=arguments, ranks=2, microbatches=4, loss=F.mse_loss, exact=True
        )
        pipe.step(*batch.args, target=batch.target)
        results.append(gradients_of(pipe))
    for second in results[1:]:
        assert_same_tensors(second, results[0], "gradient of")


class PartlyUncast(MLP):
    """Opts out of autocast for some of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.layers[0](x.float())
        return super().forward(x)


def autocast_forward_only(model: nn.Module, batch: Batch, enabled: bool) -> Tensor:
    """Eager accumulation as torch recommends: autocast around forward and loss, never around
    backward."""
    total = torch.zeros(())
    for part in batch.parts(4):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = microbatch_loss(model, F.mse_loss, part) / 4
        loss.backward()
        total = total + loss.detach()
    return total


@pytest.mark.slow
def test_autocast_is_that_of_each_step() -> None:
    """A step inside autocast and one outside are compiled apart; both have eager's bits."""
    torch.manual_seed(0)
    model = PartlyUncast()
    second = PartlyUncast()
    second.load_state_dict(model.state_dict())
    pipe = zbcompile.pipeline(
        model, schedule="zb-v", microbatches=4, ranks=2, loss=F.mse_loss, exact=True
    )
    batch = rows(8)
    for enabled in (False, True, False):
        model.zero_grad()
        second.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = pipe.step(*batch.args, target=batch.target)
        assert torch.equal(loss, autocast_forward_only(second, batch, enabled))
        assert_same_tensors(gradients_of(pipe), gradients_of(second), "gradient of")


def test_a_single_rank_by_default_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = zbcompile.pipeline(mlp(), schedule="1f1b", microbatches=2, loss=F.mse_loss)
    assert pipe.compile(*rows(8).args, target=rows(8).target).program.schedule.ranks == 1
    assert "running as one rank" in capsys.readouterr().out


@pytest.mark.slow
def test_numbers_specialise() -> None:
    """Another value of an argument that is no tensor compiles again, and the first comes back."""
    x, extra, table, goal = inputs(8, 1)
    pipe = zbcompile.pipeline(
        conditioned(), schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss
    )
    losses = [
        float(pipe.step(x, extra, table=table, scale=s, target=goal)) for s in (0.5, 1.0, 0.5)
    ]
    assert losses[0] == losses[2] != losses[1]
