"""Gemma 3 (arXiv:2503.19786, section 2.1): a picture becomes a square of one size, and SigLIP's rows are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from services.common.vision.llava import StretchedLayout
from services.common.vision.patch_tower import SIGLIP, TowerWithPatches, read_patch_tower
from services.common.vision.vision_fields import VisionFields

BILINEAR = 2  # as Pillow numbers it
_START, _END = "<start_of_image>", "<end_of_image>"


@dataclass(frozen=True, slots=True)
class Gemma3Tower(TowerWithPatches):
    """SigLIP's tower, and squares of its rows that are averaged, normalised and multiplied."""

    num_columns: int  # of averages, along a side


@dataclass(frozen=True, slots=True)
class SquareLayout(StretchedLayout):
    """With the text that Gemma has around a picture."""

    marker: ClassVar[str] = _START
    text: ClassVar[str] = f"\n\n{_START}{{}}{_END}\n\n"


def read_gemma3(fields: VisionFields) -> tuple[Gemma3Tower, SquareLayout]:
    """The tower and the layout of a model's files."""
    fields.only("model_type", fields.tower.get("model_type"), SIGLIP)
    patches = read_patch_tower(fields, fields.size("num_hidden_layers"), has_final_norm=True)
    num_tokens, side = fields.outer["mm_tokens_per_image"], patches.image_size
    num_columns = int(num_tokens**0.5)
    if num_columns**2 != num_tokens or patches.num_columns % num_columns:
        raise fields.error("mm_tokens_per_image", num_tokens, f"expected a square that divides {patches.num_columns}²")
    fields.only_square("size", side)
    fields.only("do_pan_and_scan", bool(fields.processor.get("do_pan_and_scan")), False)
    tower = Gemma3Tower(patches, fields.outer["text_config"]["hidden_size"], num_columns)
    return tower, SquareLayout(side, fields.processor.get("resample", BILINEAR), num_tokens)
