"""The generated stages under torch's own schedules: torch orders the actions, our graphs compute,
eager's bits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules

import zbcompile
from tests.support.oracle import PROBLEMS, WIDTH
from tests.support.pool import Pool
from tests.support.training import (
    Case,
    Trained,
    assert_same_tensors,
    eager,
    gradients_of,
    join,
    pipeline_of,
    reference,
)
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
    """One of torch's schedule classes, and the name of ours with the same placement."""

    theirs: str
    ours: str
    problem: str = "mlp"

    @property
    def case(self) -> Case:
        return Case(self.problem, self.ours, ranks=2, microbatches=8, steps=STEPS)


CASES = [
    TorchCase("ScheduleGPipe", "gpipe"),
    TorchCase("Schedule1F1B", "1f1b"),
    TorchCase("Schedule1F1B", "1f1b", "gpt-dropout"),
    TorchCase("Schedule1F1B", "1f1b", "u-net"),
    TorchCase("ScheduleInterleaved1F1B", "interleaved-1f1b"),
    TorchCase("ScheduleInterleavedZeroBubble", "interleaved-zb"),
    TorchCase("ScheduleInterleavedZeroBubble", "interleaved-zb", "small-dropout"),
    TorchCase("ScheduleZBVZeroBubble", "zb-v"),
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
    microbatches = pipe.program.schedule.microbatches
    return kind(stages[0] if single else stages, microbatches, loss_fn=loss)


def driven_by_torch(choices: TorchCase) -> Trained:
    case = choices.case
    pipe = pipeline_of(case)
    batches = PROBLEMS[case.problem].batches(STEPS, 2 * case.microbatches)
    pipe.compile(*batches[0].args, target=batches[0].target)
    schedule = schedule_of(choices, pipe)
    gradients, optimizer = [], torch.optim.AdamW(pipe.parameters(), lr=1e-2, weight_decay=0.1)
    for batch in batches:
        schedule.step(*batch.args, target=batch.target, losses=[])
        gradients.append(gradients_of(pipe))
        optimizer.step()
        optimizer.zero_grad()
    return Trained([], gradients, dict(pipe.state_dict()))


@pytest.mark.mostly_slow(every=9, suite=3)
@pytest.mark.parametrize(
    "choices", CASES, ids=lambda choices: f"{choices.theirs} {choices.problem}"
)
def test_gradients_are_eagers(choices: TorchCase, pool: Pool) -> None:
    ours, theirs = join(pool.run(driven_by_torch, choices)), reference(choices.case)
    for step in range(STEPS):
        assert_same_tensors(
            ours.gradients[step], theirs.gradients[step], f"gradient in step {step} of"
        )
    assert_same_tensors(ours.state, theirs.state, "state dict:")


def driven_from_a_file(path: str) -> tuple[Trained, Any]:
    """torch's runtime with its own messages, over the stages of a pipeline that has read the same
    file."""
    problem = PROBLEMS["mlp"]
    pipe = zbcompile.pipeline(problem.model(), schedule=path, loss=problem.loss, exact=True)
    microbatches = pipe.options.schedule.microbatches  # type: ignore[union-attr]
    (batch,) = problem.batches(1, 2 * microbatches)
    stages = pipe.compile(*batch.args, target=batch.target, return_outputs=True).stages()
    runtime = torch_schedules._PipelineScheduleRuntime(
        stages, microbatches, loss_fn=stages[-1].loss
    )  # type: ignore[arg-type]
    runtime._load_csv(path)
    output = runtime.step(*batch.args, target=batch.target)
    return Trained([], [gradients_of(pipe)], {}), output


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("name", ["unbalanced", "weights"])
def test_a_file_under_torchs_runtime(name: str, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text(FILES[name], encoding="utf-8")
    shares, outputs = zip(*pool.run(driven_from_a_file, str(tmp_path / "order.csv")), strict=True)
    microbatches = from_csv(FILES[name]).microbatches
    theirs = eager("mlp", microbatches, 1)
    assert_same_tensors(join(shares).gradients[0], theirs.gradients[0], "gradient of")
    (output,) = [item for item in outputs if item is not None]
    (batch,) = PROBLEMS["mlp"].batches(1, 2 * microbatches)
    assert torch.equal(
        output,
        torch.cat([PROBLEMS["mlp"].model()(*part.args) for part in batch.parts(microbatches)]),
    )


def wrong_steps() -> list[str]:
    """Returns what one rank says of a loss function of its own, of another shape, and of another
    dtype."""
    pipe, (batch,) = pipeline_of(Case("mlp", "1f1b", 1, 4)), PROBLEMS["mlp"].batches(1, 8)
    assert batch.target is not None
    (stage,) = pipe.compile(*batch.args, target=batch.target).stages()
    (x,), y, loss = batch.args, batch.target, torch.nn.functional.mse_loss
    said = []
    for inputs, target, function in (
        (x, y, loss),
        (x[:4], y[:4], stage.loss),
        (x, y.double(), stage.loss),
    ):
        with pytest.raises(zbcompile.PipelineError) as caught:
            torch_schedules.Schedule1F1B(stage, 4, loss_fn=function).step(inputs, target=target)
        said.append(str(caught.value))
    return said


def test_what_the_stages_were_not_compiled_for_is_refused(pool: Pool) -> None:
    ((loss, shape, dtype),) = pool.run(wrong_steps, ranks=1)
    assert "Build it with loss_fn=stage.loss" in loss
    assert shape.startswith("args[0] of microbatch 0 has shape [1, 32]")
    assert "target of microbatch 0 has shape [2, 32] and is torch.float64" in dtype


def driven_over_a_group_for_each_direction(choices: TorchCase) -> tuple[Trained, int]:
    """Like `driven_by_torch`, and how many groups next to the pipeline's own its messages took."""
    taken = {}

    def noted(stage: Any, source: int, destination: int) -> Any:
        result = group_between(stage, source, destination)
        taken[id(result)] = result is not stage.group
        return result

    config: Any = torch.distributed.config
    with (
        config.patch(pipeline_per_edge_p2p=True),
        patch.object(pipeline_stage, "group_between", noted),
    ):
        return driven_by_torch(choices), sum(taken.values()) if all(taken.values()) else 0


@pytest.mark.skipif(
    not hasattr(CompiledPipelineStage, "_get_p2p_group"),
    reason="torch 2.15 and later have such groups",
)
def test_messages_go_through_the_group_of_their_direction(pool: Pool) -> None:
    choices = TorchCase("ScheduleInterleavedZeroBubble", "interleaved-zb")
    result, theirs = (
        pool.run(driven_over_a_group_for_each_direction, choices),
        reference(choices.case),
    )
    assert [groups for _, groups in result] == [2, 2]
    assert_same_tensors(
        join([trained for trained, _ in result]).gradients[0], theirs.gradients[0], "gradient of"
    )


def losses_and_outputs() -> tuple[list[torch.Tensor], list[Any]]:
    choices = TorchCase("Schedule1F1B", "1f1b")
    pipe = pipeline_of(choices.case)
    batch = PROBLEMS["mlp"].batches(1, 16)[0]
    pipe.compile(*batch.args, target=batch.target, return_outputs=True)
    losses: list[torch.Tensor] = []
    schedule = schedule_of(choices, pipe)
    runs = (schedule.step, schedule.eval)
    return losses, [run(*batch.args, target=batch.target, losses=losses) for run in runs]


def test_losses_and_outputs_are_those_of_the_microbatches(pool: Pool) -> None:
    """The outputs merged, of a step and of an evaluation, as torch does where the step was compiled
    with them."""
    (first, none), (last, outputs) = pool.run(losses_and_outputs)
    model, batch = PROBLEMS["mlp"].model(), PROBLEMS["mlp"].batches(1, 16)[0]
    assert none == [None, None]
    for output in outputs:
        assert torch.equal(output, torch.cat([model(*part.args) for part in batch.parts(8)]))
    theirs = [
        torch.nn.functional.mse_loss(model(*part.args), part.target) for part in batch.parts(8)
    ]  # type: ignore[arg-type]
    assert not first
    assert_same_tensors(last, theirs, "loss of microbatch")


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation before the first step left on one rank, what it returned, and what the
    step did after it."""

    gradients: list[Tensor | None]
    losses: list[Tensor]
    returned: list[Any]
    trained: Trained


def evaluated_by_torch(choices: TorchCase) -> Evaluated:
    pipe = pipeline_of(choices.case)
    batch = PROBLEMS[choices.problem].batches(1, 16)[0]
    pipe.compile(*batch.args, target=batch.target)
    schedule = schedule_of(choices, pipe)
    losses: list[Tensor] = []
    returned = [schedule.eval(*batch.args, target=batch.target, losses=losses)]
    left = [parameter.grad for parameter in pipe.parameters()]
    returned.append(schedule.step(*batch.args, target=batch.target, losses=[]))
    return Evaluated(left, losses, returned, Trained([], [gradients_of(pipe)], {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices", [CASES[2], CASES[7]], ids=lambda choices: f"{choices.theirs} {choices.problem}"
)
def test_an_evaluation_leaves_no_trace(choices: TorchCase, pool: Pool) -> None:
    """No gradients and no numbers for outputs; the next step draws the random numbers of a first
    one."""
    ranks = pool.run(evaluated_by_torch, choices)
    assert all(value in (None, ()) for result in ranks for value in result.returned)
    assert all(gradient is None for result in ranks for gradient in result.gradients)
    theirs = reference(choices.case)
    assert_same_tensors(
        join([result.trained for result in ranks]).gradients[0], theirs.gradients[0], "gradient of"
    )
    (losses,) = [result.losses for result in ranks if result.losses]
    torch.testing.assert_close(torch.stack(losses).mean(), theirs.losses[0])


def stages_of_tied() -> None:
    batch = PROBLEMS["small-tied"].batches(1, 4)[0]
    pipeline_of(Case("small-tied", "1f1b", 2, 2)).compile(*batch.args, target=batch.target).stages()


@pytest.mark.slow
def test_parameters_on_several_stages_are_refused(pool: Pool) -> None:
    """torch's schedules have no place to sum their gradients."""
    for outcome in pool.outcomes(stages_of_tied):
        assert outcome.error == "PipelineError", outcome.trace
        assert "token.weight trains on several stages" in outcome.text


def test_another_loss_function_says_what_to_pass() -> None:
    output = OutputToCome.of(3)
    for loss in (
        torch.nn.functional.mse_loss,
        torch.nn.CrossEntropyLoss(),
        lambda output, target: (output - target).sum(),
    ):
        with pytest.raises(zbcompile.PipelineError, match=r"loss_fn=stage\.loss"):
            loss(output, torch.zeros(4, WIDTH))
    assert output.microbatch == 3


def test_one_process_has_no_stages() -> None:
    pipe = pipeline_of(Case("mlp", "1f1b", 2, 2))
    pipe.compile(torch.zeros(4, WIDTH), target=torch.zeros(4, WIDTH))
    with pytest.raises(zbcompile.PipelineError, match="torchrun"):
        pipe.stages()
