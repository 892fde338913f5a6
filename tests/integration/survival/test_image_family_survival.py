"""Families of models that see pictures, end to end: a kill in the middle of a prompt, beside hostile pictures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.support.clients.streams import collect_all
from tests.support.cluster import REQUEST_TIMEOUT_S, running_cluster
from tests.support.dense.vision_models import noise
from tests.support.served_vision import (
    Turn,
    chat_message,
    expected_tokens,
    make_served_vision_model,
    pictures_of,
    png,
    rendered,
)

pytestmark = pytest.mark.timeout(300)  # processes start twice, and the machine may be slow

FIRST, SECOND, THIRD = noise(50, 37, 1), noise(20, 60, 2), noise(64, 64, 3)
NUM_LONG_TOKENS = 100  # so many that the kill comes in the middle
SETTINGS = {
    "scheduler.max_num_batched_tokens": 64,  # less than one of the prompts
    "dense.max_encoder_rows": 100,  # about a picture
    "attention.num_blocks": 200,
}
TEXT = {"num_attention_heads": 8, "num_hidden_layers": 3}  # with which answers depend on the pictures


@pytest.mark.parametrize("variant", ["internvl", "llava_onevision", "qwen3_vl_moe"])
def test_a_prompt_with_pictures_survives_a_kill_of_both_workers(variant: str, tmp_path: Path) -> None:
    model = make_served_vision_model(tmp_path / "model", variant, **TEXT)
    running: list[Turn] = [("user", [THIRD, "What?"])]
    in_prompt: list[Turn] = [("user", ["All ", FIRST, SECOND, THIRD])]
    others: list[Turn] = [("user", ["All ", SECOND, FIRST, THIRD])]

    def expected(turns: list[Turn], max_tokens: int) -> list[int]:
        return expected_tokens(model, rendered(turns), pictures_of(turns), max_tokens, variant)

    assert expected(in_prompt, 12) != expected(others, 12)
    settings = (f"{key}={value}" for key, value in (SETTINGS | {"model.path": model}).items())
    with running_cluster(tmp_path, *settings, is_warm=True) as cluster, ThreadPoolExecutor(1) as threads:
        found = []

        def disturb() -> None:
            for hostile in (b"", png(FIRST)[:100], b"<svg/>"):
                message = chat_message(running, 1)
                message.chat.messages[0].pictures[0].data = hostile
                with pytest.raises(grpc.RpcError, match="picture"):
                    cluster.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
            message = chat_message(in_prompt, NUM_LONG_TOKENS)
            found.append(threads.submit(cluster.gateway.Generate, message, timeout=REQUEST_TIMEOUT_S))
            cluster.kill("dense_worker", "attn_worker")

        [stream] = collect_all(cluster.gateway, [chat_message(running, NUM_LONG_TOKENS)], disturb)
        assert stream.token_ids[0] == expected(running, NUM_LONG_TOKENS)
        assert list(found[0].result().completions[0].token_ids) == expected(in_prompt, NUM_LONG_TOKENS)
        cluster.wait_idle()
