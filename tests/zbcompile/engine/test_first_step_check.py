"""The first step refuses gradients, buffers and losses that differ between ranks which should
compute the same."""

import pytest

import zbcompile
from tests.support.faulty_models import FAULTS, RIGHT, step_of
from tests.support.meshes import mesh_of
from tests.support.pool import Pool


def first_steps(faults: list[tuple[str, bool]]) -> list[str]:
    """Returns the refusal of each model's first step; empty if there is none."""
    said = []
    for fault, right in faults:
        mesh = mesh_of(pp=1, **{FAULTS[fault].dimension: 2})
        model, options, x = step_of(fault, right, mesh)
        pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", microbatches=1, **options)
        try:
            pipe.step(x, target=x)
            said.append("")
        except zbcompile.PipelineError as error:
            said.append(str(error))
        pipe.close()
    return said


@pytest.mark.slow
def test_the_first_step_names_what_differs(pool: Pool) -> None:
    """The parameter or buffer and the dimension, on both ranks; models without a fault are not
    refused."""
    cases = [(fault, False) for fault in FAULTS] + [(fault, True) for fault in RIGHT.values()]
    one, second = pool.run(first_steps, cases, ranks=2, timeout=240)
    assert one == second
    for (fault, right), text in zip(cases, one, strict=True):
        message = None if right else FAULTS[fault].says
        assert (
            (not text) if message is None else (message in text and FAULTS[fault].dimension in text)
        ), (fault, right, text)
