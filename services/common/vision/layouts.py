"""All layouts, by name, so that a process can be told which one it uses."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from services.common.vision.gemma3 import SquareLayout
from services.common.vision.internvl import GridLayout
from services.common.vision.layout import Layout
from services.common.vision.llava import CropLayout, StretchedLayout
from services.common.vision.llava_next import TiledLayout
from services.common.vision.page import PageLayout
from services.common.vision.pixtral import PixtralLayout
from services.common.vision.qwen_vl import QwenLayout

LAYOUTS: dict[str, type] = {
    each.__name__: each
    for each in (
        CropLayout,
        GridLayout,
        PageLayout,
        PixtralLayout,
        QwenLayout,
        SquareLayout,
        StretchedLayout,
        TiledLayout,
    )
}


def describe(layout: Layout) -> dict[str, Any]:
    """A layout as JSON has it."""
    return {"kind": type(layout).__name__, "fields": asdict(layout)}


def layout_of(description: dict[str, Any]) -> Layout:
    """The layout of a description."""
    fields = {name: _as_tuples(each) for name, each in description["fields"].items()}
    return LAYOUTS[description["kind"]](**fields)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
