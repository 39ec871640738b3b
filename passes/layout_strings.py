"""Megatron-LM's pipeline layout strings, such as `Et*3|(tt|)*29,m|L`: what each stage holds.

`E` is the embedding, `t` a layer, `m` multi-token prediction, `L` the output layer with the loss;
`|` ends a stage, `*N` repeats the letter or the group in parentheses before it, commas only
separate.
"""

import re
from itertools import accumulate

MARK = re.compile(r"layout:([tmL])(\d*)/(\d+)")
_REPEATED = re.compile(r"\(([^()]*)\)(?:\*(\d+))?|([EtmL|])\*(\d+)")


def stages_of_layout(text: str) -> tuple[str, ...]:
    """The letters of every stage. Raises ValueError for what is no layout.

    >>> stages_of_layout("Et*2|(t|)*2,m|L")
    ('Ett', 't', 't', 'm', 'L')
    """
    flat = text.replace(",", "").replace(" ", "")
    while match := _REPEATED.search(flat):
        inner, times, letter, more = match.groups()
        part, count = inner or letter or "", int(times or more or 1)
        if len(flat) + len(part) * count > 100_000:
            raise ValueError("expected a layout of at most 100,000 letters")
        flat = flat[: match.start()] + part * count + flat[match.end() :]
    if not re.fullmatch(r"[|]*E?[t|]*[m|]*L", flat):
        raise ValueError(
            "expected E, then t for each layer, m, and L once at the end, with | between stages"
        )
    return tuple(flat.split("|"))


def cuts_of_layout(text: str) -> tuple[str, ...]:
    """The cuts of a layout as names that `edges_named` knows: what comes first behind each, such as
    layer 2 of 8.

    >>> cuts_of_layout("Et|t||tL")
    ('layout:t1/3', 'layout:t2/3', 'layout:t2/3')
    """
    stages = stages_of_layout(text)
    count = "".join(stages).count("t")
    before = [0, *accumulate(stage.count("t") for stage in stages)]
    names = []
    for at in range(1, len(stages)):
        letter = next(each for stage in stages[at:] for each in stage)
        names.append(f"layout:{letter}{before[at] if letter == 't' else ''}/{count}")
    return tuple(names)
