"""No page of the documentation names what the library no longer has, except in a recipe that
replaces it."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
RECIPE = re.compile(r"^#+ Recipe:.*?(?=^#|\Z)", re.MULTILINE | re.DOTALL)

REMOVED = (
    # commands and their flags
    *(
        r"zbcompile\.plan\b",
        r"zbcompile\.calibrate",
        r"zbcompile\.doctor",
        r"zbcompile\.checkpoints",
    ),
    *(
        "schedules formula",
        "schedules search",
        "--explain-idle",
        "--fused",
        "--diff",
        "--quick",
        "--thorough",
    ),
    *("--reshard", "--certify", "--mesh"),
    # functions and classes
    *(
        r"zbcompile\.ema",
        r"zbcompile\.buckets",
        r"zbcompile\.monitor",
        r"zbcompile\.trace\b",
        "as_schedule",
    ),
    *(
        r"zbcompile\.Figures",
        "PlacementError",
        "GradScaler",
        r"zbcompile\.Memory",
        r"zbcompile\.Vocab\b",
    ),
    *(
        r"zbcompile\.apply_tensor_parallel_plan",
        r"zbcompile\.divide_experts",
        r"LayoutTrials|LinePrices",
    ),
    # options
    *(
        "mesh_names",
        "max_ctas",
        "max_receives",
        "weight_recompute",
        r"relay=",
        "boundary_bytes",
        "vocab_logits",
    ),
    *(
        "compare_batches",
        "search_seconds",
        r"channels=",
        r"balance=\"(?:parameters|makespan|measured)\"",
    ),
    *(r"zero=[23]", "reshard_after_forward", r"\d(?:ms|us|s)/GiB", r"cuda_graphs=\"step\""),
    *(r"eval\([^)]*mode=", "entropies", r"load_checkpoint\([^)]*(?:random|fallback)="),
    # names of schedules, actions, environment variables
    *(
        "eager-1f1b",
        "1f1b-v",
        r"\bFETCH\b",
        "ZBCOMPILE_PAIR_STREAMS",
        "ZBCOMPILE_TRACEBACK",
        "message_slack",
    ),
)


def test_pages_name_nothing_that_was_removed() -> None:
    result = []
    for page in PAGES:
        text = RECIPE.sub(
            lambda recipe: "\n" * recipe[0].count("\n"), page.read_text(encoding="utf-8")
        )
        for name in REMOVED:
            result += [f"{page.relative_to(ROOT)}: {match[0]}" for match in re.finditer(name, text)]
    assert not result
