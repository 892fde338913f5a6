"""Directories with processor_config.json, as transformers 5 saves them, are read as those of earlier versions."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import transformers
from transformers import AutoTokenizer, LlavaProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from services.common.config import EMBEDDED_MODEL
from services.common.errors import ModelError
from services.common.json_files.processor_files import (
    IMAGE_PROCESSOR,
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    read_processor,
)
from services.common.vision.vision_config import load_vision_config, why_blind
from tests.support.dense.vision_models import VARIANTS


def write_config(path: Path, variant: str) -> None:
    each = VARIANTS[variant]
    getattr(transformers, each.model_class).config_class(**each.config).save_pretrained(path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_image_processor_is_read_from_either_file(variant: str, tmp_path: Path) -> None:
    each = VARIANTS[variant]
    module = importlib.import_module(f"transformers.models.{each.processor_module}")
    processor = getattr(module, each.processor_class)(**each.processor)
    write_config(tmp_path, variant)
    processor.save_pretrained(tmp_path)
    older = load_vision_config(tmp_path)
    assert older is not None
    (tmp_path / PREPROCESSOR_FILE).unlink()
    assert load_vision_config(tmp_path) is None
    newer = {"image_processor": processor.to_dict(), "image_token": "<image>"}
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(newer))
    assert load_vision_config(tmp_path) == older and why_blind(tmp_path) is None


def test_what_a_processor_saves(tmp_path: Path) -> None:
    write_config(tmp_path, "llava")
    pictures = LlavaImageProcessorPil(**VARIANTS["llava"].processor, image_mean=[0.1, 0.2, 0.3])
    LlavaProcessor(pictures, AutoTokenizer.from_pretrained(EMBEDDED_MODEL)).save_pretrained(tmp_path)
    assert not (tmp_path / PREPROCESSOR_FILE).exists()
    vision = load_vision_config(tmp_path)
    assert vision is not None and vision.pixels.mean == (0.1, 0.2, 0.3)
    (tmp_path / PREPROCESSOR_FILE).write_text("{}")  # of an earlier save
    assert load_vision_config(tmp_path) == vision, "transformers reads the newer file, too"


def test_a_processor_config_without_that_part(tmp_path: Path) -> None:
    """As transformers 4 wrote it beside the other file."""
    write_config(tmp_path, "llava")
    (tmp_path / PROCESSOR_FILE).write_text('{"processor_class": "LlavaProcessor", "patch_size": 8}')
    assert load_vision_config(tmp_path) is None
    lack = why_blind(tmp_path)
    assert lack is not None and PREPROCESSOR_FILE in lack and PROCESSOR_FILE in lack
    (tmp_path / PREPROCESSOR_FILE).write_text(json.dumps(VARIANTS["llava"].processor))
    assert load_vision_config(tmp_path) is not None and why_blind(tmp_path) is None


def test_a_part_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / PROCESSOR_FILE).write_text('{"image_processor": [1]}')
    with pytest.raises(ModelError, match=r"has image_processor \[1\], expected an object"):
        read_processor(tmp_path, IMAGE_PROCESSOR)


def test_a_model_of_text_lacks_nothing() -> None:
    assert why_blind(EMBEDDED_MODEL) is None
