"""Engine, scheduler, planner, runner, servicer and KV cache speak of rows, and features have their rooms."""

from __future__ import annotations

import re

from tests.support.imports import MODULES, imports_of

FEATURES = "services.dense_worker.features"
DRAFTING = f"{FEATURES}.drafting.drafting"  # the policy of draft tokens, which plans have
CACHE = "services.attn_worker.cache"
ROOMS = [f"{CACHE}.{each}" for each in ("source_group", "state_group", "build_cache", "spec", "make_spec")]
CORE = sorted(
    name
    for name in MODULES
    if re.match(r"services\.(dense_worker\.(engine|runner)\.|dense_worker\.servicer$)", name)
    or (re.match(r"services\.attn_worker\.(cache|runner|engine)", name) and name not in ROOMS)
)
WORDS = (  # of features
    *("beam", "hypothes", "sibling", "joining", "parallel"),
    *("adapter", "lora", "grammar", "structured", "prompt_embeds"),
    *("prompt_logprobs", "token_report", "hidden_state", "generation_logits"),
    *("encoder", "picture", "image", "pooling", "recurren", "gated", "relative_bias", "expert"),
    *("guess", "drafter", "predictor", "speculat", "ngram", "suffix_", "medusa", "eagle", "draft_model", "draft model"),
)


def test_the_core_is_found() -> None:
    some = ("engine.engine", "engine.step_planner", "runner.model_runner", "servicer")
    assert {f"services.dense_worker.{each}" for each in some} < set(CORE)


def test_the_core_names_no_feature() -> None:
    found = [
        f"{name}: {line}"
        for name in CORE
        for line in MODULES[name].read_text().splitlines()
        if any(word in line.lower() for word in WORDS)
    ]
    assert not found


def test_the_core_imports_no_room() -> None:
    """Only what all rooms have in common, which lies beside them, and the list of them."""
    wrong = [
        f"{name} imports {each}"
        for name in CORE
        for each in imports_of(name) - {DRAFTING}
        if re.match(rf"{re.escape(FEATURES)}\.\w+\.", each)
    ]
    assert not wrong
