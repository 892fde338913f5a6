"""Why a dense worker takes no pictures, in words; None where it does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.config import Config, DenseSection, ModelSection
from services.common.rank import Rank
from services.common.resolve import resolve_model
from services.dense_worker.encoders.encoder import EncodedKey
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.engine.waiting_queue import WaitingQueue
from services.dense_worker.features.images.images_feature import SequenceImages
from services.dense_worker.features.images.prepare_images import prepare_images, why_no_pictures
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.parameters import parameters, parts_of_type
from tests.support.dense.scheduler_cluster import make_sequence
from tests.support.dense.vision_models import make_vision_model


@pytest.mark.parametrize(
    ("variant", "num_layers", "settings", "reason"),
    [
        ("qwen3_vl", 4, {"tensor_parallel_size": 2}, None),
        ("qwen3_vl", 5, {"pipeline_parallel_size": 2}, None),
        ("qwen3_vl", 4, {"pipeline_parallel_size": 2}, "added after the first 2 layers, .* has 2: it needs 3"),
        ("llava", 2, {"pipeline_parallel_size": 2}, None),
        ("llava", 2, {"backend": "tensorrt"}, None),
        ("llava", 2, {"deterministic": True}, None),
        ("gemma3", 3, {"deterministic": True}, "dense.deterministic is true, .* see each other"),
    ],
)
def test_reasons(variant: str, num_layers: int, settings: dict, reason: str | None, tmp_path: Path) -> None:
    path = make_vision_model(tmp_path / "model", variant, text={"num_hidden_layers": num_layers})
    config = Config(model=ModelSection(path=path), dense=DenseSection(**settings))
    model = replace(resolve_model(config.model, "cpu"), rank=Rank.of(config.dense, 0))
    found = why_no_pictures(config, model)
    assert (found is None) if reason is None else (found is not None and re.search(reason, found)), found


@pytest.mark.parametrize(("is_deterministic", "runs"), [(False, [3]), (True, [1, 1, 1])])
def test_with_equal_bits_a_run_has_one_picture(is_deterministic: bool, runs: list[int], tmp_path: Path) -> None:
    path = make_vision_model(tmp_path / "model", "llava")
    config = Config(model=ModelSection(path=path), dense=DenseSection(deterministic=is_deterministic))
    prepared = prepare_images(config, resolve_model(config.model, "cpu"), "", None, None, lambda line: None)
    assert prepared is not None
    feature = prepared.load()
    assert feature.runs is not None
    feature.start(lambda event: None)
    found, encoder = list[int](), feature.runs._encoder
    begin = encoder.begin
    encoder.begin = lambda inputs: (found.append(len(inputs)), begin(inputs))[1]  # type: ignore[method-assign]
    shape = prepared.vision.layout.shape_of(30, 30, is_low=False)
    pixels = torch.zeros(shape.pixels_shape, dtype=torch.uint8)
    pictures = tuple(Picture(name, shape, pixels) for name in "abc")
    sequence = make_sequence(1, prompt_len=3, max_tokens=4)
    sequence.features = (SequenceImages((), pictures, feature.runs),)
    key = EncodedKey("images", tuple(each.hash for each in pictures))
    waiting = WaitingQueue(100, 10_000, 1.0)
    waiting.admit(sequence)
    waiting.push(sequence, [key])
    for _ in range(100):
        if feature.runs.has(key):
            break
        feature.provide(waiting, None)
    assert found == runs


@pytest.mark.parametrize(("variant", "is_fp8"), [("qwen2_5_vl", True), ("llava", False)])
def test_fp8_is_for_the_layers_of_qwen_towers(variant: str, is_fp8: bool, tmp_path: Path) -> None:
    path = make_vision_model(tmp_path / "model", variant)
    config = Config(model=ModelSection(path=path), dense=DenseSection(quantization="fp8"))
    model = resolve_model(config.model, "cpu")
    prepared = prepare_images(config, model, "digest", None, None, lambda line: None)
    assert prepared is not None
    found = {each.name for each in parts_of_type(Linear, prepared.stored.load().tower) if _is_fp8(each)}
    assert found == ({"qkv", "o", "mlp_in", "down"} if is_fp8 else set())


def _is_fp8(linear: Linear) -> bool:
    return any(each.data.dtype == torch.float8_e4m3fn for each in parameters(linear))
