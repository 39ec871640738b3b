"""How a model's stages are compiled, if there is a choice."""

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch

from zbcompile.passes.errors import CompileError
from zbcompile.passes.layout_strings import cuts_of_layout
from zbcompile.passes.machine.hardware import Hardware, hardware_names, read_hardware
from zbcompile.passes.option import (
    BYTES,
    DTYPE,
    SIZES,
    SWITCH,
    OptionFields,
    OptionKind,
    Reads,
    number,
    one_of,
    option,
    options,
    read_bytes,
)

Policy = str | int | float  # of POLICIES, or a price (`price_of_policy`); bytes; a share of what is kept otherwise
POLICIES = ("off", "hints", "selective", "full")
Recompute = Policy | tuple[Policy, ...]  # of all stages alike, or of each

Balance = str | tuple[str, ...]
BALANCES = ("flops", "measured", "parameters", "makespan")

Barriers = Literal["off", "auto", 1, 2]
VocabLogits = Literal["auto", "keep", "remake"]

HALF = (torch.bfloat16, torch.float16)  # dtypes of parameters that have float32 masters


def _read_recompute(given: Any) -> Recompute:
    if not isinstance(given, list | tuple):
        return _read_policy(given)
    if not given:
        raise ValueError
    policies = tuple(map(_read_policy, given))
    return policies if len(policies) > 1 else policies[0]


def _read_policy(given: Any) -> Policy:
    if given == "none":
        return "off"
    if isinstance(given, str) and re.fullmatch(r"[01]?\.\d*", given):
        given = float(given)
    if isinstance(given, float):
        if not 0 <= given <= 1:
            raise ValueError
        return given
    if isinstance(given, str) and price_of_policy(given) is not None:
        return given
    return given if given in POLICIES else read_bytes(given)


def price_of_policy(policy: Policy) -> float | None:
    """The seconds that a byte less may cost, of a policy such as "2ms/GiB"; None for all others.

    >>> price_of_policy("2ms/GiB") == 2e-3 / 2**30, price_of_policy("full")
    (True, None)
    """
    found = re.fullmatch(r"(\d+\.?\d*)ms/GiB", policy) if isinstance(policy, str) else None
    return float(found[1]) * 1e-3 / 2**30 if found else None


def _read_balance(given: Any) -> Balance:
    if isinstance(given, str) and given in BALANCES:
        return given
    if isinstance(given, str) and ("|" in given or given.endswith("L")):
        return cuts_of_layout(given)
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise ValueError
    return tuple(given)


HARDWARE = OptionKind(
    read_hardware, f"{', '.join(hardware_names())}, a FILE.toml, or a zbcompile.Hardware", {"metavar": "NAME|FILE.toml"}
)
RECOMPUTE = OptionKind(
    _read_recompute,
    '"off", "hints", "selective", "full", a price such as "2ms/GiB", a share of what is kept otherwise such as 0.5, '
    f"for each microbatch and stage {SIZES}; or a list of these with an entry for each stage",
    {
        "metavar": "off|hints|selective|full|PRICE|SHARE|BYTES|POLICY,POLICY",
        "type": lambda text: tuple(text.split(",")) if "," in text else text,
    },
)
BALANCE = OptionKind(
    _read_balance,
    '"flops", "measured", "parameters", "makespan", a list with the names of all cuts, such as "blocks.2", '
    'or a pipeline layout of Megatron-LM, such as "Ett|tt|ttL"',
    {
        "metavar": "flops|measured|parameters|makespan|NAME,NAME",
        "type": lambda text: text if text in BALANCES or "|" in text else tuple(text.split(",")),
    },
)


def read_channels(text: str | None) -> dict[str, tuple[float, float]]:
    """Seconds of latency and bytes per second by dimension of the mesh.

    >>> read_channels("tp=2e-05:50GB,cp=0.001:1GB")
    {'tp': (2e-05, 50000000000), 'cp': (0.001, 1000000000)}
    """
    channels: dict[str, tuple[float, float]] = {}
    for part in text.split(",") if text else ():
        found = re.fullmatch(r"(\w+)=([^:]+):([^:]+)", part)
        if found is None:
            raise ValueError
        latency, bandwidth = float(found[2]), read_bytes(found[3])
        if not 0 <= latency < math.inf or not bandwidth:
            raise ValueError
        channels[found[1]] = latency, bandwidth
    return channels


def _read_channels(given: Any) -> str:
    if not isinstance(given, str) or not read_channels(given):
        raise ValueError
    return given


CHANNELS = OptionKind(
    _read_channels,
    'a text such as "tp=2e-05:50GB,cp=0.001:1GB": for each dimension seconds of latency, and bytes per second',
    {"metavar": "DIMENSION=SECONDS:BYTES"},
)


VOCAB = one_of("off", "auto", 1, 2, also=" (barriers)")


@options
class Choices(OptionFields):
    """The options that change the graphs.

    Args:
        exact: Gradients bitwise equal to eager gradient accumulation (fp32). Else weight gradients are added inside the
            GEMM, equal within 1e-6 of the largest gradient entry.
        recompute: What each backward recomputes instead of keeping it from the forward (docs/memory.md). "hints":
            `torch.utils.checkpoint` regions; "off": nothing, not even these; "selective": also what is cheap
            (everything but products with parameters); "full": whatever can be, so that a stage keeps its inputs; bytes
            (an int, or a text such as "64MiB"): as little as possible, such that a stage keeps at most that many per
            microbatch between its F and B; a float from 0 to 1: the same with that share of what it would keep
            without, or with what it has to keep if that is more; a price such as "2ms/GiB": whatever takes less time on
            `hardware` than that for each GiB that it saves, so equal layers are treated alike. A list has an entry for
            each stage. Gradients keep their bits; random numbers are not drawn again.
        balance: The measure by which stages are made equal (docs/partitioning.md). "flops" (with bytes, at nominal
            speeds), "measured" (every kind of operation is run on this device), "parameters"; "makespan" (the cuts of
            "flops", moved to where the simulated step is shortest, within the limit of memory); or the cuts themselves,
            as names of modules (cut before it), of operations as inspect prints them (cut after it), or a layout of
            Megatron-LM ("Ett|tt|ttL").
        hardware: What the model is cut and its step predicted for (docs/hardware.md). A profile by its name, a file
            that `python -m zbcompile.calibrate` wrote, or a `zbcompile.Hardware`. Default: nominal speeds of the
            device.
        boundary_bytes: The most bytes that may cross a cut per microbatch.
        memory: The most bytes that a rank may hold. Parameters, gradients, optimizer state, activations in flight; a
            number, or a text ("80GiB"; a GB is 1e9).
        optimizer_state: Bytes of optimizer state per byte of trained parameter, for the limit of memory. Adam has 2. Of
            parameters in half precision: per byte of their float32 masters, which are counted as well.
        accumulate_dtype: The dtype in which a step sums the gradients of its microbatches. Each parameter takes the
            wider of this and its own; the sum is rounded into `.grad` once, at the end of the step. Default: float32
            for bfloat16 and float16 parameters, with `exact=True` the parameter's own, as in eager mode.
        weight_recompute: W recomputes cheap values (activations, norms) to save memory. It does so if that lowers the
            bytes that wait between F and B plus those between B and W (docs/split.md). Gradients keep their bits.
        vocab: Whether the output layer and its loss are sharded over all ranks by rows of the vocabulary
            (docs/vocabulary.md). "off"; 1 or 2 barriers between the last stage's forward and backward (one takes less
            memory); "auto": 1 if there is an output layer that can be sharded and the predicted step is at least 5 %
            shorter than with the layers redistributed around it, else off. The embedding is sharded by the same rows.
            Gradients are equal within 2e-6 (fp32). Default: off; with `schedule="auto"` it is "auto", and the search
            decides about both numbers of barriers.
        vocab_logits: Whether the logits of a shard wait for its weight gradient ("keep") or are recomputed ("remake").
            Recomputing takes a third more FLOPs of the output layer, and nothing of the size of the vocabulary waits;
            "auto": kept while those of a microbatch take at most 256 MiB and the limit of memory allows it.
        pairs: "auto": where stages exchange tensors in the middle of a microbatch, a B or F is paired with a W that
            hides the exchange, if neither the simulated step nor the memory suffers (docs/composition.md); "given":
            no pairs but those of the schedule.
        relay: Whether values that stages read which are not the next pass through all stages between. By default they
            go straight to these, once for each rank, and are added up on the way back as eager does; with `exact=False`
            those of one rank first, which saves messages. torch's own schedules (`pipe.stages()`) need True.
        channels: The latency and bandwidth of collectives along dimensions of the mesh, such as "tp=2e-05:50GB"
            (seconds, bytes per second); by default nominal ones. They decide about pairs, and predictions have them.
    """

    exact: bool = option(False, SWITCH)
    recompute: Reads[Recompute | str | Sequence[Policy | str], Recompute] = option("hints", RECOMPUTE)
    balance: Reads[str | Sequence[str], Balance] = option("flops", BALANCE)
    hardware: Reads[Hardware | str | None, Hardware | None] = option(None, HARDWARE.or_none())
    boundary_bytes: Reads[float | str | None, int | None] = option(None, BYTES.or_none())
    memory: Reads[float | str | None, int | None] = option(None, BYTES.or_none())
    optimizer_state: float = option(2.0, number("bytes per byte of parameter", lambda given: given >= 0))
    accumulate_dtype: Reads[torch.dtype | str | None, torch.dtype | None] = option(None, DTYPE.or_none())
    weight_recompute: bool = option(False, SWITCH)
    vocab: Barriers = option("off", VOCAB)
    vocab_logits: VocabLogits = option("auto", one_of("auto", "keep", "remake"))
    pairs: str = option("auto", one_of("auto", "given"))
    relay: bool = option(False, SWITCH)
    channels: str | None = option(None, CHANNELS.or_none())

    def recompute_of(self, stage: int) -> Policy:
        """What the backward of one stage recomputes."""
        return self.recompute[stage] if isinstance(self.recompute, tuple) else self.recompute

    def require_stages(self, stages: int) -> None:
        """Raise CompileError if a list does not have one entry per stage."""
        if isinstance(self.recompute, tuple) and len(self.recompute) != stages:
            raise CompileError(
                f"recompute={list(self.recompute)} has {len(self.recompute)} entries, but the schedule has {stages} "
                "stages. Give one entry for all stages, or one for each in the order of the model."
            )

    def dtype_of_sum(self, parameter: torch.dtype) -> torch.dtype:
        """In which dtype the gradients of a parameter of dtype `parameter` are summed over the microbatches."""
        if self.accumulate_dtype is not None:
            return torch.promote_types(parameter, self.accumulate_dtype)
        return torch.float32 if parameter in HALF and not self.exact else parameter
