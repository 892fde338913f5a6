"""Pictures on a GPU: the tower, positions on three axes and steps with vectors, against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_cluster import gpu_cluster
from tests.gpu.usable_tensorrt import usable_tensorrt
from tests.support.clients.streams import collect_all
from tests.support.dense.vision_models import noise
from tests.support.served_vision import (
    Turn,
    chat_message,
    expected_tokens,
    make_served_vision_model,
    pictures_of,
    rendered,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

NUM_TOKENS = 40
HEADS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}


@pytest.mark.parametrize("backend", ["torch", "tensorrt"])
def test_chats_with_pictures_give_the_tokens_of_transformers_over_a_kill(tmp_path: Path, backend: str) -> None:
    settings = [f"dense.backend={backend}"]
    if backend == "tensorrt":
        usable_tensorrt()
        settings += [f"dense.plan_dir={tmp_path / 'plans'}", "dense.profiles=1-512"]
        settings += ["scheduler.max_num_batched_tokens=512"]
    model = make_served_vision_model(tmp_path / "model", **HEADS)
    first, second, third = noise(50, 37, 1), noise(20, 60, 2), noise(64, 64, 3)
    chats: list[list[Turn]] = [
        [("user", [first, "What?"])],
        [("user", ["Both ", second, third])],
        [("user", ["None at all"])],
        [("user", [first, first, "again"])],
    ]
    with gpu_cluster(tmp_path, f"model.path={model}", "model.dtype=float32", *settings) as cluster:
        for kill in (lambda: None, lambda: cluster.kill("dense_worker")):
            messages = [chat_message(turns, NUM_TOKENS) for turns in chats]
            found = collect_all(cluster.gateway, messages, kill)
            for turns, each in zip(chats, found, strict=True):
                assert each.token_ids[0] == expected_tokens(model, rendered(turns), pictures_of(turns), NUM_TOKENS)
        cluster.wait_idle()


def test_pictures_of_gemma_3_whose_tokens_see_each_other(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    text |= {"head_dim": 16, "query_pre_attn_scalar": 16}
    model = make_served_vision_model(tmp_path / "model", "gemma3", **text)
    first, second = noise(50, 37, 1), noise(20, 60, 2)
    chats: list[list[Turn]] = [
        [("user", [first, "What?"])],
        [("user", ["Both ", second, " and ", first, " " + "and so on " * 30])],
        [("user", ["None at all"])],
        [("user", [first])],
    ]
    with gpu_cluster(tmp_path, f"model.path={model}", "model.dtype=float32") as cluster:
        for kill in (lambda: None, lambda: cluster.kill("dense_worker")):
            messages = [chat_message(turns, NUM_TOKENS) for turns in chats]
            found = collect_all(cluster.gateway, messages, kill)
            for turns, each in zip(chats, found, strict=True):
                truth = expected_tokens(model, rendered(turns), pictures_of(turns), NUM_TOKENS, "gemma3")
                assert each.token_ids[0] == truth
        cluster.wait_idle()


@pytest.mark.parametrize("variant", ["internvl", "llava_onevision", "qwen3_vl_moe"])
def test_other_families(variant: str, tmp_path: Path) -> None:
    text: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 16}
    if variant == "qwen3_vl_moe":
        axes = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **axes}
    model = make_served_vision_model(tmp_path / "model", variant, **text)
    first, second = noise(50, 37, 1), noise(20, 60, 2)
    chats: list[list[Turn]] = [[("user", [first, "What?"])], [("user", ["Both ", second, first])], [("user", ["None"])]]
    with gpu_cluster(tmp_path, f"model.path={model}", "model.dtype=float32") as cluster:
        found = collect_all(cluster.gateway, [chat_message(turns, NUM_TOKENS) for turns in chats])
        for turns, each in zip(chats, found, strict=True):
            truth = expected_tokens(model, rendered(turns), pictures_of(turns), NUM_TOKENS, variant)
            assert each.token_ids[0] == truth
