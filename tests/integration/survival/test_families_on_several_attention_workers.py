"""Families whose layers differ in what crosses the seam: two attention workers give the tokens of Hugging Face.

So do two ranks of a family that splits its heads and not its cache.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.streams import collect_all
from tests.support.cluster import request, running_cluster
from tests.support.dense.family_models import make_family_model
from tests.support.rank_processes import pid_of
from tests.support.reference import TOKENIZER_FILES, VOCAB_SIZE, random_prompts, reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow
MAX_TOKENS = 60
VARIED = ["gemma4-shared", "deepseek_v3", "qwen3_next", "gpt_oss"]  # widths by layer, latent keys, states, sinks


@pytest.mark.parametrize("variant", VARIED)
def test_tokens_are_those_of_hugging_face_over_the_death_of_a_worker(variant: str, tmp_path: Path) -> None:
    check(variant, tmp_path, "attention.workers=2", "attn_worker-1")


@pytest.mark.parametrize("killed", ["dense_worker-1", "attn_worker-1"])
def test_latent_attention_on_two_ranks(killed: str, tmp_path: Path) -> None:
    check("deepseek_v3", tmp_path, "dense.tensor_parallel_size=2", killed)


def check(variant: str, tmp_path: Path, arrangement: str, killed: str) -> None:
    """The tokens of several prompts at once, undisturbed and over the death of a process."""
    path = make_family_model(tmp_path / "model", variant, vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_MODEL / name, path)
    prompts = random_prompts(5, longest=60, seed=2)
    messages = [request(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
    expected = [reference_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    limits = ("scheduler.max_num_batched_tokens=24", "scheduler.max_num_seqs=8", "attention.block_size=8")
    settings = (arrangement, f"model.path={path}", *limits)
    with running_cluster(tmp_path, *settings, is_warm=True) as cluster:
        assert [each.token_ids[0] for each in collect_all(cluster.gateway, messages)] == expected
        pid = pid_of(cluster, killed)
        found = collect_all(cluster.gateway, messages, lambda: os.kill(pid, signal.SIGKILL))
        assert [each.token_ids[0] for each in found] == expected
        cluster.wait_idle()
