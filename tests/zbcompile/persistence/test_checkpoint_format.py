"""The format of checkpoints: values that are no tensors, and pickles, which are refused. Damage:
test_damage.py."""

import json
from collections import Counter, OrderedDict
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import lr_scheduler as lr

import zbcompile
from benchmarks.damage_sweep import Trap
from zbcompile.persistence.checkpoint_values import from_data, to_data

Error = zbcompile.PipelineError


def typed(value: Any) -> Any:
    """`value` with the type of everything in it, so that 1, True and 1.0 differ."""
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(item)) for key, item in value.items()]
    items = isinstance(value, list | tuple)
    return type(value), [typed(item) for item in value] if items else value


def test_values_come_back_as_they_were() -> None:
    leaves = [1, 1.0, True, None, -0.0, 2**80, "\u00e9\0", b"\xff", 2j, float("inf"), (), [], {}]
    nested = {(1, "k"): OrderedDict(b=1, a=(2, [3])), b"z": Counter([5, 5]), 1.5: {None: {}}}
    value = [*leaves, tuple(leaves), dict(enumerate(leaves)), {"1": nested, 1: 0}]
    data = json.loads(json.dumps(to_data(value, "extra", {}), allow_nan=False))
    assert typed(from_data(data, {})) == typed(value)


endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, object()]}, r"extra\.a\.1 is a builtins\.object"),
        ({"a": Path("x")}, r"extra\.a is a pathlib"),
        ([{1: len}], r"extra\.0\.1 is a builtins\.builtin_function"),
        (torch.ones(2).to_sparse(), "extra is a torch"),
        ((1, torch.ones(2, device="meta")), r"extra\.1 is a torch"),
        (endless, "contains itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_form_is_refused_by_its_place(value: Any, place: str, tmp_path: Path) -> None:
    with pytest.raises(Error, match=place):
        zbcompile.save_checkpoint(tmp_path, nn.Linear(1, 1), extra=value)
    assert not list(tmp_path.iterdir())


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    def rotary() -> nn.Module:
        model = nn.Module()
        model.register_buffer("angles", torch.randn(3, dtype=torch.complex64))
        model.register_buffer("count", torch.randint(7, ()))
        model.register_buffer("empty", torch.empty(0, 4))
        model.weight = nn.Parameter(torch.randn(4, 2).t())
        return model

    model, second = rotary(), rotary()
    zbcompile.save_checkpoint(tmp_path, model)
    zbcompile.load_checkpoint(tmp_path, second)
    read = second.state_dict()
    assert all(torch.equal(value, read[name]) for name, value in model.state_dict().items())
    model.angles = model.angles.to(torch.complex128)  # type: ignore[operator]
    with pytest.raises(
        Error, match=r"model\.angles is torch\.complex128, which safetensors cannot"
    ):
        zbcompile.save_checkpoint(tmp_path, model)


SCHEDULERS: list[Any] = [
    lambda o: lr.MultiStepLR(o, [1, 3]),
    lambda o: lr.OneCycleLR(o, 0.1, 10),
    lr.ReduceLROnPlateau,
    lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.CosineAnnealingLR(o, 5)], [2]),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers_and_tensor_options_come_back(make: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.99), amsgrad=True)
    scheduler = make(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step(*([1.0] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))
    zbcompile.save_checkpoint(tmp_path, model, optimizer, extra=scheduler.state_dict())
    second = torch.optim.AdamW(model.parameters())
    at = zbcompile.load_checkpoint(tmp_path, model, second)
    assert typed(at.extra) == typed(scheduler.state_dict())
    assert pformat(second.state_dict()) == pformat(optimizer.state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pickles_are_never_read(tmp_path: Path) -> None:
    """Of torch.distributed.checkpoint: one line. A folder without a checkpoint is said to be one."""
    old, trap, model = tmp_path / "step-00000003", tmp_path / "trap", nn.Linear(3, 2)
    dcp.save({"model": model.state_dict(), "trap": Trap(trap)}, checkpoint_id=old, no_dist=True)
    for path in (old, tmp_path):
        with pytest.raises(Error, match=r"pickles, which are never read\.$"):
            zbcompile.load_checkpoint(path, model)
    with pytest.raises(Error, match=r"pickles, which are never read"):
        zbcompile.verify_checkpoint(old)
    assert not trap.exists()
    (empty := tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing", empty):
        with pytest.raises(Error, match=f"there is no checkpoint in {path}"):
            zbcompile.verify_checkpoint(path)
