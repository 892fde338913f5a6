"""Steps that are aborted while both workers live: no worker is restarted, and the KV cache is kept."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from services.common.config import ModelSection
from services.common.resolve import resolve_model
from services.pb import attn_pb2, dense_pb2
from tests.support.clients.streams import Collected, collect_all
from tests.support.cluster import request
from tests.support.plain_services import PlainServices, plain_services

pytestmark = pytest.mark.timeout(400)  # processes start, and the machine may be slow

WAIT_TIMEOUT_S = 2.0  # a busy machine may stop a worker for a while, which must not abort a step
STOPPED_S = 2.5 * WAIT_TIMEOUT_S
DEADLINE_S = 60.0
MAX_ROUNDS = 5  # until the disturbance comes in the middle of a step
NUM_PROMPT_TOKENS, MAX_TOKENS = 400, 100
MAX_RECOMPUTED_TOKENS_OF_A_SEQUENCE = 8  # an aborted step is computed again
MESSAGES = [
    request(range(5 + seed, 5 + seed + NUM_PROMPT_TOKENS), MAX_TOKENS, temperature=0.9, seed=seed, ignore_eos=True)
    for seed in range(4)
]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServices]:
    """The prefix cache is off, so that only a kept sequence saves its prompt from being computed again."""
    settings = ("attention.enable_prefix_cache=false", f"channel.wait_timeout_s={WAIT_TIMEOUT_S}")
    with plain_services(tmp_path_factory.mktemp("plain"), *settings) as services:
        yield services


@pytest.fixture(scope="module")
def undisturbed(services: PlainServices) -> list[Collected]:
    return collect_all(services.gateway, MESSAGES)


def stop_for_a_while(role: str) -> Callable[[PlainServices], None]:
    def stop(services: PlainServices) -> None:
        pid = services.pid_of(role)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)

    return stop


def attach_another(services: PlainServices) -> None:
    """Attaches in place of the dense worker, then asks the dense worker to take over again."""
    model = resolve_model(ModelSection(), "cpu")
    services.attention.Attach(
        attn_pb2.AttachRequest(
            dtype="float32",
            kv_cache_dtype="model",
            model_fingerprint=model.config.fingerprint,
            weights_hash=services.dense_status().weights_hash,
            max_num_seqs=1,
            max_num_batched_tokens=1,
        ),
        timeout=DEADLINE_S,
    )
    deadline = time.monotonic() + DEADLINE_S
    while services.dense_status().state != dense_pb2.DenseStatus.STANDBY:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    services.dense.TakeOver(dense_pb2.TakeOverRequest(), timeout=DEADLINE_S)


@pytest.mark.parametrize(
    "disturb",
    [stop_for_a_while("dense_worker"), stop_for_a_while("attn_worker"), attach_another],
    ids=["dense stopped", "attention stopped", "another attaches"],
)
def test_aborted_steps_end_no_worker_and_keep_the_cache(
    services: PlainServices, undisturbed: list[Collected], disturb: Callable[[PlainServices], None]
) -> None:
    for _ in range(MAX_ROUNDS):
        before, aborts = services.wait_idle(), services.log("attn_worker").count("event=detached")
        collected = collect_all(services.gateway, MESSAGES, lambda: disturb(services))
        for each, expected in zip(collected, undisturbed, strict=True):
            each.assert_equals(expected)
        assert services.ends == []
        after = services.wait_idle()
        assert after.epoch == before.epoch
        # A busy machine may stop a worker, too: then the step of a prompt may be aborted, and is computed again.
        if services.log("attn_worker").count("event=detached") == aborts + 1:
            needed = len(MESSAGES) * (NUM_PROMPT_TOKENS + MAX_TOKENS + MAX_RECOMPUTED_TOKENS_OF_A_SEQUENCE)
            assert after.num_computed_tokens - before.num_computed_tokens <= needed, "a prompt was prefilled again"
            return
    raise AssertionError(f"in none of {MAX_ROUNDS} rounds was just one step aborted")
