"""Ranks with host tiers: each attention worker finds its own part of what was computed, also after its death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.integration.survival.test_host_tier import MAX_ROUNDS, Tiered, prompt_of, tiered
from tests.support.clients.streams import Collected, collect_all, messages_of_every_kind
from tests.support.cluster import Cluster
from tests.support.rank_processes import STANDBYS, ready_pids
from tests.support.reference import reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

PROMPT = "Count from 1 to 500, slowly, and tell of every number what you like about it. " * 3
MAX_TOKENS = 40
PROMPT_TOKENS, CACHED_TOKENS = 600, 592  # whole blocks of all tokens but the last
ARRANGEMENTS = {"tensor": "dense.tensor_parallel_size=2", "pipeline": "dense.pipeline_parallel_size=2"}


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    yield from tiered(tmp_path_factory.mktemp("ranks"), ARRANGEMENTS[request.param], *STANDBYS)


@pytest.fixture(scope="module")
def messages() -> list[gateway_pb2.GenerateRequest]:
    return messages_of_every_kind(PROMPT, MAX_TOKENS, stop="no such text")


@pytest.fixture(scope="module")
def of_one_rank(cluster: Cluster, messages: list[gateway_pb2.GenerateRequest]) -> list[Collected]:
    return collect_all(cluster.gateway, messages)


def replaced(cluster: Cluster, name: str) -> None:
    """Kills a process, and returns when another one serves in its place."""
    before = ready_pids(cluster)
    os.kill(before[name], signal.SIGKILL)
    ready_pids(cluster, [before[name]])


@pytest.mark.parametrize("name", ["attn_worker", "attn_worker-1"])
def test_a_killed_attention_worker_finds_its_part(ranks: Tiered, name: str) -> None:
    for number in range(MAX_ROUNDS):
        prompt = prompt_of(100 * len(name) + number, PROMPT_TOKENS)
        expected = reference_tokens(EMBEDDED_MODEL, prompt, 8)
        assert ranks.ask(prompt)[0] == expected
        ranks.settle()  # the first rank's copies: the others' may take longer
        replaced(ranks.cluster, name)
        answer, num_computed, num_cached = ranks.ask(prompt)
        assert answer == expected
        if num_cached == CACHED_TOKENS:
            break
    assert (num_computed, num_cached) == (PROMPT_TOKENS + 7 - CACHED_TOKENS, CACHED_TOKENS)


@pytest.mark.parametrize("name", ["attn_worker", "attn_worker-1"])  # dense workers have no tiers: test_rank_standbys
def test_streams_end_as_without_the_kill(
    ranks: Tiered, messages: list[gateway_pb2.GenerateRequest], of_one_rank: list[Collected], name: str
) -> None:
    pids = ready_pids(ranks.cluster)
    disturbed = collect_all(ranks.cluster.gateway, messages, lambda: os.kill(pids[name], signal.SIGKILL))
    for collected, expected in zip(disturbed, of_one_rank, strict=True):
        collected.assert_equals(expected)
    assert ready_pids(ranks.cluster, [pids[name]])[name] == pids[f"standby of {name}"]
    ranks.cluster.wait_idle()
