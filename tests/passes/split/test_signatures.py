"""The tables of what F, B, W and BW take and make, at the head of two modules, are those of a compiled model."""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

import zbcompile
from zbcompile.passes.split import split
from zbcompile.passes.stage.piece import Piece
from zbcompile.passes.stage import stage_program

Rows = dict[tuple[str, str], tuple[set[str], set[str]]]  # by stage and piece: the kinds that it takes and makes
STAGES = ("first", "middle", "last")


class Counted(nn.Module):
    """An embedding, three blocks and a head, with a buffer on the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.words(words)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def table_of(text: str) -> Rows:
    rows: Rows = {}
    stage = ""
    for line in re.findall(r"^ {4}(?:(?:first|middle|last) | {6,}).*$", text, re.MULTILINE):
        stage = line[4:12].strip() or stage
        piece, rest = line[12:].split(maxsplit=1)
        takes, makes = re.split(r"(?<!,) +", rest, maxsplit=1)
        rows[stage, piece] = tuple({each for each in part.split(", ") if each != "-"} for part in (takes, makes))
    return rows


def rows_of(pieces: Mapping[str, Piece], stage: str) -> Iterator[tuple[tuple[str, str], tuple[set[str], set[str]]]]:
    for name, piece in pieces.items():
        yield (stage, name), ({slot.kind for slot in piece.inputs}, {slot.kind for slot in piece.outputs})


def compiled(exact: bool) -> Rows:
    torch.manual_seed(0)
    words, target = torch.randint(0, 11, (6, 4)), torch.randn(6, 4, 11)
    pipe = zbcompile.pipeline(
        Counted(), schedule="zb-h1", ranks=3, microbatches=3, loss=nn.functional.mse_loss, exact=exact
    )
    stages = zip(STAGES, pipe.compile(words, target=target).program.stages, strict=True)
    pipe.close()
    return {key: row for name, stage in stages for key, row in rows_of(stage.pieces, name)}


def test_finished_pieces() -> None:
    assert compiled(exact=False) == table_of(stage_program.__doc__ or "")


def test_pieces_of_the_split() -> None:
    """With `exact=True` the finished pieces return their gradients, as the split's do."""
    assert compiled(exact=True) == table_of(split.__doc__ or "")
