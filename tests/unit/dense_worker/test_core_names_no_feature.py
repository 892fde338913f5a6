"""Engine, scheduler, planner, runner, servicer and KV cache speak of rows, and features have their rooms."""

from __future__ import annotations

import re

import pytest

from tests.support.imports import MODULES, imports_of

FEATURES = "services.dense_worker.features"
DRAFTING = f"{FEATURES}.drafting.drafting"  # the policy of draft tokens, which plans have
CORE = sorted(
    name
    for name in MODULES
    if re.match(r"services\.(dense_worker\.(engine|runner)\.|dense_worker\.servicer$|attn_worker\.cache\.)", name)
)
WORDS = (  # of features
    *("beam", "hypothes", "sibling", "joining", "parallel"),
    *("adapter", "lora", "grammar", "structured", "prompt_embeds", "prompt_embeds"),
    *("prompt_logprobs", "token_report", "hidden_state", "generation_logits"),
    *("guess", "drafter", "predictor", "speculat", "ngram", "suffix_", "medusa", "eagle", "draft_model", "draft model"),
)


def test_the_core_is_found() -> None:
    some = ("engine.engine", "engine.planning.step_planner", "runner.model_runner", "servicer")
    assert {f"services.dense_worker.{each}" for each in some} < set(CORE)


@pytest.mark.parametrize("name", CORE)
def test_the_core_names_no_feature(name: str) -> None:
    lines = MODULES[name].read_text().splitlines()
    found = [line for line in lines if any(word in line.lower() for word in WORDS)]
    assert not found


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_no_room(name: str) -> None:
    """Only what all rooms have in common, which lies beside them, and the list of them."""
    rooms = [each for each in imports_of(name) if re.match(rf"{re.escape(FEATURES)}\.\w+\.", each)]
    assert set(rooms) <= {DRAFTING}
