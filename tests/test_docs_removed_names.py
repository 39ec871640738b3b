"""No page of the documentation names what the library no longer has, except in a recipe that
replaces it."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
RECIPE = re.compile(r"^#+ Recipe:.*?(?=^#|\Z)", re.MULTILINE | re.DOTALL)

# Expressions: commands and their flags; functions and classes; options; names of schedules, actions
# and environment variables.
REMOVED = r"""
zbcompile\.plan\b zbcompile\.calibrate zbcompile\.doctor zbcompile\.checkpoints schedules\sformula
schedules\ssearch --explain-idle --fused --diff --quick --thorough --reshard --certify --mesh
zbcompile\.ema zbcompile\.buckets zbcompile\.monitor zbcompile\.trace\b as_schedule
zbcompile\.Figures PlacementError GradScaler zbcompile\.Memory zbcompile\.Vocab\b
zbcompile\.apply_tensor_parallel_plan zbcompile\.divide_experts LayoutTrials|LinePrices
mesh_names max_ctas max_receives weight_recompute relay= boundary_bytes vocab_logits
compare_batches search_seconds channels= balance="(?:parameters|makespan|measured)" zero=[23]
reshard_after_forward \d(?:ms|us|s)/GiB cuda_graphs="step" eval\([^)]*mode= entropies
load_checkpoint\([^)]*(?:random|fallback)= eager-1f1b 1f1b-v \bFETCH\b ZBCOMPILE_PAIR_STREAMS
ZBCOMPILE_TRACEBACK message_slack
"""


def test_pages_name_nothing_that_was_removed() -> None:
    result = []
    for page in PAGES:
        text = RECIPE.sub(
            lambda recipe: "\n" * recipe[0].count("\n"), page.read_text(encoding="utf-8")
        )
        for name in REMOVED.split():
            result += [f"{page.relative_to(ROOT)}: {match[0]}" for match in re.finditer(name, text)]
    assert not result
