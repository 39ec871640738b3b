"""Records of checkpoints that were edited by someone who knows the format, with the digest computed again."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from zbcompile.json_text import to_text
from zbcompile.persistence.checkpoint_directory import INDEX
from zbcompile.persistence.saved_state import StoredChunk, covers
from zbcompile.program.manifest import digest_of

Box = tuple[tuple[int, ...], tuple[int, ...]]


def resaved(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A checkpoint whose record was changed, with its digest computed anew."""
    path = zbcompile.save_checkpoint(folder, nn.Linear(4, 4), step=1)
    data = json.loads((path / INDEX).read_text())
    change(data)
    digest = digest_of({key: value for key, value in data.items() if key != "digest"})
    (path / INDEX).write_text(to_text({**data, "digest": digest}, 2))
    return path


@pytest.mark.parametrize("step", [None, -1, "7", [], True, 0.5])
def test_a_step_that_is_no_count_is_refused(step: Any, tmp_path: Path) -> None:
    path = resaved(tmp_path, lambda data: data.update(step=step))
    with pytest.raises(zbcompile.PipelineError, match="is not a size"):
        zbcompile.load_checkpoint(path, nn.Linear(4, 4))


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    def overlap(data: dict[str, Any]) -> None:
        entry = data["tensors"]["model.weight"]
        (_, _, file, sha256), *_ = entry["chunks"]
        entry["chunks"] = [[[0, 0], [2, 4], file, sha256], [[1, 0], [2, 4], file, sha256]]

    with pytest.raises(zbcompile.PipelineError, match="do not cover it, each element once"):
        zbcompile.load_checkpoint(resaved(tmp_path, overlap), nn.Linear(4, 4))


@pytest.mark.parametrize("long", ["dtype", "file"])
def test_a_refusal_quotes_a_value_only_as_far_as_one_reads(long: str, tmp_path: Path) -> None:
    def lengthen(data: dict[str, Any]) -> None:
        entry = data["tensors"]["model.weight"]
        if long == "dtype":
            entry["dtype"] = [0] * 10**5
        else:
            entry["chunks"][0][2] = "1" * 10**5

    with pytest.raises(zbcompile.PipelineError, match="is damaged") as refused:
        zbcompile.load_checkpoint(resaved(tmp_path, lengthen), nn.Linear(4, 4))
    assert len(str(refused.value)) < 600


def halves(box: Box, chance: random.Random, cuts: int) -> list[Box]:
    """`box` cut at random into `cuts` + 1 boxes."""
    found = [box]
    for _ in range(cuts):
        offset, shape = found.pop(chance.randrange(len(found)))
        place = chance.randrange(len(shape))
        first = chance.randint(0, shape[place])
        found += [(offset, (*shape[:place], first, *shape[place + 1 :]))]
        moved = (*offset[:place], offset[place] + first, *offset[place + 1 :])
        found += [(moved, (*shape[:place], shape[place] - first, *shape[place + 1 :]))]
    return found


def test_chunks_cover_a_tensor_just_if_each_element_is_in_one() -> None:
    chance, shape = random.Random(0), (3, 4, 2)
    for number in range(200):
        boxes = halves(((0, 0, 0), shape), chance, chance.randrange(5))
        if number % 2:
            other, (offset, size) = chance.randrange(len(boxes)), chance.choice(boxes)
            boxes[other] = tuple(max(0, at - chance.randint(0, 1)) for at in offset), size
        counts = torch.zeros(shape)
        for offset, size in boxes:
            counts[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))] += 1
        chunks = [StoredChunk(offset, size, "", "") for offset, size in boxes]
        assert covers(chunks, shape) == bool((counts == 1).all())
