"""Profiles of hardware: what cannot be is refused when one is made, whole files are read back."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zbcompile
from zbcompile.passes.cost.hardware import Connection, Hardware, hardware_names
from zbcompile.passes.errors import CompileError

GOOD = {"name": "mine", "peak": {"float32": 1e12}, "bandwidth": 1e11}
WRONG: dict[str, tuple[list[Any], str]] = {
    "name": ([3], "name=3; expected a string"),
    "memory": ([-5.0, "80GB", float("nan"), True], "memory=.*; expected a number above 0"),
    "node_ranks": ([0, 1.5], "node_ranks=.*; expected a whole number"),
    "launch": (["fast", -1.0], "launch=.*; expected a number, 0 or more"),
    "product_efficiency": ([1.5], "product_efficiency=1.5; expected a number above 0, at most 1"),
    "bandwidth": ([1e-320], "bandwidth=1e-320; expected a number above 0, from 1e-15 to 1e"),
    "peak": ([3.0, {}, {"bf16": 1e12}], "peak=.*; expected a table from dtypes"),
    "within": ([3.0, {"latency": 0.0}], "within=.*; expected latency .* and bandwidth"),
    "colour": (["red"], "unknown colour"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_figure_that_cannot_be_is_refused(name: str) -> None:
    for value in WRONG[name][0]:
        with pytest.raises(zbcompile.PipelineError, match=f"^hardware: {WRONG[name][1]}"):
            zbcompile.pipeline(nn.Linear(2, 2), hardware={**GOOD, name: value})


def test_a_file_and_what_is_no_profile_are_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    negative = 'name="m"\nbandwidth=-1.0\n[peak]\nfloat32=1e12'
    for text, says in ((negative, "bandwidth=-1.0"), ('name="m"', "missing bandw"), ("name=", "")):
        file.write_text(text)
        with pytest.raises(zbcompile.PipelineError, match=rf"^hardware: {file}: {says}"):
            zbcompile.pipeline(nn.Linear(2, 2), hardware=str(file))
    for case in ("nope", 3, {}, "nowhere.toml"):
        with pytest.raises(zbcompile.PipelineError, match="hardware"):
            zbcompile.pipeline(nn.Linear(2, 2), hardware=case)
    with pytest.raises(CompileError, match=r"no profile is called .*h100-pcie, h100-sxm"):
        Hardware.find("H100")


def test_profiles_come_back_from_files_and_plain_data(tmp_path: Path) -> None:
    file, linked = tmp_path / "mine.toml", Hardware(**GOOD, within=Connection(1e-5, 1e9))
    text = 'name="mine"\nbandwidth=1e11\n[peak]\nfloat32=1e12\n[within]\n'
    file.write_text(f"{text}latency=1e-5\nbandwidth=1e9\n")
    assert Hardware.read(file) == linked
    for profile in (linked, *map(Hardware.find, hardware_names())):
        assert Hardware.from_dict(asdict(profile)) == profile


def test_ranks_of_two_nodes_have_another_connection() -> None:
    near, far = Connection(1e-5, 1e9), Connection(1e-4, 1e8)
    machine = Hardware(**GOOD, node_ranks=2, within=near, between=far)
    assert (machine.connection(0, 1), machine.connection(1, 2)) == (near, far)
    assert machine.collective_seconds(1e9, "all_gather_into_tensor") == pytest.approx(1 + 1e-5)
    assert machine.collective_seconds(1e9, "all_reduce") == pytest.approx(2 + 1e-5)
