"""Terms of the loss besides the output layer's, such as a router's auxiliary loss.

The trunk computes them and the shards add them up, so they travel with the output layer's input, in rows of their own
behind the tokens, and their gradients come back with its gradient. A number of a wider dtype than the rows' is sent as
a sum of three, which together have its digits; each of them has the gradient of the number.
"""

import math
from collections.abc import Iterator, Sequence

import torch

Tensor = torch.Tensor
PIECES = 3  # of 8 bits in bfloat16, 24 in float32


def rows_of(terms: Sequence[Tensor], rows: torch.dtype, width: int) -> Tensor:
    """`terms` of one element each as [rows, width]; zeros fill the last row."""
    flat = torch.stack([piece for term in terms for piece in _pieces(term, rows)])
    height = math.ceil(len(flat) / width)
    return torch.nn.functional.pad(flat, (0, height * width - len(flat))).view(height, width)


def terms_in(rows: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The terms, each in its dtype, from what `rows_of` returned."""
    flat = rows.flatten()
    found, begin = [], 0
    for dtype in dtypes:
        end = begin + _count(dtype, rows.dtype)
        found.append(flat[begin:end].to(dtype).sum())
        begin = end
    return found


def gradient_rows(gradients: Tensor, dtypes: Sequence[torch.dtype], rows: torch.dtype, width: int) -> Tensor:
    """What goes back for the gradients of the terms, in the dtype of `gradients`: pieces that `rows` can hold."""
    return rows_of([g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)], rows, width).to(gradients.dtype)


def _pieces(term: Tensor, rows: torch.dtype) -> Iterator[Tensor]:
    rest = term.reshape(())
    for _ in range(_count(term.dtype, rows)):
        piece = rest.to(rows)
        yield piece
        rest = rest - piece.detach().to(rest.dtype)


def _count(term: torch.dtype, rows: torch.dtype) -> int:
    return 1 if torch.promote_types(term, rows) == rows else PIECES
