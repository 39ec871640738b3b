"""The format of checkpoints: values that are no tensors, chunks of tensors, damage, and pickles,
which are refused."""

import json
from collections import Counter, OrderedDict
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import zbcompile
from tests.support.generated import examples
from zbcompile.persistence.checkpoint_values import from_data, to_data

numbers = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
hashable = st.one_of(numbers, st.tuples(st.integers(), st.text()))
values = st.recursive(
    st.one_of(numbers, st.complex_numbers(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(hashable, inner),
        st.dictionaries(st.text(), inner).map(OrderedDict),
        st.lists(st.integers()).map(Counter),
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """`value` with the type of everything in it, so that 1, True and 1.0 differ."""
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(item)) for key, item in value.items()]
    return (
        (type(value), [typed(item) for item in value])
        if isinstance(value, list | tuple)
        else (type(value), value)
    )


@pytest.mark.slow
@given(values)
@examples(40)
def test_values_come_back_as_they_were(value: Any) -> None:
    data = json.loads(json.dumps(to_data(value, "extra", {}), allow_nan=False))
    assert typed(from_data(data, {})) == typed(value)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, object()]}, r"extra\.a\.1 is a builtins\.object"),
        ({"a": Path("x")}, r"extra\.a is a pathlib"),
        ([{1: len}], r"extra\.0\.1 is a builtins\.builtin_function"),
        (torch.ones(2).to_sparse(), "extra is a torch"),
        ((1, torch.ones(2, device="meta")), r"extra\.1 is a torch"),
    ],
)
def test_what_has_no_form_is_refused_by_its_place(value: Any, place: str, tmp_path: Path) -> None:
    with pytest.raises(zbcompile.PipelineError, match=place):
        zbcompile.save_checkpoint(tmp_path, nn.Linear(1, 1), extra=value)
    assert not list(tmp_path.iterdir())


def test_a_list_that_contains_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(zbcompile.PipelineError, match="contains itself"):
        zbcompile.save_checkpoint(tmp_path, nn.Linear(1, 1), extra=endless)


class Rotary(nn.Module):
    """Buffers of complex numbers, and of none of a tensor's usual shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.empty(0, 4))
        self.weight = nn.Parameter(torch.randn(4, 2).t())


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    model, second = Rotary(), Rotary()
    zbcompile.save_checkpoint(tmp_path, model)
    zbcompile.load_checkpoint(tmp_path, second)
    assert all(
        torch.equal(value, second.state_dict()[name]) for name, value in model.state_dict().items()
    )
    model.angles = model.angles.to(torch.complex128)
    with pytest.raises(
        zbcompile.PipelineError,
        match=r"model\.angles is torch\.complex128, which safetensors cannot",
    ):
        zbcompile.save_checkpoint(tmp_path, model)


SCHEDULERS: list[Any] = [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
        [2],
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers_and_tensor_options_come_back(make: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.99), amsgrad=True)
    scheduler = make(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step(
        *((1.0,) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else ())
    )
    zbcompile.save_checkpoint(tmp_path, model, optimizer, extra=scheduler.state_dict())
    second = torch.optim.AdamW(model.parameters())
    at = zbcompile.load_checkpoint(tmp_path, model, second)
    assert typed(at.extra) == typed(scheduler.state_dict())
    assert pformat(second.state_dict()) == pformat(optimizer.state_dict())


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def pickled(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, trap: Path) -> Path:
    """A checkpoint as torch.distributed.checkpoint writes it, with a trap in it."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optimizer": moments, "trap": Bomb(trap)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pickles_are_never_read(
    trained: tuple[nn.Linear, torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Of torch.distributed.checkpoint: one line."""
    old, trap = pickled(tmp_path / "step-00000003", *trained, tmp_path / "trap"), tmp_path / "trap"
    model = nn.Linear(3, 2)
    for path in (old, tmp_path):
        with pytest.raises(zbcompile.PipelineError, match=r"pickles, which are never read\.$"):
            zbcompile.load_checkpoint(path, model)
    with pytest.raises(zbcompile.PipelineError, match=r"pickles, which are never read"):
        zbcompile.verify_checkpoint(old)
    assert not trap.exists()


def test_a_folder_that_is_missing_or_empty_is_said_to_be_so(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(zbcompile.PipelineError, match=f"there is no checkpoint in {path}"):
            zbcompile.verify_checkpoint(path)


def test_damage_is_found(tmp_path: Path) -> None:
    """A load checks the index, and sizes and headers of files; `verify_checkpoint` every byte."""
    model = nn.Linear(2, 2)
    for step in (1, 2):
        model.bias.data.fill_(step)
        newest = zbcompile.save_checkpoint(tmp_path, model, step=step)
    file = newest / "part-00000.safetensors"
    full = file.read_bytes()
    damage = {
        r"its SHA-256 differs": full[:-1] + bytes([full[-1] ^ 1]),
        r"its header differs": (
            full.replace(b"float", b"float").replace(b"BF16", b"F16 ").replace(b"U8", b"I8")
        ),
        r"has another size": full[:-1],
    }
    for message, content in damage.items():
        file.write_bytes(content)
        if "SHA" not in message:
            with pytest.raises(zbcompile.PipelineError, match=message):
                zbcompile.load_checkpoint(tmp_path, model)
        with pytest.raises(
            zbcompile.PipelineError, match=r"SHA-256 differs|has another size|header differs"
        ):
            zbcompile.verify_checkpoint(tmp_path)
    zbcompile.verify_checkpoint(tmp_path / "step-00000001")
    assert zbcompile.load_checkpoint(tmp_path / "step-00000001", model).step == 1
    assert model.bias.tolist() == [1, 1]


def test_what_is_no_folder_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(zbcompile.PipelineError, match=f"{name}: it is not a folder"):
            zbcompile.save_checkpoint(tmp_path / name, nn.Linear(1, 1))
