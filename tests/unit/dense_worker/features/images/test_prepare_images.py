"""Why a dense worker takes no pictures, in words; None where it does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.config import Config, DenseSection, ModelSection
from services.common.rank import Rank
from services.common.resolve import resolve_model
from services.dense_worker.features.images.prepare_images import why_no_pictures
from tests.support.dense.vision_models import make_vision_model


@pytest.mark.parametrize(
    ("variant", "num_layers", "settings", "reason"),
    [
        ("qwen3_vl", 4, {"tensor_parallel_size": 2}, None),
        ("qwen3_vl", 5, {"pipeline_parallel_size": 2}, None),
        ("qwen3_vl", 4, {"pipeline_parallel_size": 2}, "added after the first 2 layers, .* has 2: it needs 3"),
        ("llava", 2, {"pipeline_parallel_size": 2}, None),
        ("llava", 2, {"backend": "tensorrt"}, None),
        ("llava", 2, {"deterministic": True}, "dense.deterministic is true"),
    ],
)
def test_reasons(variant: str, num_layers: int, settings: dict, reason: str | None, tmp_path: Path) -> None:
    path = make_vision_model(tmp_path / "model", variant, text={"num_hidden_layers": num_layers})
    config = Config(model=ModelSection(path=path), dense=DenseSection(**settings))
    model = replace(resolve_model(config.model, "cpu"), rank=Rank.of(config.dense, 0))
    found = why_no_pictures(config, model)
    assert (found is None) if reason is None else (found is not None and re.search(reason, found)), found
