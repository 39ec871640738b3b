"""Microbatches that are given already split: `microbatches=[(args, kwargs, target), ...]`."""

from collections.abc import Mapping, Sequence
from typing import Any

from zbcompile.errors import PipelineError
from zbcompile.model.batch import Batch, whole_batch

Given = Sequence[tuple[Any, ...]]
THIRD = {"eval": None, "step": "target"}  # what stands behind args and kwargs; for the rest it is labels


def split_batches(given: Any, computes: str, beside: bool) -> list[Batch]:
    """The microbatches of `microbatches=[...]`; `beside` it stand other inputs. Raises PipelineError."""
    third = THIRD.get(computes, "labels")
    form = ", ".join(("args", "kwargs", *([third] if third else ())))
    expected = f"expected one or more ({form}), args a tuple and kwargs a mapping"
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        count = "; how many is said when the pipeline is made" if computes == "step" else ", or how many to split into"
        raise PipelineError(f"microbatches={given!r}; {expected}{count}.")
    if beside:
        raise PipelineError("microbatches= holds microbatches that are split, and other inputs stand beside it.")
    lengths = {"eval": (2,), "step": (2, 3)}.get(computes, (3,))
    for index, each in enumerate(given):
        fits = isinstance(each, Sequence) and len(each) in lengths
        if not (fits and isinstance(each[0], tuple) and isinstance(each[1], Mapping)):
            raise PipelineError(f"microbatches[{index}] is a {type(each).__name__} of another form; {expected}.")
    return [whole_batch(each[0], dict(each[1]), (*each[2:], None)[0]) for each in given]
