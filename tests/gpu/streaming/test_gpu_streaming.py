"""StreamingLLM on a GPU: texts far beyond the trained length, in few blocks, over the death of each worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.gpu.gpu_cluster import gpu_cluster
from tests.support.attention.streaming import streaming_tokens
from tests.support.clients.streams import collect_all
from tests.support.cluster import request
from tests.support.reference import make_served_model, random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TRAINED, SINKS, WINDOW, BLOCK_SIZE, MAX_TOKENS = 96, 4, 40, 16, 250
NUM_BLOCKS = 60  # for three sequences of up to 400 tokens 75 would be needed otherwise


def test_long_streams_equal_the_paper_over_the_death_of_each_worker(tmp_path: Path) -> None:
    """In float32 the tokens do not depend on the size of a step. Prompts are computed in chunks."""
    shape = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": TRAINED}
    path = make_served_model(tmp_path / "model", "llama", **shape)
    settings = {
        "model.path": path,
        "model.dtype": "float32",
        "model.max_model_len": 1000,
        "scheduler.max_num_batched_tokens": 48,
        "scheduler.max_num_seqs": 8,
        "attention.block_size": BLOCK_SIZE,
        "attention.num_blocks": NUM_BLOCKS,
        "attention.sink_tokens": SINKS,
        "attention.window": WINDOW,
    }
    prompts = random_prompts(3, longest=150, seed=2)
    messages = [request(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
    expected = [streaming_tokens(path, prompt, MAX_TOKENS, SINKS, WINDOW) for prompt in prompts]
    with gpu_cluster(tmp_path, *(f"{key}={value}" for key, value in settings.items())) as cluster:
        for role in (None, "dense_worker", "attn_worker"):

            def kill(role: str | None = role) -> None:
                if role is not None:
                    os.kill(cluster.pid_of(role), signal.SIGKILL)

            found = collect_all(cluster.gateway, messages, kill)
            assert [each.token_ids[0] for each in found] == expected
        cluster.wait_idle()
