"""Grids of tiles for pictures of all proportions, and files of towers that are refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from services.common.errors import ModelError
from services.common.vision.internvl import MAX_TILES, GridLayout
from services.common.vision.vision_config import load_vision_config
from tests.support.dense.vision_models import VARIANTS, noise

SIDES = (1, 9, 31, 32, 33, 48, 63, 64, 65, 80, 96, 100, 127, 128, 200, 321, 1000, 20_000)


@pytest.mark.parametrize(("min_tiles", "max_tiles"), [(1, 12), (1, 1), (2, 6), (5, 5), (1, MAX_TILES)])
def test_grids_are_those_of_transformers(min_tiles: int, max_tiles: int) -> None:
    layout = GridLayout(32, min_tiles, max_tiles, rows_of_tile=4, resample=3)
    for height, width in itertools.product(SIDES, SIDES):
        columns, rows = get_optimal_tiled_canvas((height, width), (32, 32), min_tiles, max_tiles)
        num_tiles = rows * columns + (rows * columns > 1)
        shape = layout.shape_of(height, width, is_low=False)
        assert (shape.num_tiles, shape.num_tokens) == (num_tiles, 4 * num_tiles + 2) and num_tiles <= max_tiles + 1


def test_little_detail_is_one_tile() -> None:
    layout = GridLayout(32, 2, 12, rows_of_tile=4, resample=3)
    picture = noise(64, 96, 1)
    shape = layout.shape_of(64, 96, is_low=True)
    [tile] = layout.tiles_of(picture, shape)
    assert (shape.num_tiles, tile.size) == (1, (32, 32))
    assert tile.tobytes() == layout.tiles_of(picture, layout.shape_of(64, 96, is_low=False))[-1].tobytes()
    assert layout.tokens_of(shape, "a") == ["<img>", *"aaaa", "</img>"]


@pytest.mark.parametrize(
    ("variant", "config", "tower", "processor", "message"),
    [
        ("internvl", {"vision_feature_layer": -2}, {}, {}, "vision_feature_layer -2 for pictures, supported: -1"),
        ("internvl", {"vision_feature_select_strategy": "full"}, {}, {}, "'full' for pictures, supported: default"),
        ("internvl", {"downsample_ratio": 0.3}, {}, {}, "downsample_ratio 0.3 for pictures, expected 1 divided by"),
        ("internvl", {"downsample_ratio": 0.0}, {}, {}, "downsample_ratio 0.0 for pictures, expected 1 divided by"),
        ("internvl", {"image_seq_length": 15}, {}, {}, "image_seq_length 15 for pictures, supported: 16"),
        ("internvl", {}, {"image_size": [32, 64]}, {}, r"image_size \[32, 64\] for pictures, expected a whole number"),
        ("internvl", {}, {"image_size": []}, {}, r"image_size \[\] for pictures, expected a whole number"),
        ("internvl", {}, {"norm_type": "batch_norm"}, {}, "norm_type 'batch_norm' for pictures, supported: layer_norm"),
        ("internvl", {}, {"use_absolute_position_embeddings": False}, {}, "embeddings False for pictures"),
        ("internvl", {}, {}, {"max_patches": MAX_TILES + 1}, r"max_patches \(1, 65\) for pictures, expected two whole"),
        ("internvl", {}, {}, {"min_patches": 7}, r"max_patches \(7, 6\) for pictures, expected two whole"),
        ("internvl", {}, {}, {"size": {"height": 64, "width": 32}}, r"size \(64, 32\) for pictures, supported: \(32"),
        ("llava_onevision", {"vision_aspect_ratio": "pad"}, {}, {}, "vision_aspect_ratio 'pad' for pictures, expected"),
        ("llava_onevision", {"image_grid_pinpoints": [[32, 33]]}, {}, {}, "pairs of multiples of 32"),
        ("llava_onevision", {}, {}, {"size": {"shortest_edge": 32}}, r"size \(None, None\) for pictures, supported"),
    ],
)
def test_files_that_no_tower_computes_are_refused(
    variant: str,
    config: dict[str, Any],
    tower: dict[str, Any],
    processor: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    each = VARIANTS[variant]
    raw = {"model_type": variant, **each.config, "vision_config": {**each.config["vision_config"], **tower}, **config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**each.processor, **processor}))
    with pytest.raises(ModelError, match=message):
        load_vision_config(tmp_path)
