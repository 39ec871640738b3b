"""Tables for a terminal: at most 100 columns, no colour."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from tabulate import tabulate

from zbcompile.amounts import format_change, format_count, format_share, format_time
from zbcompile.inspection.summary import Cut, Summary
from zbcompile.passes.stage.print_python import format_bytes
from zbcompile.prediction.advice import Alternative, format_idle
from zbcompile.prediction.rank_memory import Memory
from zbcompile.schedules import Timeline, format_schedule, format_timeline

WIDTH = 100
_LONGEST_CUT = 50


def format_summary(summary: Summary, timeline: Timeline) -> str:
    """The default report; `timeline` is the predicted step."""
    picture = format_timeline(timeline, width=WIDTH).partition("\n")[2]
    parts = [
        _heading(summary),
        "\n".join(part for line in str(summary.plan or "").splitlines() for part in wrap(line)),
        titled("Stages, FLOPs per microbatch (a multiply-add is two)", _stages(summary)),
        _balance(summary),
        titled("Bytes per microbatch kept between the passes, and sent", _bytes(summary)),
        titled("Bytes of a microbatch that a pass needs while it runs, including those kept for it", _running(summary)),
        _recomputed(summary),
        _improved(summary),
        _collectives(summary),
        titled(f"Ranks in one step, predicted {summary.prediction.basis}", _ranks(summary)),
        titled("Memory of the ranks: the most at any moment, and of all together", _memory(summary)),
        _verdict(summary),
        _vocabulary(summary),
        _advice(summary),
        titled("The predicted step, to scale (dots are idle time)", picture),
        titled("The order of every rank", format_schedule(timeline.schedule, width=WIDTH)),
        _notes(summary),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def titled(title: str, body: str) -> str:
    return f"{title}\n\n{body}"


def _heading(s: Summary) -> str:
    inputs = ", ".join(f"{path} {kind}" for path, kind in s.inputs.items())
    model = f"{s.model}: {format_count(s.parameters, 'B')} parameters, {format_bytes(s.parameter_bytes)}"
    counts = ((s.ranks, "rank"), (len(s.stages), "stage"), (s.microbatches, "microbatch"))
    plan = f"{s.schedule} on {', '.join(_number(count, word) for count, word in counts)}"
    details = f"{s.loss_reduction} of their losses, {'exact' if s.exact else 'in-place'} gradient accumulation"
    lines = (model, f"one microbatch: {inputs}", f"{plan}; {details}")
    return "\n".join(part for line in lines for part in wrap(line))


def _number(count: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{count} {word}{plural * (count != 1)}"


def wrap(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def table(rows: Sequence[Sequence[str]], headers: Sequence[str], left: Sequence[str] = ()) -> str:
    """A table with numbers aligned to the right, and the columns in `left` to the left."""
    align = ["left" if header in left else "right" for header in headers]
    return tabulate(rows, headers, tablefmt="simple", colalign=align, disable_numparse=True)


def _stages(s: Summary) -> str:
    headers = ["stage", "rank", "cut after", "parameters", "F", "B", "W"]
    rows = [
        [
            str(stage.stage),
            ", ".join(map(str, stage.ranks)),
            format_cut(stage.cut),
            format_count(stage.parameters, "B"),
            *(format_count(stage.flops[op]) for op in ("F", "B", "W")),
        ]
        for stage in s.stages
    ]
    return table(rows, headers, left=("cut after",))


def format_cut(cut: Cut | None) -> str:
    """The end of a stage: module, line and, if it fits, the operation."""
    if cut is None:
        return "(the loss)"
    file = cut.file.rpartition("/")[2]
    place = f"{cut.module or 'model'} {file}:{cut.line}" if file else "loss"
    whole = f"{place} {cut.operation}"
    if len(whole) <= _LONGEST_CUT:
        return whole
    return place if len(place) <= _LONGEST_CUT else f"...{place[3 - _LONGEST_CUT :]}"


_BASES = {
    "flops": "FLOPs and bytes",
    "measured": "measured times of forward and backward",
    "parameters": "parameters",
    "makespan": "the simulated step (loads from FLOPs and bytes)",
    "names": "names (loads from FLOPs and bytes)",
}


def _balance(s: Summary) -> str:
    mean = sum(stage.load for stage in s.stages) / len(s.stages) or 1.0
    rows = [
        [
            str(stage.stage),
            ", ".join(map(str, stage.ranks)),
            format_count(stage.load, "B") if s.balance.unit == "parameters" else format_time(stage.load, "s"),
            f"{stage.load / mean:.2f}",
            format_bytes(stage.send_bytes),
            "its own" if stage.original == stage.stage else f"of stage {stage.original}",
        ]
        for stage in s.stages
    ]
    load = "load" if s.balance.unit == "parameters" else "F + B + W"
    rows_text = table(rows, ["stage", "rank", load, "of the mean", "crosses", "graphs"], left=("graphs",))
    count = f"{_number(len(s.stages), 'stage')}, {_number(s.balance.distinct_graphs, 'distinct graph')}"
    verdict = wrap(f"{count}; the heaviest rank carries {s.balance.ratio:.2f} times the mean load.")
    return titled(f"Cut by {_BASES[s.balance.basis]}", "\n".join([rows_text, "", *verdict]))


def _bytes(s: Summary) -> str:
    headers = ["stage", "F->B", "F->W", "B->W", "kept F..B", "residue B..W", "receives", "sends"]
    rows = [
        [
            str(stage.stage),
            *(format_bytes(n) for n in (stage.forward_to_backward, stage.forward_to_weight, stage.backward_to_weight)),
            *(format_bytes(n) for n in (stage.kept, stage.residue, stage.receive_bytes, stage.send_bytes)),
        ]
        for stage in s.stages
    ]
    return table(rows, headers)


def _running(s: Summary) -> str:
    names = ("F", "B", "W", "BW")
    rows = [[str(stage.stage), *(format_bytes(stage.running.get(name, 0)) for name in names)] for stage in s.stages]
    return table(rows, ["stage", *names])


def _recomputed(s: Summary) -> str:
    if not any(stage.recomputed for stage in s.stages):
        return ""
    headers = ["stage", "operations", "FLOPs", "of F", "kept F..B without", "with"]
    rows = [
        [
            str(stage.stage),
            str(stage.recomputed.operations),
            format_count(stage.recomputed.flops),
            format_share(stage.recomputed.flops / (stage.flops["F"] or 1)),
            format_bytes(stage.recomputed.kept_before),
            format_bytes(stage.recomputed.kept_after),
        ]
        for stage in s.stages
        if stage.recomputed
    ]
    policy = f"{s.recompute:,} bytes" if isinstance(s.recompute, int) else f'"{s.recompute}"'
    return titled(f"Recomputed in B (recompute={policy}), per microbatch", table(rows, headers))


def _improved(s: Summary) -> str:
    """What the split did beyond the dependency closure, with its bytes."""
    headers = ["stage", "operations", "what", "kept F..B", "residue B..W"]
    rows = [
        [str(stage.stage), str(done.operations), done.what, *map(_signed_bytes, (done.kept, done.residue))]
        for stage in s.stages
        for done in stage.improvements
    ]
    if not rows:
        return ""
    return titled("What the split changed, and the bytes that this adds or saves", table(rows, headers, left=("what",)))


def _signed_bytes(count: int) -> str:
    return f"{'-' if count < 0 else '+' if count else ''}{format_bytes(abs(count))}"


def _collectives(s: Summary) -> str:
    """What stages exchange with ranks beside the pipeline; equal exchanges of a pass are one row."""
    found = ((stage.stage, each) for stage in s.stages for each in stage.collectives if each.name != "BW")  # B and W
    counts = Counter((n, c.name, c.dimension, c.kind, c.bytes, c.seconds, c.behind) for n, c in found)
    if not counts:
        return ""
    rows = [
        [str(stage), *of, str(count), format_bytes(count * size), format_time(count * seconds, "s"), behind]
        for (stage, *of, size, seconds, behind), count in counts.items()
    ]
    headers = ["stage", "pass", "along", "collective", "count", "bytes", "takes", "hidden behind"]
    title = "Exchanges with ranks beside the pipeline, per microbatch"
    return titled(title, table(rows, headers, left=("pass", "along", "collective", "hidden behind")))


def _ranks(s: Summary) -> str:
    headers = ["rank", "stages", "parameters", "FLOPs", "share", "busy", "idle", "peak waiting", "peak running"]
    total = sum(rank.flops for rank in s.per_rank) or 1
    rows = [
        [
            str(rank.rank),
            ", ".join(map(str, rank.stages)),
            format_count(rank.parameters, "B"),
            format_count(rank.flops),
            format_share(rank.flops / total),
            format_time(rank.busy, s.prediction.unit),
            format_share(rank.idle_share),
            format_bytes(rank.peak_bytes),
            format_bytes(rank.running_peak_bytes),
        ]
        for rank in s.per_rank
    ]
    copies = ", ".join(format_bytes(rank.copies_bytes) for rank in s.per_rank)
    return "\n".join(
        [table(rows, headers), "", *wrap(f'Copies that pipe.optimizer(validate="after") keeps: {copies}.')]
    )


def _memory(s: Summary) -> str:
    names = tuple(field.name for field in fields(Memory))
    rows = [[str(r.rank), *(format_bytes(getattr(r.memory, name)) for name in names)] for r in s.per_rank]
    lines = [table(rows, ["rank", *(name.replace("_state", "") for name in names)])]
    return "\n".join([*lines, *(f"\n{line}" for line in wrap(format_fit(s)))])


def format_fit(s: Summary) -> str:
    """Whether the fullest rank is within the limit; empty if there is none."""
    limit, rank = s.prediction.memory_limit, max(s.per_rank, key=lambda r: r.memory.peak)
    if limit is None:
        return ""
    left = (limit - rank.memory.peak) / 1e9
    if left < 0:
        return f"Rank {rank.rank} does not fit in {limit / 1e9:g} GB: {-left:.3g} GB are missing."
    return f"Rank {rank.rank}, the fullest, fits in {limit / 1e9:g} GB with {left:.3g} to spare."


def _verdict(s: Summary) -> str:
    p = s.prediction
    step = f"step {format_time(p.step, p.unit)}, bubble of the busiest rank {format_share(p.bubble)}"
    peak = f"peak waiting {format_bytes(p.peak_bytes)}"
    sent = f"{p.messages.count} messages of {format_bytes(p.messages.bytes)} in total"
    lines = wrap(f"Predicted: {step}, {peak}; {sent}.")
    if (equal := p.equal_stages) is not None:
        work = f"With the same work in equal stages: bubble {format_share(equal.bubble)}"
        lines += wrap(f"{work}, by the closed form of {equal.schedule}, {equal.formula}.")
    return "\n".join(lines)


def _vocabulary(s: Summary) -> str:
    v = s.vocabulary
    if v is None:
        return ""
    words = f"{v.words[0]} words a rank" if len(set(v.words)) == 1 else f"{', '.join(map(str, v.words))} words by rank"
    passes = f"S {format_count(v.flops['S'])} and T {format_count(v.flops['T'])} FLOPs per microbatch"
    kept = "logits wait from S to T" if v.keeps_logits else "T recomputes the logits"
    also = f" The embedding {v.embedding} is sharded too." if v.embedding else ""
    lines = wrap(f"Output layer sharded over all ranks: {v.found}; {words}, {passes}; {kept}.{also}")
    steps = (v.unsharded_step, "on the last stage beside the layers that are there now")
    around = (v.redistributed_step, "on the last stage, the layers redistributed around it (--vocab off)")
    for step, where in (steps, around):
        if step is not None:
            change = s.prediction.step / step - 1
            lines += wrap(
                f"Whole {where}: step {format_time(step, s.prediction.unit)}; sharded {format_change(change)}."
            )
    return "\n".join(lines)


def _advice(s: Summary) -> str:
    fullest = max(s.per_rank, key=lambda rank: rank.peak_bytes)
    memory = f"Most waits on rank {fullest.rank}: {format_bytes(fullest.peak_bytes)} at its peak."
    lines = wrap(f"{s.limits} {format_idle(s.idle)} {memory} {s.balance.overweight}".rstrip())
    worth = [
        f"{a.option} ({a.change}): {_effect(a)}, bubble {format_share(a.bubble)}" for a in s.alternatives if a.worth
    ]
    rest = [f"{a.option} ({_effect(a)})" for a in s.alternatives if not a.worth]
    lines += ["", *(line for text in worth for line in wrap(f"- {text}"))] if worth else []
    lines += ["", *wrap(f"Tried without gain: {'; '.join(rest)}.")] if rest else []
    lines += [line for each in s.impossible for line in wrap(f"Not tried: {each.option}: {each.reason}")]
    return titled("What limits it, and what to try (each predicted)", "\n".join(lines))


def _effect(a: Alternative) -> str:
    time, peak = (format_change(ratio - 1) for ratio in (a.time_ratio, a.peak_ratio))
    return f"{time} time per microbatch, {peak} peak memory"


def _notes(s: Summary) -> str:
    notes = (
        [f"{', '.join(s.dropped_outputs)}: returned beside the loss, dropped in training."] if s.dropped_outputs else []
    )
    random = [str(stage.stage) for stage in s.stages if stage.random]
    if random:
        notes.append(
            f"stages that draw random numbers: {', '.join(random)}; the generator's state travels with the activations."
        )
    if s.estimated:
        notes.append(f"FLOPs unknown, so timed by the bytes that they move: {', '.join(s.estimated)}.")
    if s.shared_parameters:
        notes.append(f"on several stages, gradients summed over them: {', '.join(s.shared_parameters)}.")
    notes += [f"warning while capturing: {text}" for text in s.warnings]
    lines = [line for note in notes for line in wrap(f"- {note}")]
    return titled("Notes", "\n".join(lines)) if lines else ""
