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
WRONG: list[tuple[str, Any, str]] = [
    ("name", 3, "name=3; expected a string"),
    *(
        ("memory", value, "memory=.*; expected a number above 0")
        for value in (-5.0, "80GB", float("nan"), True)
    ),
    *(("node_ranks", value, "node_ranks=.*; expected a whole number") for value in (0, -1, 1.5)),
    *(("launch", value, "launch=.*; expected a number, 0 or more") for value in ("fast", -1.0)),
    ("product_efficiency", 1.5, "product_efficiency=1.5; expected a number above 0, at most 1"),
    ("bandwidth", 1e-320, "bandwidth=1e-320; expected a number above 0, from 1e-15 to 1e"),
    *(
        ("peak", value, "peak=.*; expected a table from dtypes")
        for value in (3.0, {}, {"bf16": 1e12})
    ),
    ("peak", {"float32": "fast"}, "peak.float32='fast'; expected a number above 0"),
    *(
        ("within", value, "within=.*; expected latency .* and bandwidth")
        for value in (3.0, {"latency": 0.0}, {"latency": -1.0, "bandwidth": 1.0})
    ),
    ("colour", "red", "unknown colour"),
]


@pytest.mark.parametrize(("name", "value", "says"), WRONG)
def test_a_figure_that_cannot_be_is_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(zbcompile.PipelineError, match=f"^hardware: {says}"):
        zbcompile.pipeline(nn.Linear(2, 2), hardware={**GOOD, name: value})


def test_a_file_is_named(tmp_path: Path) -> None:
    """Through the option too, and however the file is wrong."""
    file = tmp_path / "mine.toml"
    for text, says in (
        (
            'name="m"\nbandwidth=-1.0\n[peak]\nfloat32=1e12',
            "bandwidth=-1.0; expected a number above 0",
        ),
        ('name="m"', "missing bandwidth, peak"),
        ("name=", ""),
    ):
        file.write_text(text)
        with pytest.raises(CompileError, match=rf"^{file}: {says}"):
            Hardware.read(file)
        with pytest.raises(zbcompile.PipelineError, match=rf"^hardware: {file}: {says}"):
            zbcompile.pipeline(nn.Linear(2, 2), hardware=str(file))


@pytest.mark.parametrize("case", ["nope", 3, {}, "nowhere.toml"])
def test_whatever_is_wrong_is_one_kind_of_error(case: Any) -> None:
    with pytest.raises(zbcompile.PipelineError, match="hardware"):
        zbcompile.pipeline(nn.Linear(2, 2), hardware=case)


def test_profiles_come_back_from_files_and_plain_data(tmp_path: Path) -> None:
    linked = Hardware(**GOOD, within=Connection(1e-5, 1e9))
    assert Hardware.from_dict(asdict(linked)) == linked
    file = tmp_path / "mine.toml"
    file.write_text(
        'name="mine"\nbandwidth=1e11\n[peak]\nfloat32=1e12\n[within]\nlatency=1e-5\nbandwidth=1e9\n'
    )
    assert Hardware.read(file) == linked
    for name in hardware_names():
        profile = Hardware.find(name)
        assert Hardware.from_dict(asdict(profile)) == profile


def test_ranks_of_two_nodes_have_another_connection() -> None:
    near, far = Connection(1e-5, 1e9), Connection(1e-4, 1e8)
    machine = Hardware(**GOOD, node_ranks=2, within=near, between=far)
    assert (machine.connection(0, 1), machine.connection(1, 2)) == (near, far)
    assert machine.collective_seconds(1e9, "all_gather_into_tensor") == pytest.approx(1 + 1e-5)
    assert machine.collective_seconds(1e9, "all_reduce") == pytest.approx(2 + 1e-5)


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CompileError, match=r"no profile is called .*h100-pcie, h100-sxm"):
        Hardware.find("H100")
