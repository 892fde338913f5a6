"""A subscriber written against vLLM's format knows what each request will find in the prefix cache.

It decodes with another library than the worker encodes with, and knows no hash of ours: like the routers that it stands
for, it keeps token ids. `usage` says whether it was right.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from services.common.config import load_config
from services.common.errors import ConfigError
from tests.support.cluster import Cluster, free_port, running_cluster
from tests.support.models import TWO_LAYERS
from tests.support.warm_process import run_warm

TIMEOUT_MS = 20_000
TOPIC = "kv@pod-7@tiny-llama"
NUM_BLOCKS, BLOCK_SIZE = 24, 8
ARRANGEMENTS = {"one": (), "ranks": ("dense.tensor_parallel_size=2",)}


class Subscriber:
    """What vLLM's own example of a subscriber does, with an index of token ids behind it."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self._sub.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)  # a REQ socket would take one answer only
        self._replay.connect(replay_endpoint)
        self.prefixes: dict[int, tuple[int, ...]] = {}
        self.num_batches = 0
        self.num_cleared = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def ask_from(self, number: int) -> list[tuple[int, bytes]]:
        """All batches from this sequence number on that the worker still has."""
        self._replay.send_multipart([b"", number.to_bytes(8, "big")])
        batches = []
        while True:
            assert self._replay.poll(TIMEOUT_MS), "no answer"
            empty, number_bytes, payload = self._replay.recv_multipart()
            assert empty == b""
            if not payload:
                assert number_bytes == b"\xff" * 8
                return batches
            batches.append((int.from_bytes(number_bytes, "big"), payload))

    def catch_up(self) -> None:
        for number, payload in self.ask_from(self.num_batches):
            assert number == self.num_batches, "no gap"
            self._take(payload)

    def receive(self) -> None:
        """Follows the events until all have come that the worker has recorded by now."""
        end = self.num_batches + len(self.ask_from(self.num_batches))
        while self.num_batches < end:
            assert self._sub.poll(TIMEOUT_MS), "not sent, but kept"
            topic, number_bytes, payload = self._sub.recv_multipart()
            assert topic.decode() == TOPIC
            number = int.from_bytes(number_bytes, "big")
            if number < self.num_batches:
                continue  # replayed before
            assert number == self.num_batches, "no gap"
            self._take(payload)

    def _take(self, payload: bytes) -> None:
        self.num_batches += 1
        sent_at, events, rank = msgpack.unpackb(payload)
        assert abs(sent_at - time.time()) < 600 and rank == 0 and events
        for event in events:
            self._follow(event)

    def _follow(self, event: dict[str, Any]) -> None:
        match event.pop("type"):
            case "BlockStored":
                parent, hashes, token_ids = event["parent_block_hash"], event["block_hashes"], event["token_ids"]
                assert event.keys() >= {"lora_id", "lora_name"} and event["medium"] == "GPU"
                assert event["block_size"] == BLOCK_SIZE and len(token_ids) == BLOCK_SIZE * len(hashes)
                prefix = () if parent is None else self.prefixes[parent]
                for index, block_hash in enumerate(hashes):
                    assert 0 <= block_hash < 2**64
                    prefix += tuple(token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
                    self.prefixes[block_hash] = prefix
            case "BlockRemoved":
                assert event.keys() == {"block_hashes", "medium"}
                for block_hash in event["block_hashes"]:
                    del self.prefixes[block_hash]
            case "AllBlocksCleared":
                assert not event
                self.prefixes.clear()
                self.num_cleared += 1
            case name:
                raise AssertionError(name)

    def predict(self, prompt: list[int]) -> int:
        """How many tokens of the prompt will be found; its last one is always computed."""
        known = set(self.prefixes.values())
        num_tokens = 0
        while num_tokens + BLOCK_SIZE < len(prompt) and tuple(prompt[: num_tokens + BLOCK_SIZE]) in known:
            num_tokens += BLOCK_SIZE
        return num_tokens


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def arrangement(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return ARRANGEMENTS[request.param]


@pytest.fixture(scope="module")
def endpoints(arrangement: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    directory = tmp_path_factory.mktemp("kv")
    return f"ipc://{directory}/events", f"ipc://{directory}/replay"


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, endpoints: tuple[str, str], arrangement: tuple[str, ...]
) -> Iterator[Cluster]:
    settings = [
        TWO_LAYERS,
        *arrangement,
        f"attention.kv_events={endpoints[0]}",
        f"attention.kv_events_replay={endpoints[1]}",
        f"attention.kv_events_topic={TOPIC}",
        f"attention.num_blocks={NUM_BLOCKS}",
        f"attention.block_size={BLOCK_SIZE}",
    ]
    with running_cluster(tmp_path_factory.mktemp("kv-events"), *settings, is_warm=True) as cluster:
        yield cluster


@contextlib.contextmanager
def following(endpoints: tuple[str, str]) -> Iterator[Subscriber]:
    """A subscriber that comes late, and asks for what it has missed."""
    subscriber = Subscriber(*endpoints)
    try:
        subscriber.catch_up()
        yield subscriber
    finally:
        subscriber.close()


@pytest.fixture
def subscriber(endpoints: tuple[str, str], cluster: Cluster) -> Iterator[Subscriber]:
    with following(endpoints) as subscriber:
        yield subscriber


def num_cached(cluster: Cluster, prompt: list[int], **options: Any) -> int:
    return cluster.generate(prompt, 10, ignore_eos=True, **options).finish.usage.num_cached_tokens


def test_the_subscriber_foresees_what_every_request_finds(cluster: Cluster, subscriber: Subscriber) -> None:
    """Prompts with common beginnings, more than there is room for, so that blocks are evicted all the time."""
    prompts = [[10 + kind] * 20 + [100 + kind + tail] * (tail * 7) + [50] for kind in range(4) for tail in range(3)]
    found = []
    for prompt in [*prompts, *reversed(prompts), *prompts[::2]]:
        foreseen = subscriber.predict(prompt)
        found.append(num_cached(cluster, prompt))
        assert found[-1] == foreseen
        cluster.wait_idle()
        subscriber.receive()
    assert 0 in found and any(found) and len(subscriber.prefixes) <= NUM_BLOCKS
    assert subscriber.num_cleared == 1


def test_a_salted_request_is_not_told_of(cluster: Cluster, subscriber: Subscriber) -> None:
    before = set(subscriber.prefixes.values())
    num_cached(cluster, [77] * 40, cache_salt="secret")
    assert num_cached(cluster, [77] * 40, cache_salt="secret") == 32
    cluster.wait_idle()
    subscriber.receive()
    assert set(subscriber.prefixes.values()) <= before
    assert subscriber.predict([77] * 40) == 0 == num_cached(cluster, [77] * 40)


def test_what_was_sent_before_is_sent_again_from_any_number(cluster: Cluster, subscriber: Subscriber) -> None:
    num_cached(cluster, [33] * 30)
    cluster.wait_idle()
    subscriber.receive()
    total = subscriber.num_batches
    everything = subscriber.ask_from(0)
    assert [number for number, _ in everything] == list(range(total))
    assert subscriber.ask_from(total - 1) == everything[-1:] and subscriber.ask_from(total) == []


def test_a_request_that_is_no_number_is_not_answered_and_harms_nothing(
    cluster: Cluster, endpoints: tuple[str, str], subscriber: Subscriber
) -> None:
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(endpoints[1])
    for frames in ([b"x"], [b"", b""], [b"", b"1" * 1000], [b"", b"", b"", b""]):
        peer.send_multipart(frames)
    assert not peer.poll(300)
    context.destroy(linger=0)
    assert subscriber.ask_from(0)


def test_after_the_death_of_the_worker_everything_begins_anew(cluster: Cluster, endpoints: tuple[str, str]) -> None:
    cluster.kill("attn_worker")
    cluster.wait_idle()
    assert num_cached(cluster, [44] * 30) == 0
    cluster.wait_idle()
    with following(endpoints) as subscriber:
        assert subscriber.num_cleared == 1
        assert subscriber.predict([44] * 30) == num_cached(cluster, [44] * 30) == 24


def test_an_address_in_use_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    port = free_port()
    context = zmq.Context()
    other = context.socket(zmq.PUB)
    other.bind(f"tcp://127.0.0.1:{port}")
    setting = f"attention.kv_events=tcp://*:{port}"
    command = ["services.attn_worker", "--set", setting, "--set", f"attention.address=unix:{tmp_path}/attention.sock"]
    ended = run_warm(*command)
    context.destroy(linger=0)
    assert ended.returncode == 1, ended.stderr
    assert re.search(rf"attention\.kv_events 'tcp://\*:{port}' cannot be used: Address already in use", ended.stderr)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["attention.kv_events=127.0.0.1:5557"], r"attention\.kv_events = '127\.0\.0\.1:5557': .*tcp://"),
        (
            ["attention.kv_events_replay=tcp://*:5558"],
            r"attention\.kv_events_replay 'tcp://\*:5558' needs attention\.kv_events",
        ),
        (
            ["attention.kv_events=tcp://*:5557", "attention.enable_prefix_cache=false"],
            r"blocks are found only with attention\.enable_prefix_cache",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, settings)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)  # cannot be imported
    monkeypatch.delitem(sys.modules, "services.attn_worker.kv_events.publisher", raising=False)
    expected = "attention.kv_events needs zmq, which is not installed: pip install 'twostroke[kv-events]'"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        importlib.import_module("services.attn_worker.kv_events.publisher")
