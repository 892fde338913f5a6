"""`VisionConfig`: how a model sees pictures, as gateway and dense worker use it. Only plain values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ModelError
from services.common.hf_config import parse_hf_config
from services.common.json_files.processor_files import IMAGE_PROCESSOR, no_processor, read_processor
from services.common.json_files.read_json import read_json
from services.common.vision.blip2 import CHAT_TEMPLATE, Blip2Tower, read_blip2
from services.common.vision.gemma3 import Gemma3Tower, read_gemma3
from services.common.vision.internvl import InternVLTower, read_internvl
from services.common.vision.layout import Layout
from services.common.vision.llava import LlavaTower, read_llava
from services.common.vision.llava_next import read_llava_next, read_llava_onevision
from services.common.vision.page import read_page
from services.common.vision.pixtral import PixtralTower, read_mistral3
from services.common.vision.qwen_vl import QwenTower, read_qwen2_5_vl, read_qwen3_vl
from services.common.vision.vision_fields import VisionFields

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of OpenAI's CLIP
HALF = (0.5, 0.5, 0.5)

TowerConfig = QwenTower | LlavaTower | Gemma3Tower | PixtralTower | InternVLTower | Blip2Tower


@dataclass(frozen=True, slots=True)
class PixelScale:
    """A byte of a colour becomes (byte * factor - mean) / std."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How a family is read, and the mean and deviation of colours where its files have none."""

    read: Callable[[VisionFields], tuple[TowerConfig | None, Layout]]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    chat_template: str = ""  # for files that have none, with "<picture>" for the token of a picture
    precedes_text: bool = False  # pictures stand before the token that begins a text
    config: str = "vision_config"  # the field of config.json that says how it sees


FAMILIES: dict[str, VisionFamily] = {  # by model_type of config.json
    "blip-2": VisionFamily(read_blip2, CLIP_MEAN, CLIP_STD, CHAT_TEMPLATE, precedes_text=True),
    "gemma3": VisionFamily(read_gemma3, HALF, HALF),
    "internvl": VisionFamily(read_internvl, CLIP_MEAN, CLIP_STD),
    "llava": VisionFamily(read_llava, CLIP_MEAN, CLIP_STD),
    "llava_next": VisionFamily(read_llava_next, CLIP_MEAN, CLIP_STD),
    "llava_onevision": VisionFamily(read_llava_onevision, CLIP_MEAN, CLIP_STD),
    "mistral3": VisionFamily(read_mistral3, CLIP_MEAN, CLIP_STD),
    "qwen2_5_vl": VisionFamily(read_qwen2_5_vl, CLIP_MEAN, CLIP_STD),
    "qwen3_vl": VisionFamily(read_qwen3_vl, CLIP_MEAN, CLIP_STD),
    "qwen3_vl_moe": VisionFamily(read_qwen3_vl, CLIP_MEAN, CLIP_STD),
    "vision-encoder-decoder": VisionFamily(read_page, HALF, HALF, config="encoder"),
}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The tower and the layout of pictures of one model."""

    family: str  # key of FAMILIES
    image_token_id: int  # stands in prompts for the rows of the tower's output; without a tower of no meaning
    pixels: PixelScale
    tower: TowerConfig | None  # None: an encoder reads pictures, for the cross attention of a decoder
    layout: Layout


def load_vision_config(path: Path) -> VisionConfig | None:
    """How the model in a directory sees pictures; None: it does not, or its tower is not supported, or its directory
    lacks what `why_blind` says: then its text part alone is served.

    Raises `ModelError` for files that contradict each other, or that the tower cannot compute.
    """
    raw = read_json(path / "config.json")
    family = FAMILIES.get(str((raw or {}).get("model_type")))
    if raw is None or family is None or (processor := read_processor(path, IMAGE_PROCESSOR)) is None:
        return None
    try:
        hf = parse_hf_config(raw)
        fields = VisionFields(path, hf.to_dict(), getattr(hf, family.config).to_dict(), processor)
        tower, layout = family.read(fields)
        return VisionConfig(
            raw["model_type"],
            0 if tower is None else _image_token_id(fields),
            PixelScale(
                _number(fields, "rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1.0,
                _colours(fields, "image_mean", family.mean),
                _colours(fields, "image_std", family.std),
            ),
            tower,
            layout,
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} has no valid config of its pictures: {type(error).__name__}: {error}") from error


def vision_family(path: Path) -> VisionFamily | None:
    """The family of the model in a directory, whose files may lack something; None: it sees no pictures."""
    return FAMILIES.get(str((read_json(path / "config.json") or {}).get("model_type")))


def why_blind(path: Path) -> str | None:
    """What the directory of a model lacks, in words, whose tower is supported and which sees no pictures without it."""
    if vision_family(path) is None or read_processor(path, IMAGE_PROCESSOR) is not None:
        return None
    return f"{path} has {no_processor(IMAGE_PROCESSOR)}, which say how pictures become numbers"


def _image_token_id(fields: VisionFields) -> int:
    value = fields.outer.get("image_token_id", fields.outer.get("image_token_index"))
    if type(value) is not int or value < 0:
        raise fields.error("image_token_id", value, "expected the id of a token")
    return value


def _number(fields: VisionFields, name: str, default: float) -> float:
    value = fields.processor.get(name, default)
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise fields.error(name, value, "expected a number above 0")
    return float(value)


def _colours(fields: VisionFields, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    """Three numbers. Without normalization these are 0 and 1."""
    if not fields.processor.get("do_normalize", True):
        return (0.0,) * 3 if name == "image_mean" else (1.0,) * 3
    values: Any = fields.processor.get(name) or default
    is_list = isinstance(values, list | tuple) and len(values) == 3
    if not is_list or not all(isinstance(each, int | float) and math.isfinite(each) for each in values):
        raise fields.error(name, values, "expected three numbers")
    if name == "image_std" and min(values) <= 0:
        raise fields.error(name, values, "expected numbers above 0")
    return tuple(map(float, values))
