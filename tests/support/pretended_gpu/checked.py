"""A pytest plugin (`-p tests.support.pretended_gpu.checked`): a test whose processes go against
CUDA's order fails."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pretended_gpu.build import faults_in


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    folder = Path(os.environ["PRETENDED_GPU_FAULTS"])
    before = set(faults_in(folder))
    yield
    new = [fault for fault in faults_in(folder) if fault not in before]
    if new:
        pytest.fail("\n".join(["against CUDA's order:", *new]), pytrace=False)
