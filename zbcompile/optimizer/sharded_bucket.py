"""The parameters of one stage, dtype and group that replicas update in parts: their gradients are reduced to this
replica's part, which the optimizer updates, and all parts are gathered again. A bucket is divided as one row of
elements, or of blocks, cut into equal parts, or by whole matrices, so that each replica has about as much to compute.

The parameters stay where they are; what travels is copied.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.packing import as_contiguous
from zbcompile.distributed.termination import forget, outlives_its_step
from zbcompile.errors import PipelineError
from zbcompile.optimizer.wanted import ELEMENTS, MATRICES, Rule
from zbcompile.optimizer.whole_parameters import refresh
from zbcompile.passes.compile_options import HALF
from zbcompile.runtime.data_parallel import Observe
from zbcompile.runtime.gradient_sums import Gradients, grad_dtype
from zbcompile.torch_private import all_gather, reduce_scatter, writes_into


@dataclass(frozen=True)
class Piece:
    """The elements from `begin` to `end` of a parameter, in the order of its memory; in the bucket they are at `at`."""

    name: str
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class Division:
    """`shares[i]` are the pieces of replica i, whose part of the bucket has `chunk` elements, padding included."""

    shares: tuple[tuple[Piece, ...], ...]
    chunk: int

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for share in self.shares for piece in share)


def by_blocks(shapes: Mapping[str, Sequence[int]], replicas: int, block: int) -> Division:
    """One parameter after the other, each beginning with a block, cut into equal parts between blocks.

    >>> by_blocks({"a": (2, 3), "b": (1,)}, 2, block=1).shares[1]
    (Piece(name='a', begin=4, end=6, at=4), Piece(name='b', begin=0, end=1, at=6))
    >>> by_blocks({"a": (5,), "b": (1,)}, 2, block=2).shares[1]
    (Piece(name='a', begin=4, end=5, at=4), Piece(name='b', begin=0, end=1, at=6))
    """
    chunk = -(-sum(-(-prod(shape) // block) for shape in shapes.values()) // replicas) * block
    shares: list[list[Piece]] = [[] for _ in range(replicas)]
    at = 0
    for name, shape in shapes.items():
        begin, size = 0, prod(shape)
        while begin < size:
            replica = at // chunk
            end = min(size, begin + (replica + 1) * chunk - at)
            shares[replica].append(Piece(name, begin, end, at))
            at, begin = at + end - begin, end
        at = -(-at // block) * block
    return Division(tuple(map(tuple, shares)), chunk)


def by_matrices(shapes: Mapping[str, Sequence[int]], loads: list[int]) -> Division:
    """Each one whole: the costliest first, to the replica that has the least to do so far, as `loads` says, which are
    raised. An update multiplies a matrix by its own square, along its shorter side.

    >>> division = by_matrices({"a": (2, 3), "b": (2, 2), "c": (2, 2)}, [0, 0])
    >>> [[piece.name for piece in share] for share in division.shares], division.chunk
    ([['a'], ['b', 'c']], 8)
    """
    costs = {name: prod(shape) * min(shape, default=1) for name, shape in shapes.items()}
    owned: list[list[str]] = [[] for _ in loads]
    for name in sorted(costs, key=lambda name: -costs[name]):
        replica = loads.index(min(loads))
        loads[replica] += costs[name]
        owned[replica].append(name)
    chunk = max(sum(prod(shapes[name]) for name in names) for names in owned)
    return Division(tuple(tuple(_whole(names, shapes, i * chunk)) for i, names in enumerate(owned)), chunk)


def _whole(names: Sequence[str], shapes: Mapping[str, Sequence[int]], at: int) -> Iterator[Piece]:
    for name in names:
        yield Piece(name, 0, prod(shapes[name]), at)
        at += prod(shapes[name])


Place = tuple[Piece, nn.Parameter]  # of a tensor that the optimizer updates on its own


@dataclass
class Moving:
    """A collective under way: `flat` is what it reads, or writes."""

    work: dist.Work | None
    flat: torch.Tensor
    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
            forget(self.work)
        return self.result


@dataclass
class Bucket:
    """`shard` is this replica's part of the bucket, number `index`, without padding at its end; `tensors` are what the
    optimizer updates: by `rule` the `shard` itself, or the pieces or matrices in it. `keep` says whether the memory of
    whole gradients stays allocated from step to step."""

    parameters: Mapping[str, nn.Parameter]
    division: Division
    group: dist.ProcessGroup | None
    index: int
    rule: Rule
    keep: bool
    shard: torch.Tensor = field(init=False)
    tensors: list[nn.Parameter] = field(init=False)
    kept: torch.Tensor | None = None
    scattering: Moving | None = None
    gathering: Moving | None = None
    writes: Mapping[str, int] = field(default_factory=dict)  # into each parameter, when the gathering began

    def __post_init__(self) -> None:
        first = next(iter(self.parameters.values()))
        dtype = torch.float32 if first.dtype in HALF else first.dtype
        size = max((piece.at + piece.end - piece.begin - self.begin for piece in self.own), default=0)
        self.shard = torch.zeros(size, dtype=dtype, device=first.device)
        self.tensors = [nn.Parameter(view) for view in self._views(self.shard)]
        self.refresh()

    @property
    def own(self) -> tuple[Piece, ...]:
        """The pieces of this replica."""
        return self.division.shares[self.index]

    @property
    def begin(self) -> int:
        """Where this replica's part begins."""
        return self.index * self.division.chunk

    def _views(self, part: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a part of the bucket that the optimizer updates on their own."""
        if self.rule == ELEMENTS:
            return [part]
        if self.rule == MATRICES:
            return [_laid_out(part, self.parameters[each.name], each.at - self.begin) for each in self.own]
        return [part[each.at - self.begin :][: each.end - each.begin] for each in self.own]

    def refresh(self) -> None:
        """Let the shard begin with the values of the parameters, where these are not what it rounds to."""
        for piece in self.own:
            here = self.shard[piece.at - self.begin : piece.at - self.begin + piece.end - piece.begin]
            refresh(here, _memory(self.parameters[piece.name])[piece.begin : piece.end])

    def lend(self) -> None:
        """Let gradients accumulate in the memory that is kept for them, unless there are some already."""
        if not self.keep or any(parameter.grad is not None for parameter in self.parameters.values()):
            return
        if self.kept is None:
            first = next(iter(self.parameters.values()))
            self.kept = self._empty(grad_dtype(first))
        self.kept.zero_()
        for piece in self.division.pieces:
            if piece.begin == 0:
                parameter = self.parameters[piece.name]
                parameter.grad = _laid_out(self.kept, parameter, piece.at)

    def scatter(self, gradients: Gradients, observe: Observe) -> None:
        """Begin to reduce the gradients to this replica's part; what nothing trained here takes part with zeros."""
        sums = {name: gradients[name].total() for name in self.parameters}
        found = {name: each for name, each in sums.items() if each is not None}
        for name, each in found.items():
            observe(name, each)
        flat = self._flat(found)
        for name in self.parameters:
            gradients[name].release()
        part = torch.empty(self.division.chunk, dtype=flat.dtype, device=flat.device)
        if self.group is None:
            self.scattering = Moving(None, flat, flat)
        else:
            self.scattering = Moving(reduce_scatter(part, flat, self.group), flat, part)

    def _flat(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        dtypes = {gradient.dtype for gradient in gradients.values()} or {self.shard.dtype}
        flat = (
            self.kept
            if self.kept is not None and dtypes == {self.kept.dtype}
            else self._empty(max(dtypes, key=lambda dtype: dtype.itemsize))
        )
        for piece in self.division.pieces:
            target = flat[piece.at : piece.at + piece.end - piece.begin]
            if piece.name not in gradients:
                target.zero_()
                continue
            source = _memory(gradients[piece.name])[piece.begin : piece.end]
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
        return flat

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.division.chunk * len(self.division.shares), dtype=dtype, device=self.shard.device)

    def finish(self) -> None:
        """Add what was reduced to the gradients of this replica's part."""
        if self.scattering is None:
            return
        part, self.scattering = self.scattering.wait()[: len(self.shard)].to(self.shard.dtype), None
        part = part.clone() if self.kept is not None and part.data_ptr() == self.kept.data_ptr() else part
        for tensor, gradient in zip(self.tensors, self._views(part), strict=True):
            tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)

    def sums(self) -> dict[str, torch.Tensor]:
        """The part of each gradient that this replica has."""
        spans = {piece.name: (piece.at - self.begin, piece.end - piece.begin) for piece in self.own}
        grads = [tensor.grad for tensor in self.tensors]
        if self.rule != ELEMENTS:
            return {each.name: grad for each, grad in zip(self.own, grads, strict=True) if grad is not None}
        return {name: grads[0][at : at + size] for name, (at, size) in spans.items() if grads[0] is not None}

    def gather(self) -> None:
        """Begin to give all replicas the updated parts."""
        self.writes = {name: writes_into(parameter) for name, parameter in self.parameters.items()}
        own = self.shard.new_zeros(self.division.chunk, dtype=next(iter(self.parameters.values())).dtype)
        own[: len(self.shard)] = self.shard
        if self.group is None:
            self.gathering = Moving(None, own, own)
        else:
            flat = torch.empty(self.division.chunk * len(self.division.shares), dtype=own.dtype, device=own.device)
            work = outlives_its_step(all_gather(flat, own, self.group))
            self.gathering = Moving(work, own, flat)

    def arrive(self) -> None:
        """Wait for the parts of all replicas, and write them into the parameters. Raises PipelineError if somebody else
        has written since the update, which would be lost."""
        if self.gathering is None:
            return
        for name, count in self.writes.items():
            if writes_into(self.parameters[name]) != count:
                raise PipelineError(
                    f"{name} was written between optimizer.step() and the arrival of its updated values, which would "
                    "replace what was written. Call pipe.parameters() or pipe.state_dict() first, which waits for them."
                )
        flat, self.gathering = self.gathering.wait(), None
        with torch.no_grad():
            for piece in self.division.pieces:
                values = flat[piece.at : piece.at + piece.end - piece.begin]
                _memory(self.parameters[piece.name])[piece.begin : piece.end].copy_(values)

    def recall(self) -> None:
        """Forget the updated parts that are on their way."""
        if self.gathering is not None:
            self.gathering.wait()
        self.gathering = None

    def drop(self) -> None:
        """Forget all gradients, and collectives under way that failed."""
        self.scattering = None
        for each in (*self.parameters.values(), *self.tensors):
            each.grad = None


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory, as a view."""
    return as_contiguous(tensor.detach()).view(-1)


def _laid_out(flat: torch.Tensor, parameter: nn.Parameter, at: int) -> torch.Tensor:
    """The elements of `flat` from `at` on, with the shape and strides of a parameter."""
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + at)
