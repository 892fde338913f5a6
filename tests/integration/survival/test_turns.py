"""Sequences that take turns in a KV cache which is too small for all, with their blocks in host memory meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.common.config import EMBEDDED_MODEL
from tests.integration.survival.test_host_tier import PROMPT, Tiered, prompt_of, tiered
from tests.support.clients.streams import collect, collect_all, messages_of_every_kind
from tests.support.cluster import request
from tests.support.reference import reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow

NUM_STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 150, 160  # of 20 blocks each: four fit into 80 blocks


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    yield from tiered(tmp_path_factory.mktemp("turns"), "scheduler.policy=take_turns")


def test_twice_as_many_streams_as_fit_get_their_tokens_and_find_their_blocks_again(server: Tiered) -> None:
    prompts = [prompt_of(number, PROMPT_TOKENS) for number in range(20, 20 + NUM_STREAMS)]
    num_loaded = server.metric("loaded_tokens_total")

    def ask(prompt: list[int]) -> list[int]:
        return server.cluster.generate(prompt, OUTPUT_TOKENS, ignore_eos=True).token_ids

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [reference_tokens(EMBEDDED_MODEL, each, OUTPUT_TOKENS, ignore_eos=True) for each in prompts]
    server.cluster.wait_idle()
    assert server.metric("loaded_tokens_total") > num_loaded


def test_streams_of_every_kind_survive_kills_while_they_take_turns(server: Tiered) -> None:
    cluster, max_tokens = server.cluster, 120
    text = collect(cluster.gateway, request(PROMPT, max_tokens, ignore_eos=True)).text[0]
    messages = messages_of_every_kind(PROMPT, max_tokens, stop=text[-12:])
    undisturbed = collect_all(cluster.gateway, messages)
    for roles in (("attn_worker",), ("dense_worker",), ("attn_worker", "dense_worker")):
        disturbed = collect_all(cluster.gateway, messages, lambda roles=roles: cluster.kill(*roles))
        for collected, expected in zip(disturbed, undisturbed, strict=True):
            collected.assert_equals(expected)
        cluster.wait_idle()
    assert server.metric("host_kv_corrupt_blocks_total") == 0
