"""Operations counted from a graph's values, beside torch's own counter around a run of it."""

import pytest

from tests.runtime.training import ROWS, Case, pipeline_of, problem_of
from zbcompile.passes.costs import count_flops, count_flops_by_run
from zbcompile.passes.torch_private import FakeTensorMode

MODELS = ("gpt-tied", "skips", "llama", "mixtral", "unet")


@pytest.mark.parametrize("model", MODELS)
def test_as_torchs_counter(model: str) -> None:
    case = Case(model, "zb-h1", 2, 2)
    batch = problem_of(model).batches(1, case.microbatches * ROWS)[0]
    pipe = pipeline_of(case)
    pipe.compile(*batch.args, **batch.kwargs, **({} if batch.target is None else {"target": batch.target}))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for stage in pipe.program.stages:
        for piece in stage.pieces.values():
            counted = count_flops(piece.module, mode)
            assert counted == count_flops_by_run(piece.module, mode)
            assert sum(counted.values()) > 0
