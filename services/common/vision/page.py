"""Nougat (arXiv:2308.13418) and Donut (arXiv:2111.15664): a page, which an encoder reads, in a picture of one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.vision.layout import Layout, PictureShape
from services.common.vision.resize import check_sides, resize
from services.common.vision.vision_fields import VisionFields

if TYPE_CHECKING:
    from PIL.Image import Image

BILINEAR, _BICUBIC, _TURN_RIGHT = 2, 3, 4  # as Pillow numbers its filters and ROTATE_270
_GREY = 200  # after stretching to 0 to 255: what is darker belongs to the page
_REDUCING_GAP = 2.0
_NOUGAT, _DONUT = "Nougat", "Donut"


@dataclass(frozen=True, slots=True)
class PageLayout(Layout):
    """A page keeps its proportions, with black borders. No token of a prompt stands for it."""

    height: int
    width: int
    resample: int
    num_rows: int  # of the encoder's output
    crops_margin: bool
    turns: bool  # a page whose longer side is not that of the picture
    is_nougat: bool  # which makes pages smaller with another filter than Donut

    def shape_of(self, height: int, width: int, *, is_low: bool) -> PictureShape:
        return PictureShape(1, self.height, self.width, height, width, self.num_rows)

    def tiles_of(self, picture: Image, shape: PictureShape) -> list[Image]:
        if self.crops_margin:
            picture = without_margin(picture)
        is_wide, is_high = picture.width > picture.height, picture.width < picture.height
        if self.turns and (is_wide if self.width < self.height else is_high and self.width > self.height):
            picture = picture.transpose(_TURN_RIGHT)
        check_sides("a page", picture.width, picture.height)
        shorter, longer = sorted((picture.width, picture.height))
        side = min(self.height, self.width)
        scaled = int(side * longer / shorter)
        size = (side, scaled) if picture.width <= picture.height else (scaled, side)
        picture = self._fit(resize(picture, size, self.resample))
        left, top = (self.width - picture.width) // 2, (self.height - picture.height) // 2
        return [picture.crop((-left, -top, self.width - left, self.height - top))]  # what is outside is black

    def _fit(self, picture: Image) -> Image:
        """Made smaller where a side is longer than the page's."""
        width, height = min(picture.width, self.width), min(picture.height, self.height)
        if (width, height) == picture.size:
            return picture
        if picture.height > picture.width:
            width = max(1, int(picture.width * height / picture.height))
        elif picture.width > picture.height:
            height = max(1, int(picture.height * width / picture.width))
        if self.is_nougat:
            return picture.resize((width, height), _BICUBIC, reducing_gap=_REDUCING_GAP)
        return resize(picture, (width, height), self.resample)

    def tokens_of(self, shape: PictureShape, token: str) -> Sequence[str]:
        return ()


def without_margin(picture: Image) -> Image:
    """What is in the smallest box around all that is dark."""
    grey = picture.convert("L")
    darkest, lightest = grey.getextrema()
    if darkest == lightest:
        return picture
    is_dark = [255 * ((value - darkest) / (lightest - darkest) * 255 < _GREY) for value in range(256)]
    return picture.crop(grey.point(is_dark).getbbox())


def read_page(fields: VisionFields) -> tuple[None, PageLayout]:
    """The layout of a model's files. There is no tower: the model's encoder reads the picture."""
    processor = fields.processor
    kind = str(processor.get("image_processor_type") or processor.get("feature_extractor_type"))
    if not kind.startswith((_NOUGAT, _DONUT)):
        raise fields.error("image_processor_type", kind, f"supported: {_NOUGAT}ImageProcessor, {_DONUT}ImageProcessor")
    is_nougat = kind.startswith(_NOUGAT)
    for name in ("do_resize", "do_thumbnail", "do_pad"):
        fields.only(name, processor.get(name, True), True)
    for name in ("image_mean", "image_std"):  # which differ between the two
        if processor.get("do_normalize", True) and name not in processor:
            raise fields.error(name, None, "expected three numbers")
    size, given = fields.tower["image_size"], processor.get("size")
    height, width = (size, size) if isinstance(size, int) else size
    if isinstance(given, list):  # as old files of Donut have it
        given = dict(zip(("width", "height"), given, strict=True))
    found = (given or {}).get("height"), (given or {}).get("width")
    fields.only("size", found, (height, width))
    unit = fields.size("patch_size") * 2 ** (len(fields.tower["depths"]) - 1)  # pixels along a side of a row
    rows, columns = math.ceil(height / unit), math.ceil(width / unit)
    return None, PageLayout(
        height,
        width,
        processor.get("resample", BILINEAR),
        rows * columns,
        crops_margin=is_nougat and bool(processor.get("do_crop_margin", True)),
        turns=bool(processor.get("do_align_long_axis", False)),
        is_nougat=is_nougat,
    )
