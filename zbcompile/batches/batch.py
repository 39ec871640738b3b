"""A batch as a flat list of leaves, the dimension along which each is cut, and its microbatches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from zbcompile.errors import PipelineError
from zbcompile.torch_private import pytree

Cut = int | None  # a dimension; None: every microbatch takes the whole leaf
Split = Mapping[str, bool | int]  # the user's choice by path, as in `zbcompile.pipeline(split=)`


@dataclass(frozen=True)
class Batch:
    """The inputs of one step, of `size` samples: the batch `whole`, as one microbatch, and the
    dimension along which each of its leaves is cut (None: every microbatch takes it whole)."""

    whole: "Microbatch"
    cuts: tuple[Cut, ...]
    size: int

    @property
    def lengths(self) -> dict[str, int]:
        """The length of each leaf that is cut, by its path."""
        cut = zip(self.whole.paths, self.whole.leaves, self.cuts, strict=True)
        return {path: leaf.shape[dim] for path, leaf, dim in cut if dim is not None}

    def divides_into(self, count: int) -> bool:
        """Returns whether the batch divides into `count` equal microbatches."""
        return all(length % count == 0 for length in self.lengths.values())

    def most_parts(self, count: int, even: bool) -> int:
        """The most microbatches, up to `count`, into which it can be cut. They are equal, but the
        last may be smaller."""
        sizes = self.lengths.values()
        fits = (
            self.divides_into
            if even
            else lambda n: all(-(-size // -(-size // n)) == n for size in sizes)
        )
        return max(filter(fits, range(1, count + 1)))

    def rows(self, index: int, count: int) -> int:
        """The number of samples in microbatch `index` of `count`."""
        width = -(-self.size // count)
        return min(width, self.size - index * width)

    def distinct(self, count: int) -> "list[Microbatch]":
        """The first of `count` microbatches, and the last one if that is smaller."""
        ends = (0,) if self.divides_into(count) else (0, count - 1)
        return [self.microbatch(i, count) for i in ends]

    def microbatch(self, index: int, count: int) -> "Microbatch":
        """Microbatch `index` of `count` equal ones; the last one is smaller if the batch does not
        divide."""
        pairs = zip(self.whole.leaves, self.cuts, strict=True)
        leaves = tuple(
            leaf if dim is None else _part(leaf, dim, index, count) for leaf, dim in pairs
        )
        return replace(self.whole, leaves=leaves)

    def into(self, count: int) -> "Microbatches":
        """The microbatches, `count` equal ones."""
        each = tuple(self.microbatch(i, count) for i in range(count))
        is_uniform = not self.whole.static or len({entry.signature for entry in each}) == 1
        return Microbatches(each, alike=is_uniform, rows=self.size // count)


def _part(leaf: Tensor, dim: int, index: int, count: int) -> Tensor:
    width = -(-leaf.shape[dim] // count)
    return leaf.narrow(dim, index * width, min(width, leaf.shape[dim] - index * width))


@dataclass(frozen=True)
class Microbatch:
    """The inputs of one microbatch, by path and as `(args, kwargs, target)`."""

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    structure: Any
    static: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor inputs by path, as the compiled graphs ask for them."""
        return {
            p: leaf
            for p, leaf in zip(self.paths, self.leaves, strict=True)
            if isinstance(leaf, Tensor)
        }

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        return pytree.tree_unflatten(list(self.leaves), self.structure)  # type: ignore[no-any-return]

    @property
    def signature(self) -> tuple[str, ...]:
        """The form for which graphs are specialised: the structure, then every input with its path
        and the values of static ones."""
        inputs = zip(self.paths, self.leaves, strict=True)
        tensors = self.tensors.items()
        values = (f"{path} = {t.tolist()}" for path, t in tensors if path in self.static)
        return (
            str(self.structure),
            *(f"{path}: {_described(leaf)}" for path, leaf in inputs),
            *values,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """The form, with the devices of the inputs."""
        return self.signature, *(tensor.device for tensor in self.tensors.values())

    def summary(self) -> str:
        """The tensor shapes, for messages."""
        shapes = [f"{path}{list(t.shape)}" for path, t in self.tensors.items()]
        return ", ".join(shapes) or "no tensors"


def _described(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    dtype = str(leaf.dtype).removeprefix("torch.")
    return f"{dtype}{list(leaf.shape)} strides {list(leaf.stride())}"


def listed(signature: tuple[str, ...]) -> str:
    """The form of a microbatch, for messages."""
    structure, *inputs = signature
    return f"{', '.join(inputs)} (in {' '.join(structure.split())})"


@dataclass(frozen=True)
class Microbatches:
    """The microbatches of a step, in the order in which they are numbered."""

    each: tuple[Microbatch, ...]
    alike: bool = False  # one graph is right for the shapes of all
    rows: int | None = None  # samples in a microbatch; None if the caller passed microbatches

    @property
    def tensors(self) -> list[dict[str, Tensor]]:
        """The tensor inputs of each, by path."""
        return [microbatch.tensors for microbatch in self.each]

    @property
    def distinct(self) -> tuple[Microbatch, ...]:
        """Returns the microbatches to compile for: only the first if one graph is right for all."""
        return self.each[:1] if self.alike else self.each

    def shapes(self) -> tuple[str, ...]:
        """Their shapes, for messages."""
        return tuple(entry.summary() for entry in self.distinct)


def flatten_inputs(example: Any) -> tuple[tuple[str, ...], tuple[Any, ...], Any]:
    """Returns the leaves of `(args, kwargs, target)`: their paths such as args[0], the leaves,
    their structure."""
    pairs, structure = pytree.tree_flatten_with_path(example)
    top = ("args", "kwargs", "target")
    paths = tuple(top[path[0].idx] + pytree.keystr(path[1:]) for path, _ in pairs)  # type: ignore[attr-defined]
    return paths, tuple(leaf for _, leaf in pairs), structure


def flatten_batch(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    split: Split | None,
    partial: bool = False,
    static_inputs: Sequence[str] = (),
) -> Batch:
    """Flatten a step's inputs and decide how each leaf is cut; see `choose_cuts`, which also says
    what it raises.

    `partial`: some inputs of a step may be missing, as labels are in an evaluation.
    """
    paths, leaves, structure = flatten_inputs((args, kwargs, target))
    cuts, size = choose_cuts(paths, leaves, split or {}, partial)
    static = static_paths(static_inputs, paths, partial)
    return Batch(Microbatch(leaves, paths, structure, static), cuts, size)


def choose_cuts(
    paths: Sequence[str], leaves: Sequence[Any], split: Split, partial: bool = False
) -> tuple[tuple[Cut, ...], int]:
    """The cut of every leaf, and the number of samples in the batch.

    `split` names leaves by path (`args[0]`, `kwargs['mask']`, `target`), by the bare name of a
    keyword (`mask`), or by the path of what holds them (`args[1]`). `partial`: leaves that it names
    may be missing.

    A leaf that `split` names is cut as it says, by its own length. Of the others, tensors without
    dimensions or with one row are whole, and the rest agree about dimension 0, which is the batch.
    Raises PipelineError if they do not, if a leaf may be a table as long as the batch, if the batch
    is empty or has no tensor to cut.
    """
    named = _named(paths, leaves, split, partial)
    pairs = zip(paths, leaves, strict=True)
    tensors = {path: leaf for path, leaf in pairs if isinstance(leaf, Tensor) and leaf.ndim}
    rows = {path: leaf.shape[0] for path, leaf in tensors.items() if path not in named}
    cut = {path: tensors[path].shape[dim] for path, dim in named.items() if dim is not None}
    batched = {path: length for path, length in rows.items() if length != 1} or (
        {} if cut else rows
    )
    _require_agreement(batched)
    lengths = {**batched, **cut}
    _require_samples(lengths)
    _refuse_ambiguous({path: tensors[path] for path in batched})
    return tuple(named.get(path, 0 if path in lengths else None) for path in paths), next(
        iter(lengths.values())
    )


def _named(
    paths: Sequence[str], leaves: Sequence[Any], split: Split, partial: bool
) -> dict[str, Cut]:
    """The dimension that `split` gives for each leaf that it names."""
    cuts: dict[str, Cut] = {}
    for name, value in split.items():
        names, inner = (name, f"kwargs['{name}']"), (f"{name}[", f"{name}.")
        matches = [i for i, path in enumerate(paths) if path in names or path.startswith(inner)]
        if not matches and not partial:
            raise PipelineError(
                f"split= names {name!r}, which is not an input; the inputs are {', '.join(paths)}."
            )
        cuts |= {paths[i]: _dimension(paths[i], leaves[i], value) for i in matches}
    return cuts


def _dimension(path: str, leaf: Any, value: bool | int) -> Cut:
    if value is False or leaf is None:
        return None
    if not isinstance(value, int):
        raise PipelineError(
            f"split={{{path!r}: {value!r}}}; expected False, True or the dimension to cut."
        )
    dim = 0 if value is True else value
    if not isinstance(leaf, Tensor):
        raise PipelineError(
            f"split= asks to cut {path}, which is a {type(leaf).__name__}, not a tensor."
        )
    if not -leaf.ndim <= dim < leaf.ndim:
        raise PipelineError(
            f"split= asks to cut dimension {dim} of {path}, which has shape {list(leaf.shape)};"
            " expected one of its dimensions, counted from 0, or False for the whole tensor."
        )
    return dim % leaf.ndim


def _require_agreement(lengths: Mapping[str, int]) -> None:
    """Name the leaves whose dimension 0 is not the most frequent one."""
    if len(set(lengths.values())) <= 1:
        return
    size = Counter(lengths.values()).most_common(1)[0][0]
    uneven = [path for path, length in lengths.items() if length != size]
    batch = [path for path, length in lengths.items() if length == size]
    rows = ", ".join(f"{path} has {lengths[path]} rows" for path in uneven)
    raise PipelineError(
        f"{rows}, the batch {size} ({', '.join(batch)}). If each microbatch needs a part of its own"
        " (offsets of packed documents, patches of pictures), pass"
        " microbatches=[(args, kwargs, target), ...]. For the same whole tensor in every"
        f" microbatch, pass split={dict.fromkeys(uneven, False)}; True instead of False cuts it by"
        " its own length, a number along that dimension."
    )


def _require_samples(lengths: Mapping[str, int]) -> None:
    if not lengths:
        raise PipelineError(
            "the batch has no tensor with a batch dimension; nothing can be split into"
            " microbatches."
        )
    empty = [path for path, length in lengths.items() if length == 0]
    if empty:
        raise PipelineError(
            f"the batch is empty: {', '.join(empty)} has no rows. Skip such a batch."
        )


def _refuse_ambiguous(batched: Mapping[str, Tensor]) -> None:
    """Refuse a table that may only happen to be as long as the batch. The first tensor is the batch
    itself, and so are tensors of its shape (labels alongside token ids). A target has a row per
    sample."""
    batch = {(leaf.shape, leaf.dtype) for leaf in list(batched.values())[:1]}
    for path, leaf in batched.items():
        is_square = leaf.ndim >= 2 and leaf.shape[0] == leaf.shape[1]
        if is_square and not path.startswith("target") and (leaf.shape, leaf.dtype) not in batch:
            raise PipelineError(
                f"{path} has shape {list(leaf.shape)} and the batch size is {leaf.shape[0]}: it may"
                f" be one row per sample or one table for all. Say which: split={{{path!r}: True}}"
                f" or split={{{path!r}: False}}."
            )


def whole_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, static_inputs: Sequence[str] = ()
) -> Batch:
    """A batch that is one microbatch, whatever its shapes."""
    paths, leaves, structure = flatten_inputs((args, kwargs, target))
    whole = Microbatch(leaves, paths, structure, static_paths(static_inputs, paths))
    return Batch(whole, (None,) * len(leaves), 0)


def static_paths(
    names: Sequence[str], paths: Sequence[str], partial: bool = False
) -> tuple[str, ...]:
    """Returns the paths of the inputs that `static_inputs=` names: keywords, or paths such as
    `args[1]`.

    `partial`: some may be missing. Raises PipelineError otherwise.
    """
    entries = []
    for name in names:
        near = [path for path in paths if path in (name, f"kwargs['{name}']")]
        if not near and not partial:
            raise PipelineError(
                f"static_inputs= names {name!r}, which is not an input; the inputs are"
                f" {', '.join(paths)}."
            )
        entries += near
    return tuple(entries)


def refuse_input_gradients(batch: Batch) -> None:
    """Raise PipelineError for an input that requires a gradient: a step gives gradients to
    parameters only."""
    for path, leaf in zip(batch.whole.paths, batch.whole.leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise PipelineError(
                f"{path} requires a gradient; a step gives gradients to the model's parameters"
                " only. Pass tensor.detach(), or make what computes it part of the model."
            )


def require_divisible(batch: Batch, microbatches: int) -> None:
    """Raise PipelineError if the batch cannot be cut into equal microbatches."""
    if batch.divides_into(microbatches):
        return
    near = [n for n in range(1, batch.size + 1) if batch.divides_into(n)]
    lengths = [f"{path} has {n}" for path, n in batch.lengths.items() if n != batch.size]
    detail = f" ({', '.join(lengths)})" if lengths else ""
    raise PipelineError(
        f"a batch of {batch.size} samples{detail} cannot be split into {microbatches} equal"
        f" microbatches. Pass a batch size divisible by {microbatches}, or choose microbatches="
        f" among {near}."
    )


SplitBatch = Sequence[tuple[Any, ...]]
ARGS = "args", "kwargs"
FORMS = {
    "eval": (ARGS,),
    "step": (ARGS, (*ARGS, "target")),
}  # of a microbatch that is passed; the rest takes labels


def split_batches(
    microbatches: Any, computes: str, also_inputs: bool, static_inputs: Sequence[str] = ()
) -> list[Batch]:
    """The microbatches of `microbatches=[...]`, a batch of each, for a step or for what an
    evaluation `computes`; `also_inputs` says whether the call has other inputs as well. Raises
    PipelineError for these, and for another form.
    """
    forms = FORMS.get(computes, ((*ARGS, "labels"),))
    expected = f"expected one or more ({', '.join(forms[-1])}), args a tuple and kwargs a mapping"
    if isinstance(microbatches, str) or not isinstance(microbatches, Sequence) or not microbatches:
        count = (
            "; how many is said when the pipeline is made"
            if computes == "step"
            else ", or how many to split into"
        )
        raise PipelineError(f"microbatches={microbatches!r}; {expected}{count}.")
    if also_inputs:
        raise PipelineError(
            "microbatches= takes a batch that is split already, and other inputs were passed as"
            " well. Pass one."
        )
    lengths = set(map(len, forms))
    for index, entry in enumerate(microbatches):
        fits = isinstance(entry, Sequence) and len(entry) in lengths
        if not (fits and isinstance(entry[0], tuple) and isinstance(entry[1], Mapping)):
            raise PipelineError(
                f"microbatches[{index}] is a {type(entry).__name__} of another form; {expected}."
            )
    targets = (entry[2] if len(entry) > 2 else None for entry in microbatches)
    pairs = zip(microbatches, targets, strict=True)
    return [whole_batch(entry[0], dict(entry[1]), target, static_inputs) for entry, target in pairs]
