"""What the proof of placements cannot look into is named, and compared by the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from zbcompile.inspect import main
from zbcompile.passes.verification.value_kinds import RULES
from zbcompile.persistence import loaded_pipeline


@torch.library.custom_op("unproven::average", mutates_args=())
def average(x: Tensor, group_name: str) -> Tensor:
    """The mean over the ranks, twice: several exchanges in one operator."""
    found, group = x.clone(), dist.distributed_c10d._resolve_process_group(group_name)
    for _ in range(2):
        dist.all_reduce(found, group=group)
        found = found / group.size()
    return found


average.register_fake(lambda x, group_name: torch.empty_like(x))
average.register_autograd(
    lambda ctx, gradient: (average(gradient.contiguous(), ctx.group), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "group", inputs[1]),
)


class Averaged(nn.Module):
    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(average(self.first(x), self.group))


def unproven(folder: Path) -> Any:
    """What could not be proven of a program, which is saved."""
    mesh = mesh_of(pp=1, tp=2)
    torch.manual_seed(0)
    model = Averaged(mesh.get_group("tp").group_name)
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", microbatches=2, loss=mse_loss)
    x = torch.ones(4, 2)
    for _ in range(2):
        pipe.step(x, target=x)
    pipe.program.save(folder)
    found = pipe.program.unproven
    pipe.close()
    return found


def loaded(folder: Path, rules: int) -> Any:
    """What is left to compare of a saved program, if these are the rules of today."""
    mesh = mesh_of(pp=1, tp=2)
    given = Averaged(mesh.get_group("tp").group_name).state_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded_pipeline, "RULES", rules)
        pipe = zbcompile.load(folder, given, mesh=mesh, operators=["unproven::average"])
    found = pipe.program.unproven
    pipe.close()
    return found


@pytest.mark.slow
def test_a_loaded_program_was_proven_when_it_was_compiled(tmp_path: Path, pool: Pool) -> None:
    one, _ = pool.run(unproven, tmp_path / "program", ranks=2)
    assert pool.run(loaded, tmp_path / "program", RULES, ranks=2) == [one] * 2
    assert pool.run(loaded, tmp_path / "program", RULES + 1, ranks=2) == [None] * 2


class Standardised(nn.Module):
    """A layer whose results are compared with their mean over all replicas, once right and once summed by every rank
    although all have the sum already."""

    def __init__(self, group: str, twice: bool) -> None:
        super().__init__()
        self.group, self.twice = group, twice
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        mean = collectives.all_reduce(y.mean(0), "sum", self.group) / 2
        if self.twice:
            mean = collectives.all_reduce(mean, "sum", self.group)
        return y - mean


def standardised(twice: bool) -> Any:
    mesh = mesh_of(dp=2, pp=1)
    torch.manual_seed(0)
    model = Standardised(mesh.get_group("dp").group_name, twice)
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", microbatches=2, loss=mse_loss)
    x = torch.ones(4, 2) * mesh.get_local_rank("dp")
    try:
        pipe.step(x, target=x)
        return pipe.program.unproven
    finally:
        pipe.close()


@pytest.mark.slow
def test_what_replicas_exchange_is_proven(pool: Pool) -> None:
    assert pool.run(standardised, False, ranks=2) == [{"dp": frozenset()}] * 2
    with pytest.raises(Exception, match=r'along "dp", .* sums what is the same on all ranks'):
        pool.run(standardised, True, ranks=2)


class Scaled(nn.Module):
    """An output layer behind what every rank scales by its own part of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 2), nn.Linear(2, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale
        return self.head(hidden)  # type: ignore[no-any-return]


def scaled() -> None:
    mesh = mesh_of(pp=1, tp=2)
    options: dict[str, Any] = {"vocab": 1, "placements": {"scale": {"tp": "shard"}}, "loss": loss_of_words}
    pipe = zbcompile.pipeline(Scaled(), mesh=mesh, schedule="zb-h1", microbatches=2, **options)
    words = torch.ones(4, 3, dtype=torch.int64)
    try:
        pipe.step(words, target=words)
    finally:
        pipe.close()


def loss_of_words(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.slow
def test_what_a_sharded_output_layer_reads_must_be_equal(pool: Pool) -> None:
    with pytest.raises(Exception, match=r"the loss must be the same on all ranks, .* hidden = self.embedding"):
        pool.run(scaled, ranks=2)


@pytest.mark.slow
def test_inspect_says_what_is_unproven(tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = pool.run(unproven, tmp_path / "program", ranks=2)
    assert one == other
    assert "first.weight" in one["tp"]
    assert main([str(tmp_path / "program")]) == 0
    names = ", ".join(sorted(one["tp"]))
    said = f'not proven right along "tp" when compiling, so compared in the first step: {names}.'
    report = " ".join(capsys.readouterr().out.split())
    assert said in report
    assert f"proven when compiling, by version {RULES} of the rules" in report
