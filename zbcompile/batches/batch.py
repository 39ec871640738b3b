"""A batch as a flat list of leaves, and its microbatches."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zbcompile.batches.batch_split import Cut, Split, choose_cuts
from zbcompile.errors import PipelineError
from zbcompile.passes.errors import CaptureError
from zbcompile.torch_private import pytree


@dataclass(frozen=True)
class Batch:
    """The flattened inputs of one step, of `size` samples. `paths[i]` names `leaves[i]`, `cuts[i]`
    is the dimension to cut it along (None: every microbatch takes it whole), `static` are paths of
    inputs whose values are in the key.
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    cuts: tuple[Cut, ...]
    structure: Any
    size: int
    static: tuple[str, ...] = ()

    @property
    def whole(self) -> "Microbatch":
        """The batch as one microbatch."""
        return Microbatch(self.leaves, self.paths, self.structure, self.static)

    @property
    def lengths(self) -> dict[str, int]:
        """The length of each leaf that is cut, by its path."""
        cut = zip(self.paths, self.leaves, self.cuts, strict=True)
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
        pairs = zip(self.leaves, self.cuts, strict=True)
        leaves = tuple(
            leaf if dim is None else _part(leaf, dim, index, count) for leaf, dim in pairs
        )
        return Microbatch(leaves, self.paths, self.structure, self.static)

    def into(self, count: int) -> "Microbatches":
        """The microbatches, `count` equal ones."""
        rows = self.size // count
        entry = tuple(self.microbatch(i, count) for i in range(count))
        is_uniform = not self.static or len({microbatch.signature for microbatch in entry}) == 1
        return Microbatches(entry, alike=is_uniform, rows=rows)


def _part(leaf: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
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
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor inputs by path, as the compiled graphs ask for them."""
        return {
            p: leaf
            for p, leaf in zip(self.paths, self.leaves, strict=True)
            if isinstance(leaf, torch.Tensor)
        }

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        return pytree.tree_unflatten(list(self.leaves), self.structure)  # type: ignore[no-any-return]

    @property
    def signature(self) -> tuple[str, ...]:
        """The form for which graphs are specialised: the structure, then every input with its path
        and the values of static ones."""
        inputs = zip(self.paths, self.leaves, strict=True)
        values = (f"{path} = {tensor.tolist()}" for path, tensor in self.static_tensors.items())
        return (
            str(self.structure),
            *(f"{path}: {_described(leaf)}" for path, leaf in inputs),
            *values,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """The form, with the devices of the inputs."""
        return self.signature, *(tensor.device for tensor in self.tensors.values())

    @property
    def static_tensors(self) -> dict[str, torch.Tensor]:
        """The static inputs by path."""
        return {path: tensor for path, tensor in self.tensors.items() if path in self.static}

    def summary(self) -> str:
        """The tensor shapes, for messages."""
        shapes = [f"{path}{list(t.shape)}" for path, t in self.tensors.items()]
        return ", ".join(shapes) or "no tensors"


def _described(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
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
    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """The tensor inputs of each, by path."""
        return [microbatch.tensors for microbatch in self.each]

    @property
    def distinct(self) -> tuple[Microbatch, ...]:
        """Returns the microbatches to compile for: only the first if one graph is right for all."""
        return self.each[:1] if self.alike else self.each

    @property
    def amount(self) -> tuple[int, str]:
        """The amount of data in them: see `amount`."""
        entries = [amount(entry.example[:2]) for entry in self.each]
        return sum(count for count, _ in entries), entries[0][1]

    def shapes(self) -> tuple[str, ...]:
        """Their shapes, for messages."""
        return tuple(entry.summary() for entry in self.distinct)


def amount(inputs: Any) -> tuple[int, str]:
    """The size of inputs without target: in tokens if integer inputs have a length dimension, else
    in samples."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    tokens = next((t for t in tensors if not t.is_floating_point() and t.dim() > 1), None)
    if tokens is not None:
        return tokens.numel(), "tokens"
    return next((t.shape[0] for t in tensors if t.dim()), 0), "samples"


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
    return Batch(leaves, paths, cuts, structure, size, static_paths(static_inputs, paths, partial))


def whole_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, static_inputs: Sequence[str] = ()
) -> Batch:
    """A batch that is one microbatch, whatever its shapes."""
    paths, leaves, structure = flatten_inputs((args, kwargs, target))
    return Batch(
        leaves, paths, (None,) * len(leaves), structure, 0, static_paths(static_inputs, paths)
    )


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


@contextmanager
def explained(
    model: nn.Module, microbatch: Microbatch, loss: Any, device: torch.device
) -> Iterator[None]:
    """Context for a capture. If it fails, its error says that inputs are on another device than the
    model (which is no error by itself: forward may move them), or that the target was forgotten or
    passed to forward.

    Raises CaptureError for an input on the meta device, which a capture would take for one on
    `device`.
    """
    tensors = microbatch.tensors.items()
    far = [f"{path} is on {t.device}" for path, t in tensors if t.dim() and t.device != device]
    hint = f"{', '.join(far)} and the model on {device}: pass tensor.to(pipe.device)."
    if any(tensor.is_meta for _, tensor in tensors) and device.type != "meta":
        raise CaptureError(hint)
    try:
        yield
    except CaptureError as error:
        args, kwargs, target = microbatch.example
        if not far:
            if loss is None or target is not None:
                raise
            hint = "The step got no target=, so loss=fn(output, target) received None."
            try:
                inspect.signature(model.forward).bind(*args, **kwargs)
            except TypeError:
                hint = (
                    "What loss=fn(output, target) compares with is passed as target=:"
                    " pipe.step(inputs, target=labels)."
                )
        raise CaptureError(f"{str(error).removesuffix('.')}. {hint}") from error


def refuse_input_gradients(batch: Batch) -> None:
    """Raise PipelineError for an input that requires a gradient: a step gives gradients to
    parameters only."""
    for path, leaf in zip(batch.paths, batch.leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
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
