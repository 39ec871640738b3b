"""The operations of a schedule: one small table each for passes, messages, collectives and the
optimizer's actions."""

from typing import NamedTuple


class ComputeOp(NamedTuple):
    """A pass that a stage, or a vocabulary shard, runs for every microbatch.

    * `torch`: the letter that torch writes ("": it has none).
    * `does`: the operations whose work it does; others wait for the first of them.
    * `after`: what its microbatch must have run before on its stage.
    * `time`: the `Costs` per stage that add up to its time; `adds`, `frees`: those that it adds to
      the memory of its rank, and frees.
    """

    meaning: str
    torch: str
    does: tuple[str, ...]
    after: tuple[str, ...]
    time: tuple[str, ...]
    adds: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()


COMPUTE_OPS = {
    "F": ComputeOp("forward", "F", ("F",), (), ("forward",), ("activation",)),
    "B": ComputeOp(
        "input gradient", "I", ("B",), ("F",), ("backward",), ("residue",), ("activation",)
    ),
    "W": ComputeOp("weight gradient", "W", ("W",), ("B",), ("weight",), (), ("residue",)),
    "BW": ComputeOp(
        "fused backward", "B", ("B", "W"), ("F",), ("backward", "weight"), (), ("activation",)
    ),
    "S": ComputeOp("vocabulary S", "", ("S",), (), ("vocab_s",), ("vocab_state",)),
    "T": ComputeOp("vocabulary T", "", ("T",), ("S",), ("vocab_t",), (), ("vocab_state",)),
}

# The pass whose result a message carries to or from the next stage, or the one before.
MESSAGE_OPS = {"RECV_F": "F", "RECV_B": "B", "SEND_F": "F", "SEND_B": "B"}

# of the vocabulary shards, with the pass whose result they carry ("": they need none)
COLLECTIVE_OPS = {
    "BROADCAST": "F",  # the output of the last stage to all shards
    "STATS": "S",  # the statistics of S
    "INPUT_GRAD": "T",  # the input gradient of T
    "EMBED": "",  # the rows of the embedding
    "EMBED_GRAD": "B",  # their gradient
}


class OptimizerOp(NamedTuple):
    """An action that each stage runs once per step."""

    meaning: str
    time: tuple[str, ...] = ()


OPTIMIZER_OPS = {
    "REDUCE": OptimizerOp("start of the gradients' sum"),
    "OPT": OptimizerOp("optimizer step", ("optimizer",)),
}

OPS = frozenset((*COMPUTE_OPS, *MESSAGE_OPS, *COLLECTIVE_OPS, *OPTIMIZER_OPS))
TORCH_LETTERS = {op: spec.torch for op, spec in COMPUTE_OPS.items() if spec.torch}
TORCH_LETTERS |= {op: op for op in (*MESSAGE_OPS, *COLLECTIVE_OPS)}


_WORK = {op: COMPUTE_OPS[op].does if op in COMPUTE_OPS else (op,) for op in OPS}


def work_of(op: str) -> tuple[str, ...]:
    """Returns the operations whose work `op` does: B and W for BW."""
    return _WORK[op]


def result_of(op: str) -> str:
    """Returns the operation that names the result of `op`: B for BW.

    >>> result_of("BW"), result_of("F"), result_of("SEND_F")
    ('B', 'F', 'SEND_F')
    """
    return _WORK[op][0]
