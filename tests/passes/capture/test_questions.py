"""What forward asks about the values of its inputs, and the guards that ask it again."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbcompile.passes.capture.eagers_answers import _in_text
from zbcompile.passes.capture.export import capture
from zbcompile.passes.capture.guards import Guards, read_answers
from zbcompile.passes.errors import CaptureError

ROWS, WIDTH = 3, 4
Question = Callable[[Tensor, Tensor], Any]


def _written(mask: Tensor, ids: Tensor) -> bool:
    counts = torch.zeros(ROWS, dtype=torch.int64)
    counts[1] = mask[0].sum()
    counts += mask.sum(1)
    return bool((counts > 3).any())


DECISIONS: tuple[Question, ...] = (
    lambda mask, ids: bool(mask.all()),
    lambda mask, ids: bool(mask.bool().any(1).all()),
    lambda mask, ids: bool(mask.sum() == mask.numel()),
    lambda mask, ids: 5 in ids,
    lambda mask, ids: torch.equal(mask[0], mask[1]),
    lambda mask, ids: torch.allclose(mask.float(), ids.float() / 2),
    lambda mask, ids: (ids.diff(dim=-1) > 0).any().is_nonzero(),
    lambda mask, ids: bool(torch.vmap(lambda row: row.sum())(mask).max() > 2),
    lambda mask, ids: bool((ids * torch.arange(WIDTH)).sum() % 2),
    lambda mask, ids: torch.is_nonzero(input=mask.sum() - 9),
    lambda mask, ids: torch.equal(other=mask[0], input=mask[2]),
    _written,
)
NUMBERS: tuple[Question, ...] = (
    lambda mask, ids: mask.sum().item(),
    lambda mask, ids: int(ids.max()),
    lambda mask, ids: len(range(mask.sum(1).min())),
)


class Asking(nn.Module):
    """Asks about its inputs; `decides` says whether the answers matter."""

    def __init__(self, questions: tuple[Question, ...], decides: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.questions, self.decides = questions, decides
        self.said: list[Any] = []

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        said = [ask(mask, ids) for ask in self.questions]
        self.said[:] = said
        total = self.layer(x).sum()
        for answer in said if self.decides else ():
            total = total * 2 if answer else total + 1
        return total


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 3 + seed % 5, (ROWS, WIDTH), generator=generator)
    return torch.ones(ROWS, WIDTH), (torch.rand(ROWS, WIDTH, generator=generator) > 0.2 * (seed % 3)).long(), ids


def asked(guards: Guards, given: tuple[Tensor, ...]) -> list[Any]:
    return list(read_answers(guards.begin({f"args[{i}]": value for i, value in enumerate(given)})))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("questions", [NUMBERS, DECISIONS], ids=["numbers", "decisions"])
def test_guards_answer_as_eager_does(questions: tuple[Question, ...]) -> None:
    """For a hundred microbatches; the answers of one of them, given to the capture of another, give the same graph."""
    model = Asking(questions)
    guards = capture(model, inputs(0), {}).guards
    assert guards is not None
    for seed in range(100):
        model(*inputs(seed))
        assert asked(guards, inputs(seed)) == model.said
    other = capture(model, inputs(1), {})
    assert other.guards is not None
    told = capture(model, inputs(0), {}, given=other.guards.given)
    assert told.module.code == other.module.code
    assert told.guards is not None
    assert told.guards.given == other.guards.given != guards.given


def test_numbers_that_are_only_read_stay_open() -> None:
    """A program per batch, for a number that is only logged, would be absurd."""
    with pytest.warns(UserWarning, match="reads a number out of a tensor"):
        captured = capture(Asking(NUMBERS[:1], decides=False), inputs(0), {})
    assert captured.guards is None


def test_tensors_of_other_shapes_are_not_equal() -> None:
    """Also if all elements are, once broadcast; shapes are fixed, so that is no question."""
    model = Asking((lambda mask, ids: torch.equal(mask, mask.new_ones(1)), lambda mask, ids: mask.equal(mask[:, :1])))
    captured = capture(model, inputs(0), {})
    assert captured.guards is None
    assert "mul" not in captured.module.code  # which True leads to


@pytest.mark.slow
def test_questions_with_other_constants_are_other_questions() -> None:
    def text(limit: float) -> str:
        guards = capture(Asking((lambda mask, ids: bool(mask.sum() > torch.tensor(limit)),)), inputs(0), {}).guards
        assert guards is not None
        return guards.text

    assert text(3.0) == text(3.0) != text(5.0)


def test_autocast_around_a_step_changes_no_answer() -> None:
    """The graph that asks has the casts that the model makes: here none."""

    def full_row(mask: Tensor, ids: Tensor) -> bool:
        return bool((mask * 1.001 @ torch.ones(WIDTH, 1)).max() > 4.002)  # bfloat16 makes 1 of 1.001

    guards = capture(Asking((full_row,)), inputs(0), {}).guards
    assert guards is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert asked(guards, inputs(0)) == [True]


class Asks(nn.Module):
    def __init__(self, question: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.question = nn.Linear(WIDTH, 1), question
        self.register_buffer("kept", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        scratch = torch.zeros(ROWS)
        scratch.copy_(self.layer(x)[:, 0])
        result = self.layer(x).sum()
        return result * 2 if self.question(self, x, scratch) else result


@pytest.mark.parametrize(
    "question",
    [
        lambda self, x, scratch: self.layer(x).sum() > 0,
        lambda self, x, scratch: self.layer.weight.sum() > x.sum(),
        lambda self, x, scratch: self.kept > 0,
        lambda self, x, scratch: torch.rand(()) > 0.5,
        lambda self, x, scratch: scratch.sum() > 0,
    ],
    ids=["activation", "parameter", "buffer", "random", "written"],
)
def test_other_questions_are_refused_by_line(question: Any) -> None:
    with pytest.raises(CaptureError, match=r"test_questions\.py:\d+: .*makes a Python number, or a decision"):
        capture(Asks(question), (torch.ones(ROWS, WIDTH),), {})


def _caught(read: Callable[[Tensor], Any]) -> Question:
    def ask(mask: Tensor, ids: Tensor) -> Any:
        try:
            return read(mask.sum())
        except Exception:
            return 0

    return ask


@pytest.mark.parametrize("read", [complex])
def test_a_failed_question_that_forward_catches_is_refused_by_line(read: Any) -> None:
    """Else what it does after the failure would be captured, which eager never does."""
    with pytest.raises(CaptureError, match=r"test_questions\.py:\d+: .*catches the error"):
        capture(Asking((_caught(read),)), inputs(0), {})


class Catching(nn.Module):
    """Asks about an activation, and goes on if that fails."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(WIDTH, 1), ask

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        try:
            return y.sum() * bool(self.ask(y))
        except Exception:
            return y.sum()


@pytest.mark.parametrize(
    "ask",
    [
        *(
            lambda y: y.max() > 3,
            lambda y: y.max().item(),
            lambda y: complex(y.max()),
            lambda y: torch.is_nonzero(y.max()),
        ),
        *(lambda y: int(y.max()), lambda y: float(y.max()), lambda y: torch.equal(y, y + 1), lambda y: y.equal(y + 1)),
        *(lambda y: torch.allclose(y, y + 1), lambda y: 3 in y, lambda y: [1, 2][y.max().int()]),
    ],
)
def test_a_question_about_an_activation_is_refused_also_if_its_error_is_caught(ask: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"test_questions\.py:\d+: "):
        capture(Catching(ask), (torch.ones(ROWS, WIDTH),), {})


def _compared(number: Any) -> Any:
    return 2 if number > 7 else 3


def _looked_up(number: Any) -> Any:
    return {8: 2, 10: 5}.get(number, 3)


class Reading(nn.Module):
    """Does something with a number, and something else if that fails."""

    def __init__(self, use: Callable[[Any], Any], read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.use, self.read = nn.Linear(WIDTH, 1), use, read

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        number = self.read(mask)
        try:
            factor = self.use(number)
        except Exception:
            factor = 7
        return (self.layer(x) * factor).sum()


@pytest.mark.parametrize(
    "use",
    [
        *(_compared, _looked_up, lambda number: number, lambda number: torch.arange(number).sum()),
        lambda number: torch.arange(20.0)[: number // 2].sum(),
    ],
)
def test_a_number_that_decides_is_asked(use: Callable[[Any], Any]) -> None:
    """Also if forward catches the error that this raises while the number is open, or computes with it."""
    model, given = Reading(use, lambda mask: mask.sum().item()), inputs(1)
    captured = capture(model, given, {})
    assert captured.guards is not None
    assert asked(captured.guards, given) == [int(given[1].sum())]
    values = dict(model.named_parameters()) | {f"args[{i}]": each for i, each in enumerate(given)}
    assert torch.equal(captured.module(*(values.get(slot.name) for slot in captured.inputs))[0], model(*given))


@pytest.mark.parametrize("use", [_compared, _looked_up])
def test_an_open_number_that_cannot_be_asked_is_refused_by_line(use: Callable[[Any], Any]) -> None:
    with pytest.raises(CaptureError, match=r"test_questions\.py:\d+: .*catches the error"):
        capture(Reading(use, lambda mask: mask.float().mean().item() * 9), inputs(0), {})


@pytest.mark.parametrize("read", [lambda mask: mask.sum().item(), lambda mask: mask.float().sum().item()])
def test_an_open_number_has_eagers_type(read: Callable[[Tensor], Any]) -> None:
    """Its type is no question about its value, so nothing is asked."""

    def use(number: Any) -> int:
        return 2 * isinstance(number, int) + isinstance(number, float | str)

    with pytest.warns(UserWarning, match="reads a number out of a tensor"):
        captured = capture(Reading(use, read), inputs(0), {})
    assert captured.guards is None
    factor = 1 if isinstance(read(inputs(0)[1]), float) else 2
    assert f"linear, {factor})" in captured.module.code


def test_an_open_number_can_be_written_in_any_format() -> None:
    """Nothing is asked for it, so that a log line does not compile every batch anew."""
    read = lambda mask: mask.sum().item()  # noqa: E731
    with pytest.warns(UserWarning, match="reads a number out of a tensor"):
        captured = capture(Reading(lambda number: len(f"{number:>8.3f}") > 0, read), inputs(0), {})
    assert captured.guards is None


@pytest.mark.parametrize("read", [bool, int, float])
def test_a_question_in_a_try_block_is_answered(read: Any) -> None:
    guards = capture(Asking((_caught(read),)), inputs(0), {}).guards
    assert guards is not None
    assert asked(guards, inputs(0)) == [read(inputs(0)[1].sum())]


def _converted(number: Any) -> Any:
    raise ValueError("a number that is open has no value")


class Unknown:
    """A number that only `%` may convert; the instructions that do so differ between versions of Python."""

    __int__, __index__, __float__ = _in_text(_converted, 0), _in_text(_converted, 0), _in_text(_converted, math.nan)


def test_a_number_in_a_text_is_told_from_one_that_is_converted() -> None:
    unknown: Any = Unknown()
    text = "%.1f, %d"
    assert [text % (unknown, unknown) for _ in range(50)][-1] == "nan, 0"  # an instruction that runs often is replaced
    text %= (unknown, unknown)
    assert f"{text}, %x" % unknown == "nan, 0, 0"
    conversions = (
        float,
        int,
        range,
        [1, 2].__getitem__,
        lambda number: 7 % int(number),
        lambda number: str(float(number)),
    )
    for convert in conversions:
        with pytest.raises(ValueError, match="has no value"):
            convert(unknown)
