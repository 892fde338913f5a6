"""What does not run with several lanes is refused by name, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.common.config import EMBEDDED_MODEL, Config
from services.common.errors import ConfigError
from services.common.model_config import load_model_config
from services.common.several_lanes import check_lanes
from tests.support.dense.encoder_decoder_models import make_encoder_decoder
from tests.support.dense.family_models import make_family_model

REFUSED: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"scheduler": {"max_num_seqs": 1}}, "max_num_seqs is 1: each lane needs a sequence"),
    ({"dense": {"tensor_parallel_size": 2}}, "2 ranks, whose sums have one order"),
    ({"attention": {"workers": 2}}, "several attention workers"),
    ({"attention": {"elastic": True}}, "several attention workers"),
    ({"dense": {"backend": "tensorrt"}}, "set dense.backend to torch"),
    ({"dense": {"max_loras": 2}}, "dense.max_loras is 2"),
    ({"scheduler": {"speculation": "ngram"}}, "scheduler.speculation is 'ngram'"),
    (
        {"scheduler": {"policy": "take_turns"}, "attention": {"host_kv_bytes": 2**24}},
        "scheduler.policy is take_turns, whose copies are of one stream: choose another one",
    ),
    ({"attention": {"host_kv_bytes": 2**24}}, "attention.host_kv_bytes is 16777216"),
]


def config_of(sections: dict[str, dict[str, Any]], num_lanes: int) -> Config:
    scheduler = {"num_lanes": num_lanes, **sections.get("scheduler", {})}
    return Config.model_validate({**sections, "scheduler": scheduler})


@pytest.mark.parametrize(("sections", "words"), REFUSED)
def test_a_setting_that_does_not_go_together_with_lanes_is_named(
    sections: dict[str, dict[str, Any]], words: str
) -> None:
    model = load_model_config(EMBEDDED_MODEL)
    check_lanes(config_of(sections, 1), model)
    with pytest.raises(ConfigError, match=r"^scheduler.num_lanes is 2, but .*") as refused:
        check_lanes(config_of(sections, 2), model)
    assert words in str(refused.value)


@pytest.mark.parametrize(("variant", "words"), [("qwen3_next", "recurrent layers"), ("t5", "has an encoder")])
def test_a_model_whose_state_belongs_to_no_step_is_named(tmp_path: Path, variant: str, words: str) -> None:
    (make_encoder_decoder if variant == "t5" else make_family_model)(tmp_path, variant)
    with pytest.raises(ConfigError, match=words):
        check_lanes(config_of({}, 2), load_model_config(tmp_path))


@pytest.mark.parametrize(
    ("num_stages", "num_lanes", "words"),
    [
        (1, 3, "two strokes of a step, of which each runs one lane at a time: set it to 2 or less"),
        (2, 3, "two strokes of a step"),
        (3, 4, "3 stages, of which each runs one lane at a time: set it to 3 or less"),
    ],
)
def test_more_lanes_than_can_run_at_a_time_are_named(num_stages: int, num_lanes: int, words: str) -> None:
    model, sections = load_model_config(EMBEDDED_MODEL), {"dense": {"pipeline_parallel_size": num_stages}}
    for fitting in range(2, num_lanes):
        check_lanes(config_of(sections, fitting), model)
    with pytest.raises(ConfigError, match=rf"^scheduler.num_lanes is {num_lanes}, but there are {words}"):
        check_lanes(config_of(sections, num_lanes), model)
