"""A host tier below the KV cache: what an attention worker had computed outlives it, and its evictions."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from services.attn_worker.cache.tiers.region import TierRegion
from services.common.config import EMBEDDED_MODEL
from tests.chaos.drafts import make_noisy_model
from tests.support.clients.streams import Collected, collect, collect_all, messages_of_every_kind
from tests.support.cluster import Cluster, free_port, request, running_cluster
from tests.support.plain_services import plain_services
from tests.support.reference import VOCAB_SIZE, make_served_model, reference_tokens
from tests.support.scrape import Scrape
from tests.support.warm_process import run_warm

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow

BLOCK_SIZE, NUM_BLOCKS = 16, 80
NUM_STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 5, 150, 100  # which fill all blocks
MAX_ROUNDS = 5  # on a busy machine a stream may end before the kill
MAX_MODEL_LEN = 800
HOST_KV_BYTES = 64 * 2**20
DISK_KV_BYTES = 8 * 2**20
NAMESPACES = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])
BLOCK_BYTES = 65536  # of the embedded model: 16 tokens, 4 layers, keys and values of 2 heads, 64 numbers of 4 bytes
PROMPT = "Count from 1 to 500, slowly, and tell of every number what you like about it. " * 3
MAX_TOKENS = 60
TIMEOUT_S = 60.0


class Tiered:
    """A cluster with a host tier, and the counts of its attention worker."""

    def __init__(self, cluster: Cluster, metrics_address: str) -> None:
        self.cluster = cluster
        self._metrics_address = metrics_address

    def metric(self, name: str) -> float:
        return Scrape(self._metrics_address).value(f"twostroke_attention_{name}")

    def settle(self) -> None:
        """Waits until all full blocks have been copied."""
        deadline, last, since = time.monotonic() + TIMEOUT_S, -1.0, time.monotonic()
        while time.monotonic() - since < 0.6:
            assert time.monotonic() < deadline
            if (num_written := self.metric("host_kv_written_blocks_total")) != last:
                last, since = num_written, time.monotonic()
            time.sleep(0.03)

    def ask(self, prompt: Sequence[int], max_tokens: int = 8, **options: object) -> tuple[list[int], int, int]:
        """A greedy answer; and how many tokens were computed for it, and how many were found."""
        before = self.cluster.wait_idle()
        answer = self.cluster.generate(prompt, max_tokens, ignore_eos=True, **options)
        after = self.cluster.wait_idle()
        counts = (after.num_computed_tokens, before.num_computed_tokens, after.num_cached_tokens)
        return answer.token_ids, counts[0] - counts[1], counts[2] - before.num_cached_tokens


def tiered(directory: Path, *overrides: str, wrapper: Sequence[str] = ()) -> Iterator[Tiered]:
    metrics_address = f"127.0.0.1:{free_port()}"
    settings = (
        f"attention.host_kv_bytes={HOST_KV_BYTES}",
        f"attention.block_size={BLOCK_SIZE}",
        f"attention.num_blocks={NUM_BLOCKS}",
        f"attention.metrics_address={metrics_address}",
        f"model.max_model_len={MAX_MODEL_LEN}",
    )
    directory.mkdir(exist_ok=True)
    with running_cluster(directory, *settings, *overrides, is_warm=True, wrapper=wrapper) as cluster:
        yield Tiered(cluster, metrics_address)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    yield from tiered(tmp_path_factory.mktemp("cluster"))


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """Random tokens: the beginning of a longer one with the same number."""
    random = Random(number)
    return [random.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


def test_streams_go_on_after_the_attention_worker_was_killed_and_little_is_computed_again(server: Tiered) -> None:
    cluster = server.cluster
    # Each with a prompt of its own, so that nothing but the tier saves its tokens from being computed again.
    messages = [request(prompt_of(n, PROMPT_TOKENS), OUTPUT_TOKENS, ignore_eos=True) for n in range(NUM_STREAMS)]
    undisturbed = collect_all(cluster.gateway, messages)
    num_found = NUM_STREAMS * (PROMPT_TOKENS // BLOCK_SIZE) * BLOCK_SIZE
    num_rounds = 0

    def kill() -> None:
        time.sleep(0.2)
        cluster.kill("attn_worker")

    while True:
        for message in messages:
            message.cache_salt = str(num_rounds)  # so that they start anew
        disturbed = collect_all(cluster.gateway, messages, kill)
        for collected, expected in zip(disturbed, undisturbed, strict=True):
            collected.assert_equals(expected)
        status = cluster.wait_idle()  # its counts begin with the kill
        if status.num_cached_tokens >= num_found:
            break
        num_rounds += 1
        assert num_rounds < MAX_ROUNDS, f"only {status.num_cached_tokens} tokens were found, or some streams had ended"
    # All other tokens had not been computed before, but for those of a last block and of blocks not copied yet.
    num_tokens = NUM_STREAMS * (PROMPT_TOKENS + OUTPUT_TOKENS - 1)
    assert status.num_computed_tokens <= num_tokens - status.num_cached_tokens
    assert server.metric("loaded_tokens_total") >= num_found


def test_streams_of_every_kind_survive_kills_of_the_attention_worker(server: Tiered) -> None:
    cluster, prompt = server.cluster, PROMPT
    text = collect(cluster.gateway, request(prompt, MAX_TOKENS, ignore_eos=True)).text[0]
    messages = messages_of_every_kind(prompt, MAX_TOKENS, stop=text[-12:])
    undisturbed = collect_all(cluster.gateway, messages)
    for roles in (("attn_worker",), ("attn_worker", "dense_worker"), ("dense_worker",)):
        disturbed: list[Collected] = collect_all(cluster.gateway, messages, lambda roles=roles: cluster.kill(*roles))
        for collected, expected in zip(disturbed, undisturbed, strict=True):
            collected.assert_equals(expected)
        cluster.wait_idle()
    assert server.metric("host_kv_corrupt_blocks_total") == 0


def test_the_second_turn_of_a_chat_finds_its_evicted_blocks(server: Tiered) -> None:
    first = prompt_of(11, 450)
    answer, num_computed, _ = server.ask(first)
    assert num_computed >= 450 and answer == reference_tokens(EMBEDDED_MODEL, first, 8)
    server.settle()
    for number in (12, 13):
        server.ask(prompt_of(number, 700))  # fills the device's cache
    num_loaded = server.metric("loaded_tokens_total")
    second = [*first, *answer, *prompt_of(14, 20)]
    answer, num_computed, num_cached = server.ask(second)
    assert answer == reference_tokens(EMBEDDED_MODEL, second, 8)
    assert num_cached == 448 and num_computed <= len(second) - 448 + 8
    assert server.metric("loaded_tokens_total") - num_loaded == 448


def test_prompts_with_different_salts_share_nothing(server: Tiered) -> None:
    prompt = prompt_of(15, 450)
    assert server.ask(prompt, cache_salt="one")[2] == 0
    server.settle()
    for number in (12, 13):
        server.ask(prompt_of(number, 700))
    assert server.ask(prompt, cache_salt="two")[2] == 0
    assert server.ask(prompt)[2] == 0
    server.settle()
    for number in (12, 13):
        server.ask(prompt_of(number, 700))
    assert server.ask(prompt, cache_salt="one")[2] == 448


def test_a_restart_of_everything_finds_the_file_again_but_other_weights_find_nothing(tmp_path: Path) -> None:
    file = tmp_path / "kv"
    expected = None
    for turn, num_found in (("first", 0), ("second", 592)):
        for server in tiered(tmp_path / turn, f"attention.host_kv_path={file}"):
            prompt = prompt_of(3, 600)
            expected = expected or reference_tokens(EMBEDDED_MODEL, prompt, 8)
            answer, _, num_cached = server.ask(prompt)
            assert (answer, num_cached) == (expected, num_found)
    num_bytes = file.stat().st_size
    assert HOST_KV_BYTES - 70_000 < num_bytes <= HOST_KV_BYTES and file.stat().st_mode & 0o777 == 0o600
    model = make_noisy_model(tmp_path / "noisy")
    for server in tiered(tmp_path / "third", f"attention.host_kv_path={file}", f"model.path={model}"):
        answer, _, num_cached = server.ask(prompt)
        assert (answer, num_cached) == (reference_tokens(model, prompt, 8), 0)
        assert server.metric("host_kv_written_blocks_total") >= 0
    for server in tiered(tmp_path / "fourth", f"attention.host_kv_path={file}"):
        answer, _, num_cached = server.ask(prompt)
        assert (answer, num_cached) == (expected, 592), "those of the other weights have not replaced them"


def test_changed_bytes_are_found_and_their_blocks_computed_again(tmp_path: Path) -> None:
    file = tmp_path / "kv"
    prompt = prompt_of(21, 400)
    expected = reference_tokens(EMBEDDED_MODEL, prompt, 8)
    for server in tiered(tmp_path / "cluster", f"attention.host_kv_path={file}"):
        assert server.ask(prompt)[0] == expected
        server.settle()
        for number in (12, 13):
            server.ask(prompt_of(number, 700))
        content = file.read_bytes()
        with file.open("r+b") as changed:
            for slot in range(0, len(content) // BLOCK_BYTES - 2, 3):  # of every third block one byte
                at = len(content) - (slot + 1) * BLOCK_BYTES + 1000
                changed.seek(at)
                changed.write(bytes([content[at] ^ 0x10]))
        answer, _, num_cached = server.ask(prompt)
        assert answer == expected and num_cached < 384
        assert server.metric("host_kv_corrupt_blocks_total") >= 1
        assert "corrupt and is computed again" in server.cluster.log_file.read_text()
        server.cluster.kill("attn_worker")
        answer, _, num_cached = server.ask(prompt)
        assert answer == expected and num_cached > 0


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tiered, Path]]:
    """A server with a file as its tier. The disk is full, but for what the file has taken."""
    directory = tmp_path_factory.mktemp("disk")
    disk = directory / "disk"
    disk.mkdir()
    mount = ["sh", "-c", f'mount -t tmpfs -o size={2 * DISK_KV_BYTES} tmpfs {disk} && exec "$@"', "sh"]
    for namespace in NAMESPACES:
        if subprocess.run([*namespace, *mount, "true"], capture_output=True).returncode == 0:
            settings = (f"attention.host_kv_path={disk / 'kv'}", f"attention.host_kv_bytes={DISK_KV_BYTES}")
            for server in tiered(directory / "cluster", *settings, wrapper=[*namespace, *mount]):
                seen_disk = Path(f"/proc/{server.cluster.process.pid}/root{disk}")
                with contextlib.suppress(OSError), (seen_disk / "other").open("wb", buffering=0) as other:
                    while other.write(bytes(4096)):
                        pass
                assert not shutil.disk_usage(seen_disk).free
                yield server, seen_disk / "kv"
            return
    pytest.skip("nobody may mount a small disk here")


def test_a_disk_that_is_full_after_the_start_changes_nothing(on_disk: tuple[Tiered, Path]) -> None:
    server, _ = on_disk
    prompt = prompt_of(24, 400)
    expected = reference_tokens(EMBEDDED_MODEL, prompt, 8)
    assert server.ask(prompt)[0] == expected
    server.settle()
    server.cluster.kill("attn_worker")
    answer, _, num_cached = server.ask(prompt)
    assert (answer, num_cached) == (expected, 384)
    assert server.metric("host_kv_corrupt_blocks_total") == 0


@pytest.mark.parametrize("change", ["block_size was 8, is 16", "its layout is version 2, this is version 1"])
def test_a_file_of_another_model_or_version_is_made_anew(
    on_disk: tuple[Tiered, Path], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else has used the file before a new attention worker opens it."""
    server, file = on_disk
    prompt = prompt_of(25, 400)
    expected = reference_tokens(EMBEDDED_MODEL, prompt, 8)
    assert server.ask(prompt)[0] == expected
    server.settle()
    log_size, killed = server.cluster.log_file.stat().st_size, server.cluster.pid_of("attn_worker")
    os.kill(server.cluster.process.pid, signal.SIGSTOP)
    try:
        os.kill(killed, signal.SIGKILL)
        if "version" in change:
            monkeypatch.setattr("services.attn_worker.cache.tiers.region._VERSION", 2)
        TierRegion.open(file, DISK_KV_BYTES, BLOCK_BYTES, {"block_size": 8}).close()
    finally:
        os.kill(server.cluster.process.pid, signal.SIGCONT)
    deadline = time.monotonic() + TIMEOUT_S
    while server.cluster.pid_of("attn_worker") == killed:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    answer, _, num_cached = server.ask(prompt)
    assert (answer, num_cached) == (expected, 0)
    [line] = [line for line in server.cluster.log_file.read_text()[log_size:].splitlines() if "made anew" in line]
    assert change in line
    server.settle()
    server.cluster.kill("attn_worker")
    assert server.ask(prompt)[::2] == (expected, 384)


def test_without_the_launcher_a_path_keeps_the_blocks(tmp_path: Path) -> None:
    """As in containers: each service is restarted by itself."""
    settings = (f"attention.host_kv_bytes={HOST_KV_BYTES}", f"attention.host_kv_path={tmp_path / 'kv'}")
    metrics_address = f"127.0.0.1:{free_port()}"
    with plain_services(tmp_path, *settings, f"attention.metrics_address={metrics_address}") as services:
        prompt = prompt_of(22, 400)
        expected = reference_tokens(EMBEDDED_MODEL, prompt, 8)
        assert services.generate(prompt, 8, ignore_eos=True).token_ids == expected
        deadline = time.monotonic() + TIMEOUT_S
        while Scrape(metrics_address).value("twostroke_attention_host_kv_written_blocks_total") < 25:
            assert time.monotonic() < deadline, "not all full blocks were written"
            time.sleep(0.03)
        services.kill("attn_worker")
        services.wait_idle()
        assert services.generate(prompt, 8, ignore_eos=True).token_ids == expected
        assert services.wait_idle().num_cached_tokens == 384


def test_too_little_shared_memory_ends_the_start_and_says_how_much_is_missing(tmp_path: Path) -> None:
    total = shutil.disk_usage("/dev/shm").total
    num_bytes = 10 * total
    options = {"gateway.address": "g", "gateway.http_address": "h"}
    arguments = [f"--set={key}=unix:{tmp_path}/{name}.sock" for key, name in options.items()]
    arguments.append(f"--set=attention.host_kv_bytes={num_bytes}")
    ended = run_warm("services.launch", *arguments, timeout_s=TIMEOUT_S)
    assert ended.returncode == 1
    found = re.search(
        rf"the host tier {num_bytes}[,)].*, (\d+) too many: set attention\.host_kv_bytes to (\d+)", ended.stderr
    )
    assert found and num_bytes - int(found[1]) == int(found[2]) < total, ended.stderr


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_model_with_windows_in_some_layers_finds_its_blocks_again(tmp_path: Path, family: str) -> None:
    model = make_served_model(tmp_path / "model", family, sliding_window=40, max_position_embeddings=2048)
    settings = (f"model.path={model}", "model.dtype=float32")
    with contextlib.contextmanager(tiered)(tmp_path / "cluster", *settings) as server:
        prompt = prompt_of(31, 400)
        expected = reference_tokens(model, prompt, 8)
        assert server.ask(prompt)[0] == expected
        server.settle()
        server.cluster.kill("attn_worker")
        answer, num_computed, num_cached = server.ask(prompt)
        assert answer == expected and num_cached >= 384 and num_computed <= 16 + 8
        for number in range(32, 36):  # which together need all blocks
            server.ask(prompt_of(number, 600))
        loaded = server.metric("loaded_tokens_total")
        assert server.ask(prompt)[0] == expected
        assert server.metric("loaded_tokens_total") > loaded
