"""A sharded output layer trains as the unsplit model does: in one process and over gloo."""

import pytest

import zbcompile
from tests.support.pool import Pool
from tests.support.training import interpreted
from tests.support.vocabulary_training import (
    MODELS,
    VocabularyCase,
    assert_equal_within,
    batches_of,
    eager,
    join,
    model_of,
    sharded,
)
from zbcompile.errors import PipelineError
from zbcompile.passes.errors import CompileError

IN_PROCESS = (
    VocabularyCase("gpt-options", "dualpipe-v", 2, 2),
    VocabularyCase("gpt", "1f1b", 1, 1),
    VocabularyCase("gpt", "1f1b", 2, 4),
    VocabularyCase("gpt-tied", "zb-v", 2, 2, backend=interpreted),
    VocabularyCase("gpt-options", "zb-v", 1, 3, microbatches=6),
    VocabularyCase("gpt", "interleaved-zb", 1, 2),
    VocabularyCase("gpt-tied", "zb-h1", 1, 2),
)
PROCESSES = (
    VocabularyCase("gpt", "1f1b", 1, 2),
    VocabularyCase("gpt-tied", "zb-v", 2, 2),
    VocabularyCase("gpt-options", "zb-h1", 1, 4),
)


@pytest.mark.mostly_slow(every=3)
@pytest.mark.slow
@pytest.mark.parametrize("case", IN_PROCESS, ids=str)
def test_in_one_process(case: VocabularyCase) -> None:
    assert_equal_within(sharded(case), eager(case), 1e-12)


@pytest.mark.mostly_slow(every=3)
@pytest.mark.slow
@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_in_processes(case: VocabularyCase, pool: Pool) -> None:
    assert_equal_within(join(pool.run(sharded, case, ranks=case.ranks)), eager(case), 1e-12)


def rows_of_state(case: VocabularyCase) -> list[int]:
    """Returns the shapes of the head in the state dict of this rank: as a whole, and here."""
    pipe = zbcompile.pipeline(
        model_of(case),
        schedule=case.schedule,
        microbatches=4,
        loss=MODELS[case.model][1],
        vocab=case.vocab,
    )
    batch = batches_of(case)[0]
    pipe.compile(*batch.args, target=batch.target)
    head = pipe.state_dict()["head.weight"]
    return [*head.shape, *head.to_local().shape]


@pytest.mark.slow
def test_rows_are_dtensors_in_a_state_dict(pool: Pool) -> None:
    shapes = pool.run(rows_of_state, VocabularyCase("gpt", "1f1b", 1, 2), ranks=2)
    assert shapes == [[256, 32, 128, 32]] * 2


def test_what_cannot_be_is_refused() -> None:
    case = VocabularyCase("gpt", "1f1b", 1, 2)
    batch = batches_of(case)[0]
    for options, reason in (
        ({"vocab": 3}, "vocab=3; expected"),
        ({"vocab": 1, "exact": True}, "exact=True cannot use it"),
        (
            {"vocab": 1, "loss": lambda output, target: output.square().mean()},
            "vocab=1: .*Use vocab=.off",
        ),
    ):
        arguments = {"loss": MODELS["gpt"][1], **options}
        with pytest.raises((CompileError, PipelineError), match=reason):
            zbcompile.pipeline(
                model_of(case), schedule="1f1b", microbatches=4, ranks=2, **arguments
            ).compile(*batch.args, target=batch.target)
