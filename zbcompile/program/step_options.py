"""What a step does besides running the graphs, if there is a choice; a saved program keeps it."""

import argparse
from collections.abc import Callable
from typing import Any

from zbcompile.batches.batch_split import Split
from zbcompile.model.placements import Placements, read_placements
from zbcompile.passes.option import OptionFields, OptionKind, accept, one_of, option, options, whole


def _read_split(given: Any) -> dict[str, bool | int]:
    found = dict(given)
    if not all(isinstance(name, str) and isinstance(answer, int) for name, answer in found.items()):
        raise ValueError
    return found


def _split_from_text(text: str) -> tuple[str, bool | int]:
    name, _, answer = text.rpartition("=")
    if not name or not (answer in ("yes", "no") or answer.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form INPUT=yes, INPUT=no or INPUT=DIMENSION")
    return name, int(answer) if answer.isdecimal() else answer == "yes"


SPLIT = OptionKind(
    _read_split,
    'a mapping of inputs to False, True or the dimension to cut, such as {"mask": False}',
    {"metavar": "INPUT=yes|no|DIM", "type": _split_from_text, "action": "append"},
)
PLACEMENTS = OptionKind(
    read_placements,
    'a mapping of name patterns to "replicate", "partial" or "shard" along "tp", "cp" or "ep", such as '
    '{"*norm*": {"tp": "partial"}}',
)
BACKENDS = ("fx", "inductor")
BACKEND = accept(
    lambda given: given in BACKENDS if isinstance(given, str) else callable(given),
    '"fx", "inductor", or a function of a graph and its example inputs',
    choices=BACKENDS,
)
CUDA_GRAPHS = accept(
    lambda given: isinstance(given, bool) or given == "step",
    'True, False or "step"',
    nargs="?",
    const=True,
    choices=("step",),
)


@options
class StepOptions(OptionFields):
    """The options of a step. Of a program `backend` is the name.

    Args:
        loss_reduction: Whether the loss of a step is the "mean" of its microbatches' losses or their "sum". A mean of
            means is not the mean over the batch if microbatches count differently (ignore_index); use "sum" with a
            global divisor then.
        seed: Enters `zbcompile.microbatch_seed`.
        split: How inputs are split into microbatches, by path or keyword name. False (whole in every microbatch), True
            (along dimension 0) or the dimension, each by its own length. Tensors that are not named agree about
            dimension 0, the batch; those without dimensions or with one row go whole into every microbatch.
        placements: What plain parameters are along "tp", "cp" and "ep" of `mesh`, by patterns of their names:
            {"*.experts.*": {"ep": "shard"}, "*norm*": {"tp": "partial"}}. "replicate": equal values, and every rank
            computes the whole gradient (the default along "tp"). "partial": equal values, and the gradient is the sum
            over the ranks, formed once per step (the default along "cp" and "ep"). "shard": every rank has another
            part. The first step compares what is said to be equal. DTensors say it themselves.
        backend: What runs the graphs (docs/backends.md). "fx": each operation as it is; "inductor": compiled by torch's
            inductor, once per distinct graph and machine, gradients equal within 2e-6 of the largest entry (fp32); or a
            function `backend(graph_module, example_inputs)` that returns what is called in place of the graph.
        cuda_graphs: True: record every pass as a CUDA graph and replay it (docs/backends.md). Takes memory for the
            copies of what goes in and out, and gradients that stay in place: `optimizer.zero_grad(set_to_none=False)`.
            "step": record a whole step, whose values have fixed places (docs/memory.md).
        max_ctas: Thread blocks that NCCL may take for each link between two ranks (by default up to 32). One link per
            direction is at work at a time with one message; from the posting of its receive on its blocks wait on
            multiprocessors, each with 9 MiB of buffers on the receiver. Few blocks move large messages more slowly.
        max_receives: Receives that a rank may post ahead of the passes that need them (by default as many as the
            schedule does). Over NCCL the first one of each link takes thread blocks while it waits. With few, a message
            may start later; what is computed stays the same.
        compare_batches: After how many steps the ranks of a pipeline compare their batches again, as they do in the
            first step: a checksum of each tensor. A difference warns, once for each input. 0: in the first step only.
    """

    loss_reduction: str = option("mean", one_of("mean", "sum"))
    seed: int = option(0, whole("", least=None))
    split: Split | None = option(None, SPLIT.or_none())
    placements: Placements | None = option(None, PLACEMENTS.or_none())
    backend: str | Callable[..., Any] = option("fx", BACKEND)
    cuda_graphs: bool | str = option(False, CUDA_GRAPHS)
    max_ctas: int | None = option(None, whole(" of thread blocks").or_none())
    max_receives: int | None = option(None, whole(" of receives").or_none())
    compare_batches: int = option(100, whole(" of steps", least=0))
