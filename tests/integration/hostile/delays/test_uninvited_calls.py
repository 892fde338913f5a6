"""gRPC callers without an API key or with half a message: they must not cost memory or slow another stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from services.common.config import GatewaySection
from services.pb import gateway_pb2
from tests.support.clients.stalling_proxy import stalling_proxy
from tests.support.clients.steady_stream import LATE_S
from tests.support.clients.wire_format import repeated
from tests.support.cluster import Cluster, running_cluster
from tests.support.undisturbed import MAX_GROWTH_BYTES, assert_undisturbed

KEY = "sk-aaaaaaaaaaaaaaaaaaaa"
Metadata = tuple[tuple[str, str], ...]
METADATA: Metadata = (("authorization", f"Bearer {KEY}"),)
GENERATE = "/twostroke.v1.Gateway/Generate"
HEALTH = "/grpc.health.v1.Health/Check"
MESSAGE_BYTES = GatewaySection().max_message_bytes
LIMIT_S = 2.5  # for receiving a message
HALF_BYTES = MESSAGE_BYTES - 100_000
NUM_HALVES = 60
MAX_RECEIVING = 64  # the default
MAX_ROUNDS = 5  # until all half messages are there before the first one's time is over
BAD_WORDS = repeated(gateway_pb2.GenerateRequest, "bad_words", b"", 16 * 2**20)


@contextlib.contextmanager
def cluster_with_key(directory: Path, wrapper: Sequence[str], *settings: str) -> Iterator[Cluster]:
    keys = directory / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "team"\nkey = "{KEY}"\n')
    settings = (f"gateway.api_keys_file={keys}", *settings)
    with running_cluster(directory, *settings, wrapper=wrapper, is_warm=True) as cluster:
        yield cluster
        cluster.wait_idle()


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory, on_one_core: tuple[str, ...]) -> Iterator[Cluster]:
    """A cluster that receives whole messages, however slow this machine is."""
    with cluster_with_key(tmp_path_factory.mktemp("patient"), on_one_core) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, on_one_core: tuple[str, ...]) -> Iterator[Cluster]:
    """A cluster that soon gives up half a message."""
    limit = f"gateway.body_timeout_s={LIMIT_S}"
    with cluster_with_key(tmp_path_factory.mktemp("uninvited"), on_one_core, limit) as cluster:
        yield cluster


@contextlib.contextmanager
def bare_channel(address: str) -> Iterator[grpc.Channel]:
    """A channel with a connection of its own, which sends messages of any size."""
    with grpc.insecure_channel(
        address, [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        yield channel


def status_of(
    channel: grpc.Channel, method: str, message: bytes, metadata: tuple[tuple[str, str], ...] = ()
) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(method)(message, metadata=metadata, timeout=LATE_S)
    return refused.value.code()


def check_thirty_calls(cluster: Cluster, message: bytes, metadata: Metadata, code: grpc.StatusCode) -> None:
    """Checks that thirty such calls at once are all refused with `code` and do not disturb other clients."""

    def attack() -> None:
        with bare_channel(cluster.address) as channel, ThreadPoolExecutor(30) as threads:
            codes = threads.map(lambda _: status_of(channel, GENERATE, message, metadata), range(30))
            assert set(codes) == {code}

    assert_undisturbed(cluster, attack, headers=dict(METADATA))


@pytest.mark.parametrize("num_bytes", [MESSAGE_BYTES - 1, 16 * 2**20])
def test_without_a_key_no_message_is_read(patient: Cluster, num_bytes: int) -> None:
    check_thirty_calls(patient, BAD_WORDS[:num_bytes], (), grpc.StatusCode.UNAUTHENTICATED)


def test_messages_above_the_limit_are_not_kept(patient: Cluster) -> None:
    check_thirty_calls(patient, BAD_WORDS, METADATA, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_refused_messages_are_forgotten(patient: Cluster) -> None:
    check_thirty_calls(patient, BAD_WORDS[: MESSAGE_BYTES - 1], METADATA, grpc.StatusCode.INVALID_ARGUMENT)


@pytest.mark.parametrize(
    ("method", "metadata", "code"),
    [
        (GENERATE, (), grpc.StatusCode.UNAUTHENTICATED),
        (GENERATE, METADATA, grpc.StatusCode.DEADLINE_EXCEEDED),
        (HEALTH, (), grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
    ids=["no key", "key", "health"],
)
def test_half_a_message_on_each_of_many_connections(
    cluster: Cluster, tmp_path: Path, method: str, metadata: Metadata, code: grpc.StatusCode
) -> None:
    message = BAD_WORDS[: MESSAGE_BYTES - 1]
    paths = (tmp_path / f"{i}.sock" for i in range(9))

    def attack() -> None:
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            proxy = stack.enter_context(stalling_proxy(next(paths), cluster.address, HALF_BYTES))
            channels = [stack.enter_context(bare_channel(proxy)) for _ in range(NUM_HALVES)]
            with ThreadPoolExecutor(NUM_HALVES) as threads:
                codes = threads.map(lambda channel: status_of(channel, method, message, metadata), channels)
                assert set(codes) == {code}
        assert time.monotonic() - start < LATE_S

    # The allocator keeps the memory of the parts that have arrived, for later messages.
    max_growth_bytes = 2 * NUM_HALVES * HALF_BYTES if method == HEALTH or metadata else MAX_GROWTH_BYTES
    assert_undisturbed(cluster, attack, headers=dict(METADATA), max_growth_bytes=max_growth_bytes)


def test_the_oldest_of_too_many_half_messages_are_given_up_first(cluster: Cluster, tmp_path: Path) -> None:
    message, counts = BAD_WORDS[: MESSAGE_BYTES - 1], []
    for path in (tmp_path / f"proxy{i}.sock" for i in range(MAX_ROUNDS)):
        with stalling_proxy(path, cluster.address, HALF_BYTES) as proxy, contextlib.ExitStack() as stack:
            channels = [stack.enter_context(bare_channel(proxy)) for _ in range(MAX_RECEIVING + 10)]
            with ThreadPoolExecutor(len(channels)) as threads:
                codes = list(threads.map(lambda channel: status_of(channel, GENERATE, message, METADATA), channels))
        num_given_up = codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == len(codes) - num_given_up
        counts.append(num_given_up)
        # The launcher's health check is also a message: if it comes meanwhile, one more half message is given up.
        if 10 <= num_given_up <= 12:
            return
    raise AssertionError(f"of {MAX_RECEIVING + 10} half messages so many were given up, in each round: {counts}")
