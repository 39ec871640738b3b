"""Every option is said once: keyword, check, docstring, flag and manifest entry come from its description."""

import argparse
import inspect
import json
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import zbcompile
from zbcompile import Memory, PipelineError, Vocab
from zbcompile.cli.command_line import add_flags, flag_of, split_options
from zbcompile.cli.compile_arguments import FLAGS
from zbcompile.options import GROUPS, OPTIONS, PARAGRAPHS, Options, checked, options_from, options_in
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.machine.hardware import Hardware
from zbcompile.passes.option import read_bytes, read_options
from zbcompile.program.manifest import _options_to_data
from zbcompile.program.step_options import StepOptions
from zbcompile.schedules import build

GROUPED = {option for keyword, group in GROUPS.items() for option in options_in(group).values() if option != keyword}
SPELLED = {
    "schedule": ("1f1b", "1f1b"),
    "ranks": ("4", 4),
    "microbatches": ("8", 8),
    "chunks": ("2", 2),
    "recompute": ("64MiB", 64 << 20),
    "balance": ("blocks.1,blocks.2", ("blocks.1", "blocks.2")),
    "hardware": ("a100-80g", Hardware.find("a100-80g")),
    "boundary_bytes": ("4096", 4096),
    "memory": ("80GiB", 80 << 30),
    "optimizer_state": ("1.5", 1.5),
    "accumulate_dtype": ("float64", torch.float64),
    "vocab": ("2", 2),
    "vocab_logits": ("keep", "keep"),
    "pairs": ("given", "given"),
    "channels": ("tp=2e-05:50GB,cp=0.001:1GB", "tp=2e-05:50GB,cp=0.001:1GB"),
    "loss_reduction": ("sum", "sum"),
    "seed": ("7", 7),
    "split": ("mask=1", {"mask": 1}),
    "backend": ("inductor", "inductor"),
    "timeout": ("60", 60.0),
    "search_seconds": ("5", 5.0),
    "exact": ("", True),
    "relay": ("", True),
    "weight_recompute": ("", True),
    "debug_nan": ("", True),
}


def test_keywords_are_the_options() -> None:
    parameters = dict(inspect.signature(zbcompile.pipeline).parameters)
    del parameters["model"]
    assert parameters.keys() == OPTIONS.keys() - GROUPED
    assert {name: p.default for name, p in parameters.items()} == {n: OPTIONS[n].default for n in parameters}


def test_every_option_is_described() -> None:
    assert PARAGRAPHS.keys() == OPTIONS.keys() == {each.name for each in fields(Options)}
    for name in OPTIONS.keys() - GROUPED:
        assert f"\n        {name}: {PARAGRAPHS[name][:40]}" in (zbcompile.pipeline.__doc__ or "")
    for group in GROUPS.values():
        assert all(f"\n        {part}: " in (group.__doc__ or "") for part in options_in(group))


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults_are_among_what_is_accepted(name: str) -> None:
    assert checked(name, OPTIONS[name].default) == OPTIONS[name].default


def test_every_option_of_a_graph_is_a_flag() -> None:
    assert {each.name for each in fields(Choices)} < set(FLAGS)
    assert set(FLAGS) < SPELLED.keys()


@pytest.mark.parametrize("name", SPELLED)
def test_flags(name: str) -> None:
    """What is written on a command line arrives as the keyword would; what is not written is left out."""
    parser = argparse.ArgumentParser()
    add_flags(parser, SPELLED)
    text, value = SPELLED[name]
    found = split_options(parser.parse_args([flag_of(name), *([text] if text else [])]))
    assert found["given"].keys() == {name}
    assert getattr(Options(**found["given"]), name) == value
    assert flag_of(name) in parser.format_help()


@given(
    st.fractions(min_value=1, max_value=10**6),
    st.sampled_from(["B", "kB", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]),
    st.sampled_from(["", " ", "  "]),
)
def test_bytes_as_text(number: Fraction, unit: str, space: str) -> None:
    power = "BkMGT".index(unit[0].replace("K", "k"))
    text = f"{float(number):.3f}"
    assert read_bytes(f"{text}{space}{unit}") == int(Fraction(text) * (1024 if "i" in unit else 1000) ** power)


@given(st.one_of(st.integers(1, 1 << 60), st.floats(1, 1e18)))
def test_bytes_as_a_number(number: float) -> None:
    assert read_bytes(number) == int(number)
    assert checked("memory", number) == int(number)


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "80 Gb", "80gib", "80G", "-1GB", "1,5GB", "1e999", "٣GB", "1 2", True, -1, 0.5, float("nan"), []],
)
def test_no_bytes(text: Any) -> None:
    with pytest.raises(PipelineError, match=r"^memory=.*; expected a positive number of bytes: .*\"80GiB\".*TiB"):
        options_from({"memory": text})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ranks", "2", "ranks='2'; expected a positive whole number of ranks."),
        ("ranks", 0, "ranks=0; expected a positive whole number of ranks."),
        ("mesh", "pp", "mesh='pp'; expected a DeviceMesh."),
        ("microbatches", 2.0, "microbatches=2.0; expected a positive whole number of microbatches."),
        ("microbatches", True, "microbatches=True; expected a positive whole number of microbatches."),
        ("example", (1, 2, 3), "example=(1, 2, 3); expected (args, kwargs) of one batch."),
        ("split", {"mask": "no"}, "split={'mask': 'no'}; expected a mapping of inputs to False, True or the dimension"),
        ("timeout", 0, "timeout=0; expected a positive number of seconds."),
        ("exact", "yes", "exact='yes'; expected True or False."),
        ("vocab", True, 'vocab=True; expected "off", "auto", 1 or 2 (barriers).'),
        ("recompute", "selectiv", 'recompute=\'selectiv\'; expected "off", "hints", "selective", "full", a price'),
        ("accumulate_dtype", torch.int32, "accumulate_dtype=torch.int32; expected a floating-point dtype"),
        ("backend", "tpu", 'backend=\'tpu\'; expected "fx", "inductor", or a function'),
        ("schedule", nn.Linear(2, 2), "schedule=Linear(in_features=2, out_features=2, bias=True); expected a name"),
        ("loss", list(range(100)), "loss=<list>; expected a function loss(output, target)."),
    ],
)
def test_wrong_values(name: str, value: Any, says: str) -> None:
    with pytest.raises(PipelineError) as caught:
        zbcompile.pipeline(nn.Linear(2, 2), **{name: value})
    assert str(caught.value).startswith(says)


def test_load_checks_them_too() -> None:
    with pytest.raises(PipelineError, match="ranks='2'; expected a positive whole number"):
        zbcompile.load("nowhere", ranks="2")  # type: ignore[arg-type]


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="no option microbatch=; did you mean microbatches="):
        zbcompile.pipeline(nn.Linear(2, 2), microbatch=2)  # type: ignore[call-overload]


OLD = {"memory": 70 << 30, "optimizer_state": 1.0, "boundary_bytes": 4096, "vocab": 1, "vocab_logits": "keep"}


def test_groups() -> None:
    asked = options_from({"memory": Memory("70GiB", 1.0, "4KiB"), "vocab": Vocab(1, "keep")})
    assert asked == Options(**OLD)  # type: ignore[arg-type]
    assert (Vocab().barriers, Memory()) == ("auto", Memory(None, 2.0, None))
    with pytest.raises(PipelineError, match=r"^Memory\.boundary_bytes='8 Mb'; expected a positive number of bytes"):
        Memory(boundary_bytes="8 Mb")
    with pytest.raises(PipelineError, match=r"^Memory\.optimizer_state=-1; expected bytes per byte of parameter"):
        Memory(optimizer_state=-1)


def test_old_keywords_work_and_say_the_new_spelling() -> None:
    with pytest.warns(DeprecationWarning, match="is deprecated; write") as warned:
        assert options_from(OLD) == Options(**OLD)  # type: ignore[arg-type]
    first, second = (str(each.message) for each in warned)
    assert "optimizer_state=, boundary_bytes=" in first
    assert first.endswith("write memory=zbcompile.Memory(limit=75161927680, optimizer_state=1.0, boundary_bytes=4096)")
    assert second.endswith("write vocab=zbcompile.Vocab(barriers=1, logits='keep')")
    with pytest.warns(DeprecationWarning, match=r"Vocab\(barriers='off', logits='keep'\)") as alone:
        zbcompile.pipeline(ranks=1, vocab_logits="keep")  # type: ignore[call-overload]
    assert alone[0].filename == __file__
    with pytest.raises(PipelineError, match=r"boundary_bytes= and memory=Memory\(...\) are both given"):
        options_from({"boundary_bytes": 1, "memory": Memory()})


SAVED = """{"exact": false, "recompute": "full", "balance": ["2"], "boundary_bytes": 4096, "memory": 1048576,
"optimizer_state": 1.0, "accumulate_dtype": "float32", "weight_recompute": true, "vocab": "off", "vocab_logits": "keep"}
"""


def test_entries_of_a_program_saved_before_options_had_descriptions() -> None:
    read = read_options(Choices, json.loads(SAVED))
    assert (read.balance, read.accumulate_dtype, read.memory) == (("2",), torch.float32, 1 << 20)
    since = {"pairs": "auto", "channels": None, "hardware": None, "relay": False}
    assert _options_to_data(read) == json.loads(SAVED) | since
    step = replace(StepOptions(), seed=3, split={"x": True})
    assert read_options(StepOptions, json.loads(json.dumps(_options_to_data(step)))) == step


class Tiny(nn.Sequential):
    def __init__(self, depth: int = 8) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(depth)))


def tiny(**options: Any) -> zbcompile.Pipeline:
    return zbcompile.pipeline(Tiny(), loss=nn.functional.mse_loss, **options)


def test_none_is_no_model() -> None:
    with pytest.raises(PipelineError, match=r"takes an nn.Module.*received NoneType"):
        zbcompile.pipeline(None)  # type: ignore[call-overload]


def test_misspelt_attributes_are_refused() -> None:
    pipe = tiny(ranks=2, schedule="1f1b")
    with pytest.raises(AttributeError, match=r"no attribute microbatches\. Options are fixed.*zbcompile\.pipeline"):
        pipe.microbatches = 8  # type: ignore[attr-defined]
    pipe.record, pipe.step_index = True, 5


def test_a_scaler_is_for_the_pipelines_device() -> None:
    pipe = tiny(ranks=2, schedule="1f1b")
    with pytest.raises(PipelineError, match="device='cuda', but the pipeline is on cpu"):
        zbcompile.GradScaler(pipe, device="cuda")
    zbcompile.GradScaler(pipe, device="cpu", init_scale=4.0)


def test_a_schedule_brings_its_own_ranks_and_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tiny(schedule=build("1f1b", ranks=2, microbatches=4))
    pipe.compile(torch.ones(8, 4), target=torch.ones(8, 4))
    assert (pipe.program.schedule.ranks, pipe.program.schedule.microbatches) == (2, 4)
    assert "ranks" not in capsys.readouterr().out


@pytest.mark.parametrize(("rows", "count"), [(8, 8), (16, 16), (24, 24), (74, 37)])
def test_the_default_count_divides_the_batch(rows: int, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tiny(schedule="zb-v", ranks=4)
    assert capsys.readouterr().out == ""
    pipe.compile(torch.ones(rows, 4), target=torch.ones(rows, 4))
    assert pipe.program.schedule.microbatches == count
    assert f"using {count}, " in capsys.readouterr().out
