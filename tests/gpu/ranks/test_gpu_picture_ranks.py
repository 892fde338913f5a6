"""Pictures on two GPUs: the first rank has the tower, and all get its rows. The tokens of Hugging Face, over a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_streams import small_cluster
from tests.support.clients.streams import collect_all
from tests.support.dense.vision_models import noise
from tests.support.rank_processes import pid_of
from tests.support.served_vision import (
    Turn,
    chat_message,
    expected_tokens,
    make_served_vision_model,
    pictures_of,
    rendered,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own"),
]

NUM_TOKENS = 40
FIRST, SECOND, THIRD = noise(50, 37, 1), noise(20, 60, 2), noise(64, 64, 3)
CHATS: list[list[Turn]] = [
    [("user", [FIRST, "What?"])],
    [("user", ["Both ", SECOND, THIRD])],
    [("user", ["None at all"])],
    [("user", [FIRST, FIRST, "again"])],
]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4, "head_dim": 16}
TEXTS = {
    "qwen2_5_vl": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    "gemma3": HEADS | {"layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 16},
    "qwen3_vl": HEADS
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        }
    },
}


@pytest.mark.parametrize(
    ("variant", "ranks"),
    [
        ("qwen2_5_vl", "tensor_parallel_size"),
        ("qwen3_vl", "tensor_parallel_size"),  # with vectors that are added after the first layers
        ("qwen2_5_vl", "pipeline_parallel_size"),
        ("gemma3", "tensor_parallel_size"),  # with pictures whose tokens see each other
    ],
)
def test_chats_give_the_tokens_of_transformers_over_a_kill(variant: str, ranks: str, tmp_path: Path) -> None:
    model = make_served_vision_model(tmp_path / "model", variant, **TEXTS[variant])
    expected = [expected_tokens(model, rendered(each), pictures_of(each), NUM_TOKENS, variant) for each in CHATS]
    assert expected[0] != expected[1], "answers depend on the pictures"
    with small_cluster(model, tmp_path, f"dense.{ranks}=2") as cluster:
        killed = pid_of(cluster, "dense_worker-1")
        for disturb in (lambda: None, lambda: os.kill(killed, signal.SIGKILL)):
            found = collect_all(cluster.gateway, [chat_message(each, NUM_TOKENS) for each in CHATS], disturb)
            assert [each.token_ids[0] for each in found] == expected
        assert pid_of(cluster, "dense_worker-1") != killed
        cluster.wait_idle()
