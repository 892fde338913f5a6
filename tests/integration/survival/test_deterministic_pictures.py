"""`dense.deterministic` with pictures: answers and log-probabilities are, to the last bit, those of each chat alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clients.streams import collect, collect_all
from tests.support.cluster import running_cluster
from tests.support.dense.vision_models import noise
from tests.support.served_vision import Turn, chat_message, make_served_vision_model

pytestmark = pytest.mark.timeout(300)  # processes start twice, and the machine may be slow

FIRST, *OTHERS = (noise(40 + seed, 37, seed) for seed in range(8))
NUM_TOKENS = 20
SETTINGS = (
    "dense.deterministic=true",
    "model.dtype=float32",  # in which this tower has other bits for several pictures at once
    "scheduler.max_num_batched_tokens=64",
    "scheduler.max_num_seqs=8",
    "attention.num_blocks=200",
)
CHATS: list[list[Turn]] = [
    [("user", ["All ", FIRST, *OTHERS])],
    *([("user", [each, "What?"])] for each in (FIRST, *OTHERS)),
    [("user", ["None at all"])],
]


def test_bits_do_not_depend_on_other_pictures(tmp_path: Path) -> None:
    model = make_served_vision_model(tmp_path / "model", "llava", num_attention_heads=8, num_hidden_layers=4)
    messages = [chat_message(turns, NUM_TOKENS) for turns in CHATS]
    for message in messages:
        message.logprobs = 2
    with running_cluster(tmp_path, f"model.path={model}", *SETTINGS, is_warm=True) as cluster:
        together = collect_all(cluster.gateway, messages)
        cluster.kill("dense_worker", "attn_worker")  # with all that is computed
        alone = [collect(cluster.gateway, message) for message in reversed(messages)][::-1]
        for found in (together, collect_all(cluster.gateway, messages, lambda: cluster.kill("dense_worker"))):
            for each, expected in zip(found, alone, strict=True):
                assert each.token_ids == expected.token_ids
                assert each.logprobs == expected.logprobs  # float32 as float64: equal numbers have equal bits
        cluster.wait_idle()
