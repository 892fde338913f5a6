"""`expand`: prompts with one token for each picture, and with all of them, as transformers' processors make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import InvalidRequest
from services.common.vision.vision_config import load_vision_config
from services.gateway.images.picture import Picture, expand
from tests.support.dense.vision_models import make_vision_model

TOKEN = "<picture>"


@pytest.mark.parametrize("variant", ["qwen2_5_vl", "mistral3", "internvl", "gemma3", "llava_next"])
def test_a_prompt_that_has_all_tokens_of_its_pictures_stays_as_it_is(tmp_path: Path, variant: str) -> None:
    vision = load_vision_config(make_vision_model(tmp_path, variant))
    assert vision is not None
    layout = vision.layout
    shapes = [layout.shape_of(height, width, is_low=False) for height, width in ((60, 90), (31, 30), (31, 30))]
    pictures = [Picture(f"{index:02x}", shape, b"") for index, shape in enumerate(shapes)]
    ids = {name: 100 + index for index, name in enumerate((TOKEN, *layout.other_tokens))}
    place = ids[TOKEN]
    given = [1, place, 2, 3, place, place]  # the last two follow each other
    whole, spans = expand(given, pictures, layout, ids, TOKEN)
    assert whole.count(place) == sum(layout.tokens_of(each, TOKEN).count(TOKEN) for each in shapes) > 3
    assert [each.hash for each in spans] == [each.hash for each in pictures]
    assert expand(whole, pictures, layout, ids, TOKEN) == (whole, spans)
    first = whole.index(place)
    for wrong in (whole[:first] + whole[first + 1 :], [*whole, place], given[:-1], [*given, place]):
        with pytest.raises(InvalidRequest, match=r"places for pictures .* has 3 pictures of"):
            expand(wrong, pictures, layout, ids, TOKEN)
    if layout.other_tokens:  # as many, but not those of the picture
        other = next(index for index, each in enumerate(whole) if each > place)
        with pytest.raises(InvalidRequest, match="places for pictures"):
            expand([*whole[:other], 7, *whole[other + 1 :]], pictures, layout, ids, TOKEN)
