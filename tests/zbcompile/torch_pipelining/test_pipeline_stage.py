"""The generated stages under torch's own schedules: torch orders the actions, our graphs compute,
eager's bits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules

import zbcompile
from tests.support import training
from tests.support.meshes import mesh_of
from tests.support.oracle import PROBLEMS, WIDTH
from tests.support.pool import Pool
from tests.support.refused import said
from tests.zbcompile.torch_pipelining.test_given_orders import FILES
from zbcompile.schedules import from_csv
from zbcompile.torch_pipelining import pipeline_stage
from zbcompile.torch_pipelining.pipeline_stage import (
    CompiledPipelineStage,
    OutputToCome,
    group_between,
)

STEPS = 2


@dataclass(frozen=True)
class TorchCase:
    """One of torch's schedule classes, and the name of ours with the same placement. `groups`: a
    group for each direction of messages, which torch 2.15 and later choose themselves."""

    theirs: str
    ours: str
    problem: str = "mlp"
    groups: bool = False

    @property
    def case(self) -> training.Case:
        return training.Case(self.problem, self.ours, ranks=2, microbatches=8, steps=STEPS)


GROUPS = hasattr(CompiledPipelineStage, "_get_p2p_group")
CASES = [
    TorchCase("ScheduleInterleavedZeroBubble", "interleaved-zb", "short-mlp", GROUPS),
    TorchCase("ScheduleGPipe", "gpipe"),
    TorchCase("Schedule1F1B", "1f1b", "gpt-dropout"),
    TorchCase("Schedule1F1B", "1f1b", "u-net"),
    TorchCase("ScheduleInterleaved1F1B", "interleaved-1f1b"),
    TorchCase("ScheduleZBVZeroBubble", "zb-v", "small-dropout"),
    TorchCase("ScheduleDualPipeV", "dualpipe-v"),
]


def schedule_of(choices: TorchCase, pipe: zbcompile.Pipeline) -> Any:
    """torch's schedule over this rank's generated stages. The last stage, where there is one here,
    has the loss."""
    stages = pipe.stages()
    kind = getattr(torch_schedules, choices.theirs)
    single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
    loss = next((stage for stage in stages if stage.is_last), stages[0]).loss
    return kind(stages[0] if single else stages, pipe.program.schedule.microbatches, loss_fn=loss)


def driven_by_torch(choices: TorchCase) -> tuple[training.Trained, list[Tensor], int]:
    """Training after an evaluation, which leaves no gradients, no outputs and no trace in random
    numbers; its losses, and how many groups next to the pipeline's own the messages took."""
    taken, case = {}, choices.case

    def noted(stage: Any, source: int, destination: int) -> Any:
        result = group_between(stage, source, destination)
        taken[id(result)] = result is not stage.group
        return result

    config, losses = torch.distributed.config, []
    groups: Any = config.patch(pipeline_per_edge_p2p=True) if choices.groups else patch.dict({})
    with groups, patch.object(pipeline_stage, "group_between", noted):
        pipe = training.pipeline_of(case)
        batches = PROBLEMS[case.problem].batches(STEPS, 2 * case.microbatches)
        with training.compiled_once(case.problem, exact=True):
            pipe.compile(*batches[0].args, target=batches[0].target)
        schedule = schedule_of(choices, pipe)
        output = schedule.eval(*batches[0].args, target=batches[0].target, losses=losses)
        assert output in (None, ())
        assert all(parameter.grad is None for parameter in pipe.parameters())
        gradients, optimizer = [], torch.optim.AdamW(pipe.parameters(), lr=1e-2, weight_decay=0.1)
        for batch in batches:
            schedule.step(*batch.args, target=batch.target, losses=[])
            gradients.append(training.gradients_of(pipe))
            optimizer.step()
            optimizer.zero_grad()
    return training.Trained([], gradients, dict(pipe.state_dict())), losses, sum(taken.values())


@pytest.mark.slow
@pytest.mark.mostly_slow(every=7)
@pytest.mark.parametrize("choices", CASES, ids=lambda item: f"{item.theirs} {item.problem}")
def test_gradients_are_eagers(choices: TorchCase, pool: Pool) -> None:
    training.compile_for_forks(choices.case)
    shares, losses, groups = zip(*pool.run(driven_by_torch, choices), strict=True)
    ours, theirs = training.join(shares), training.reference(choices.case)
    for step in range(STEPS):
        training.assert_same_tensors(
            ours.gradients[step], theirs.gradients[step], f"in step {step}:"
        )
    training.assert_same_tensors(ours.state, theirs.state, "state dict:")
    (evaluated,) = [item for item in losses if item]
    torch.testing.assert_close(torch.stack(evaluated).mean(), theirs.losses[0])
    assert groups == ((2, 2) if choices.groups else groups)


def driven_from_a_file(path: str) -> Any:
    """torch's runtime with its own messages, over the stages of a pipeline that has read the same
    file; then what is refused."""
    problem = PROBLEMS["mlp"]
    pipe = zbcompile.pipeline(problem.model(), schedule=path, loss=problem.loss, exact=True)
    microbatches = pipe.options.schedule.microbatches  # type: ignore[union-attr]
    (batch,), losses = problem.batches(1, 2 * microbatches), []
    with training.compiled_once("mlp", exact=True):
        stages = pipe.compile(*batch.args, target=batch.target).stages()
    runtime: Any = torch_schedules._PipelineScheduleRuntime(
        stages,  # type: ignore[arg-type]
        microbatches,
        loss_fn=stages[-1].loss,
    )
    runtime._load_csv(path)
    runtime.step(*batch.args, target=batch.target, losses=losses)
    share = training.Trained([], [training.gradients_of(pipe)], {})
    runtime.eval(*batch.args, target=batch.target, losses=losses)
    return share, losses, [said(with_outputs), said(tied), *wrong_steps()]


def with_outputs() -> None:
    batch = PROBLEMS["short-mlp"].batches(1, 4)[0]
    pipe = training.pipeline_of(training.Case("short-mlp", "1f1b", 2, 2))
    pipe.compile(*batch.args, target=batch.target, return_outputs=True).stages()


TIED = training.Case("small-tied", "1f1b", 2, 2)


def tied() -> None:
    batch = PROBLEMS[TIED.problem].batches(1, 4)[0]
    with training.compiled_once(TIED.problem, exact=True):
        training.pipeline_of(TIED).compile(*batch.args, target=batch.target).stages()


def wrong_steps() -> list[tuple[str, str]]:
    """Returns what one rank says of a loss function of its own, of another shape, and of another dtype."""
    options: Any = {"schedule": "1f1b", "microbatches": 4, "mesh": mesh_of(dp=2, pp=1)}
    pipe = zbcompile.pipeline(PROBLEMS["short-mlp"].model(), loss=F.mse_loss, **options)
    x, y = PROBLEMS["short-mlp"].batches(1, 8)[0].args[0], torch.zeros(8, WIDTH)
    (stage,) = pipe.compile(x, target=y).stages()
    wrong = ((x, y, F.mse_loss), (x[:4], y[:4], stage.loss), (x, y.double(), stage.loss))

    def step(inputs: Tensor, target: Tensor, loss: Any) -> None:
        torch_schedules.Schedule1F1B(stage, 4, loss_fn=loss).step(inputs, target=target)

    return [said(lambda given=given: step(*given)) for given in wrong]


SAYS = (
    "torch's schedules return losses alone",
    "token.weight trains on several stages",  # torch's schedules cannot sum their gradients
    "Build it with loss_fn=stage.loss",
    "args[0] of microbatch 0 has shape [1, 32]",
    "target of microbatch 0 has shape [2, 32] and is torch.float64",
)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("name", ["unbalanced", "weights"])
def test_a_file_under_torchs_runtime(name: str, pool: Pool, tmp_path: Path) -> None:
    """Gradients, and losses of the microbatches of a step and of an evaluation; what the stages
    were not compiled for is refused."""
    training.compile_for_forks(TIED)
    (tmp_path / "order.csv").write_text(FILES[name], encoding="utf-8")
    results = pool.run(driven_from_a_file, str(tmp_path / "order.csv"))
    microbatches = from_csv(FILES[name]).microbatches
    theirs = training.eager("mlp", microbatches, 1)
    ours = training.join([share for share, *_ in results])
    training.assert_same_tensors(ours.gradients[0], theirs.gradients[0], "gradient of")
    (batch,), model = PROBLEMS["mlp"].batches(1, 2 * microbatches), PROBLEMS["mlp"].model()
    (losses,) = [result[1] for result in results if result[1]]
    parts = [(model(*part.args), part.target) for part in batch.parts(microbatches)]
    training.assert_same_tensors(
        losses, [F.mse_loss(*part) for part in parts], "loss of microbatch"
    )  # type: ignore[arg-type]
    for *_, refused in results:
        for (error, text), says in zip(refused, SAYS, strict=True):
            assert error == "PipelineError", text
            assert says in text


def test_another_loss_function_and_one_process_say_what_to_pass() -> None:
    for loss in (torch.nn.CrossEntropyLoss(), lambda output, target: (output - target).sum()):
        with pytest.raises(zbcompile.PipelineError, match=r"loss_fn=stage\.loss"):
            loss(OutputToCome.of(3), torch.zeros(4, WIDTH))
    pipe = training.pipeline_of(training.Case("mlp", "1f1b", 2, 2))
    pipe.compile(torch.zeros(4, WIDTH), target=torch.zeros(4, WIDTH))
    with pytest.raises(zbcompile.PipelineError, match="torchrun"):
        pipe.stages()
