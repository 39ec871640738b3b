"""`ZBCOMPILE_DUMP=DIR`: the graphs after every pass of the compiler, as files to read and to compare."""

import os
from pathlib import Path

from zbcompile.passes.pass_list.run_passes import PassRun
from zbcompile.passes.verification.graph_views import graphs_of


def dump_graphs(folder: Path, run: PassRun) -> None:
    """Writes what a pass made into `folder/rankN/NUMBER-PASS.txt`, with the stage in the name if it is over one.

    Numbers count up in the order in which passes end, also over several compilations.
    """
    own = folder / f"rank{os.environ.get('RANK', '0')}"
    own.mkdir(parents=True, exist_ok=True)
    where = "" if run.stage is None else f"-stage{run.stage}"
    texts = [
        f"# {view.title}\n{view.module.print_readable(print_output=False, include_stride=True)}\n"
        for view in graphs_of(run.made)
    ]
    number = sum(1 for _ in own.iterdir())
    (own / f"{number:04}-{run.name}{where}.txt").write_text("\n".join(texts), encoding="utf-8")
