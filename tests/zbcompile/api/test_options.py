"""The options of `zbcompile.pipeline`: defaults, checks, flags, and the sentences of the removed
ones."""

import argparse
import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from zbcompile import PipelineError
from zbcompile.cli.command_line import split_options
from zbcompile.cli.parsers import FLAGS, OPTION_FLAGS, add_options, flag_of
from zbcompile.options import OPTIONS, REMOVED, PipelineOptions, checked
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.schedules import build

SPELLED = {
    "schedule": ("1f1b", "1f1b"),
    "ranks": ("4", 4),
    "microbatches": ("8", 8),
    "chunks": ("2", 2),
    "recompute": ("64MiB", 64 << 20),
    "balance": ("blocks.1,blocks.2", ("blocks.1", "blocks.2")),
    "hardware": ("a100-80g", Hardware.find("a100-80g")),
    "memory": ("80GiB", 80 << 30),
    "optimizer_state": ("1.5", 1.5),
    "accumulate_dtype": ("float64", torch.float64),
    "vocab": ("2", 2),
    "pairs": ("given", "given"),
    "loss_reduction": ("sum", "sum"),
    "seed": ("7", 7),
    "split": ("mask=1", {"mask": 1}),
    "backend": ("inductor", "inductor"),
    "exact": ("", True),
}


def test_keywords_are_the_options() -> None:
    parameters = dict(inspect.signature(zbcompile.pipeline).parameters)
    del parameters["model"], parameters["unknown"]
    assert {name: p.default for name, p in parameters.items()} == OPTIONS
    for name in OPTIONS:
        assert checked(name, OPTIONS[name]) == OPTIONS[name]
        assert f"\n        {name}: " in (zbcompile.pipeline.__doc__ or "")


def test_every_option_of_a_graph_is_a_flag() -> None:
    assert {item.name for item in fields(CompileOptions)} < set(FLAGS)
    assert set(FLAGS) < OPTION_FLAGS.keys() == SPELLED.keys()


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_says_what_to_do(name: str) -> None:
    says = rf"^zbcompile\.pipeline has no option {name}= any more: .."
    with pytest.raises(TypeError, match=says) as caught:
        zbcompile.pipeline(nn.Linear(2, 2), **{name: 1})
    assert REMOVED[name] in str(caught.value)
    assert name not in OPTIONS


@pytest.mark.parametrize("name", SPELLED)
def test_flags(name: str) -> None:
    """Flags of a command line arrive as the keyword would; others are left out."""
    parser = argparse.ArgumentParser()
    add_options(parser, SPELLED)
    text, value = SPELLED[name]
    results = split_options(parser.parse_args([flag_of(name), *([text] if text else [])]))
    assert results["keywords"].keys() == {name}
    assert getattr(PipelineOptions(**results["keywords"]), name) == value
    assert flag_of(name) in parser.format_help()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ranks", "2", "ranks='2'; expected a positive whole number of ranks."),
        ("ranks", 0, "ranks=0; expected a positive whole number of ranks."),
        ("mesh", "pp", "mesh='pp'; expected a DeviceMesh."),
        ("microbatches", 2.0, "microbatches=2.0; expected a positive whole number of microb"),
        ("microbatches", True, "microbatches=True; expected a positive whole number of micr"),
        ("example", (1, 2, 3), "example=(1, 2, 3); expected (args, kwargs) of one batch."),
        ("split", {"mask": "no"}, "split={'mask': 'no'}; expected a mapping of inputs to False, "),
        ("timeout", 0, "timeout=0; expected a positive number of seconds."),
        ("exact", "yes", "exact='yes'; expected True or False."),
        ("vocab", True, 'vocab=True; expected "off", "auto", 1 or 2 (barriers).'),
        ("recompute", "selectiv", 'recompute=\'selectiv\'; expected "off", "hints", '),
        ("recompute", ["off", 2.5], "recompute=['off', 2.5]; expected \"off\""),
        ("accumulate_dtype", torch.int32, "accumulate_dtype=torch.int32; expected a floating-"),
        ("backend", "tpu", 'backend=\'tpu\'; expected "fx", "inductor", or a function'),
        ("schedule", nn.Linear(2, 2), "schedule=Linear(in_features=2, out_features=2, bias=True)"),
        ("memory", "80 Gb", "memory='80 Gb'; expected a positive number of bytes: "),
        ("memory", 0.5, "memory=0.5; expected a positive number of bytes: "),
        ("max_shapes", 0, "max_shapes=0; expected a positive whole number of programs"),
        ("loss", list(range(100)), "loss=<list>; expected a function loss(output, target)."),
    ],
)
def test_wrong_values(name: str, value: Any, says: str) -> None:
    with pytest.raises(PipelineError) as caught:
        zbcompile.pipeline(nn.Linear(2, 2), **{name: value})
    assert str(caught.value).startswith(says)


def test_units_of_bytes() -> None:
    texts = {"1.5kB": 1500, "1 KB": 1000, "2MiB": 2 << 20, "1TB": 10**12}
    assert {text: checked("memory", text) for text in texts} == texts


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="no option microbatch=; did you mean microbatches="):
        zbcompile.pipeline(nn.Linear(2, 2), microbatch=2)


def tiny(**options: Any) -> zbcompile.Pipeline:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    return zbcompile.pipeline(model, loss=nn.functional.mse_loss, **options)


@pytest.mark.slow
def test_options_of_a_saved_program(tmp_path: Path) -> None:
    """A loaded program has the options that it was compiled with."""
    options: dict[str, Any] = {"recompute": ("full", 0.5), "balance": ("4",), "memory": 1 << 30}
    options |= {"accumulate_dtype": torch.float32, "seed": 3, "split": {"args[0]": True}}
    pipe = tiny(schedule="1f1b", ranks=2, microbatches=2, **options)
    program = pipe.compile(torch.ones(4, 4), target=torch.ones(4, 4)).program
    program.save(tmp_path)
    loaded = zbcompile.load(tmp_path).program
    assert (loaded.choices, loaded.step) == (program.choices, program.step)


def test_misspelt_attributes_and_no_model_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"takes an nn.Module.*received NoneType"):
        zbcompile.pipeline(None)
    pipe, says = tiny(ranks=2, schedule="1f1b"), r"no attribute microbatches\. Options are fixed"
    with pytest.raises(AttributeError, match=rf"{says}.*zbcompile\.pipeline"):
        pipe.microbatches = 8  # type: ignore[attr-defined]
    pipe.record, pipe.step_index = True, 5


@pytest.mark.slow
def test_a_schedule_or_the_batch_bring_ranks_and_microbatches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe = tiny(schedule=build("1f1b", ranks=2, microbatches=4))
    pipe.compile(torch.ones(8, 4), target=torch.ones(8, 4))
    assert (pipe.program.schedule.ranks, pipe.program.schedule.microbatches) == (2, 4)
    assert "ranks" not in capsys.readouterr().out
    pipe = tiny(schedule="zb-v", ranks=4).compile(torch.ones(74, 4), target=torch.ones(74, 4))
    assert pipe.program.schedule.microbatches == 37
    assert "using 37, " in capsys.readouterr().out
