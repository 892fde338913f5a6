"""`ctl replace-dense` under streams of every kind: they pause and get the same tokens, even if it fails."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import TypeVar

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.common.config import EMBEDDED_MODEL
from services.pb import dense_pb2, gateway_pb2
from tests.support.clients.streams import Collected, collect, collect_all, messages_of_every_kind
from tests.support.cluster import Cluster, children_of, ctl, free_port, is_alive, request, running_cluster
from tests.support.models import TWO_LAYERS
from tests.support.scrape import Scrape

PROMPT = "Count from 1 to 500, slowly, and tell of every number what you like about it. " * 10
MAX_TOKENS = 60  # of the shortest stream
MORE_TOKENS = 10  # of each further one: streams of one length would soon begin anew in the same step, again and again
STAGGER_S = 0.05  # between the starts of streams
LONG_TOKENS = 400  # of streams that are to be open whenever it is
MOST_TRIES = 4
WAIT_S = 60.0
# A step is planned before the previous step's tokens are known, so it may compute a sequence that has just ended.
MAX_WASTED_TOKENS_OF_A_SEQUENCE = 4

T = TypeVar("T")

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow


@pytest.fixture(scope="module")
def metrics_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def dense_metrics_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, metrics_address: str, dense_metrics_address: str
) -> Iterator[Cluster]:
    """The prefix cache is off, so that only a kept sequence saves its prompt from being computed again."""
    directory = tmp_path_factory.mktemp("replace")
    overrides = (TWO_LAYERS, "attention.enable_prefix_cache=false", f"gateway.metrics_address={metrics_address}")
    dense_metrics = f"dense.metrics_address={dense_metrics_address}"
    with running_cluster(directory, *overrides, dense_metrics, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def messages(cluster: Cluster) -> list[gateway_pb2.GenerateRequest]:
    text = collect(cluster.gateway, request(PROMPT, MAX_TOKENS, ignore_eos=True)).text[0]
    return with_lengths(messages_of_every_kind(PROMPT, MAX_TOKENS, stop=text[-12:]))


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, messages: list[gateway_pb2.GenerateRequest]) -> list[Collected]:
    return collect_all(cluster.gateway, messages)


def with_lengths(
    messages: Sequence[gateway_pb2.GenerateRequest], least: int = MAX_TOKENS
) -> list[gateway_pb2.GenerateRequest]:
    """Copies that ask for different numbers of tokens, `least` and more."""
    found = []
    for index, message in enumerate(messages):
        found.append(gateway_pb2.GenerateRequest())
        found[-1].CopyFrom(message)
        found[-1].max_tokens = least + index * MORE_TOKENS
    return found


def has_second_worker(cluster: Cluster) -> bool:
    num_workers = 0
    for pid in children_of(cluster.process.pid):
        with contextlib.suppress(OSError):  # it has just ended
            num_workers += "services.dense_worker" in Path(f"/proc/{pid}/cmdline").read_text()
    return num_workers > 1


class Load:
    """Sends all messages again and again, so that streams are open until the `with` block ends."""

    def __init__(self, cluster: Cluster, messages: Sequence[gateway_pb2.GenerateRequest]) -> None:
        self.collected: list[list[Collected]] = [[] for _ in messages]
        self._cluster = cluster
        self._messages = messages
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(len(messages))

    def __enter__(self) -> Load:
        self._futures = []
        for index in range(len(self._messages)):
            self._futures.append(self._threads.submit(self._repeat, index))
            time.sleep(STAGGER_S)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._threads.shutdown()
        for future in self._futures:
            future.result()

    def _repeat(self, index: int) -> None:
        while not self._is_over.is_set():
            self.collected[index].append(collect(self._cluster.gateway, self._messages[index]))

    def check(self, undisturbed: Sequence[Collected]) -> int:
        """Checks that every answer equals the undisturbed one. Returns how many tokens all answers take to compute."""
        num_prompt_tokens = self._num_prompt_tokens()
        num_tokens = 0
        for answers, expected in zip(self.collected, undisturbed, strict=True):
            for answer in answers:
                answer.assert_equals(expected)
                num_tokens += sum(
                    num_prompt_tokens + len(token_ids) + MAX_WASTED_TOKENS_OF_A_SEQUENCE
                    for token_ids in answer.token_ids.values()
                )
        return num_tokens

    def _num_prompt_tokens(self) -> int:
        return len(self._cluster.gateway.Tokenize(gateway_pb2.TokenizeRequest(text=PROMPT)).token_ids)


def start_time(address: str) -> float | None:
    """The start time in the metrics of the process at `address`; None while nothing is served there."""
    try:
        return Scrape(address).value("twostroke_process_start_time_seconds")
    except OSError:
        return None


def until(is_done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
        time.sleep(0.05)


def num_recovered(metrics_address: str) -> float:
    return Scrape(metrics_address).value("twostroke_gateway_recovered_sequences_total")


def change_under_load(
    cluster: Cluster,
    messages: Sequence[gateway_pb2.GenerateRequest],
    metrics_address: str,
    change: Callable[[], T],
    undo: Callable[[], None] = lambda: None,
) -> tuple[T, Load, int]:
    """What `change` returns, the streams beside it, and how many tokens were computed before.

    Where all streams had ended when the dense worker left, since nobody had time to run this process, it is done again.
    """
    for _ in range(MOST_TRIES):
        computed, recovered = cluster.wait_idle(WAIT_S).num_computed_tokens, num_recovered(metrics_address)
        with Load(cluster, messages) as load:
            changed = change()
        if num_recovered(metrics_address) > recovered:
            return changed, load, computed
        undo()
    raise AssertionError(f"no stream was open at any of {MOST_TRIES} changes")


def test_streams_end_as_without_the_replacement(
    cluster: Cluster,
    messages: list[gateway_pb2.GenerateRequest],
    undisturbed: list[Collected],
    metrics_address: str,
    dense_metrics_address: str,
) -> None:
    log_size = cluster.log_file.stat().st_size
    old_pid, old_start = cluster.pid_of("dense_worker"), start_time(dense_metrics_address)
    replace = partial(ctl, cluster, "replace-dense", "--set", "dense.num_threads=1")
    result, load, computed = change_under_load(cluster, messages, metrics_address, replace)
    assert result.returncode == 0, result.stderr
    new_pid = cluster.pid_of("dense_worker")
    assert f"process {new_pid} serves now" in result.stdout and "the same weights" in result.stdout
    assert new_pid != old_pid and not is_alive(old_pid)
    needed = load.check(undisturbed)
    assert cluster.wait_idle(WAIT_S).num_computed_tokens - computed <= needed, "a prompt was prefilled again"
    assert b"is_crash=True" not in cluster.log_file.read_bytes()[log_size:]
    assert f"dense_worker process {new_pid}, 0 restarts" in ctl(cluster, "status").stdout
    until(lambda: start_time(dense_metrics_address) not in (None, old_start), "the new worker serves its metrics")


def test_a_worker_that_cannot_serve_is_rolled_back(
    cluster: Cluster, messages: list[gateway_pb2.GenerateRequest], undisturbed: list[Collected], metrics_address: str
) -> None:
    pid = cluster.pid_of("dense_worker")
    few = messages[:6]  # the test above has streams of every kind

    def fail() -> list[CompletedProcess[str]]:
        impatient = ctl(cluster, "replace-dense", "--timeout", "0.1")
        until(lambda: not has_second_worker(cluster), "the new worker stops when nobody wants it any more")
        not_a_key = ctl(cluster, "replace-dense", "--set", "dense.num_thread=1")
        while "under way" in not_a_key.stderr:  # the worker is gone, but the launcher has not noticed yet
            not_a_key = ctl(cluster, "replace-dense", "--set", "dense.num_thread=1")
        no_device = ctl(cluster, "replace-dense", "--set", "dense.device=cuda:99")  # the new worker ends at its start
        # The last one fails after the old worker has left.
        return [impatient, not_a_key, no_device, ctl(cluster, "replace-dense", "--set", "model.dtype=float16")]

    failures, load, computed = change_under_load(cluster, few, metrics_address, fail)
    impatient, not_a_key, no_device, other_dtype = failures
    assert impatient.returncode == 1 and "not done within 0.1 s" in impatient.stderr
    assert (not_a_key.returncode, no_device.returncode, other_dtype.returncode) == (1, 1, 1)
    assert "unknown config key dense.num_thread" in not_a_key.stderr
    assert "'cuda:99'" in no_device.stderr and f"process {pid}, goes on" in no_device.stderr
    assert "dtype is float16" in other_dtype.stderr and f"process {pid}, goes on" in other_dtype.stderr
    assert cluster.pid_of("dense_worker") == pid
    needed = load.check(undisturbed[: len(few)])
    assert cluster.wait_idle(WAIT_S).num_computed_tokens - computed <= needed, "a prompt was prefilled again"


def test_the_precision_changes_under_running_streams_that_keep_their_cache(
    cluster: Cluster, messages: list[gateway_pb2.GenerateRequest], metrics_address: str
) -> None:
    """The tokens may change with the precision; no stream ends early, and none is computed again."""
    greedy = with_lengths([messages[0]] * 3, LONG_TOKENS)
    refused = ctl(cluster, "replace-dense", "--set", "dense.quantization=fp8")
    assert refused.returncode == 1 and "--keep-caches" in refused.stderr
    change = partial(ctl, cluster, "replace-dense", "--set", "dense.quantization=fp8", "--keep-caches")
    undo = partial(change_back, cluster)
    changed, load, computed = change_under_load(cluster, greedy, metrics_address, change, undo)
    assert changed.returncode == 0, changed.stderr
    assert "the same KV cache, whatever the weights" in changed.stdout
    num_prompt_tokens = len(cluster.gateway.Tokenize(gateway_pb2.TokenizeRequest(text=PROMPT)).token_ids)
    needed = 0
    for message, answers in zip(greedy, load.collected, strict=True):
        assert {len(answer.token_ids[0]) for answer in answers} == {message.max_tokens}
        needed += len(answers) * (num_prompt_tokens + message.max_tokens + MAX_WASTED_TOKENS_OF_A_SEQUENCE)
    assert cluster.wait_idle(WAIT_S).num_computed_tokens - computed <= needed, "a prompt was prefilled again"
    log = cluster.log_file.read_text()
    assert "the KV cache of other weights is kept" in log and "weights are quantized" in log
    change_back(cluster)


def change_back(cluster: Cluster) -> None:
    back = ctl(cluster, "replace-dense", "--set", "dense.quantization=checkpoint")  # its own hash is the stated one
    assert back.returncode == 0 and "the same weights" in back.stdout, back.stderr


def replace_under_streams(cluster: Cluster, *settings: str) -> tuple[CompletedProcess[str], list[grpc.RpcError]]:
    """Replaces the dense worker by one with other weights while streams run; also returns how these end."""
    errors: list[grpc.RpcError] = []
    is_over = threading.Event()

    def stream_until_it_fails(num_tokens: int) -> None:
        while not is_over.is_set():
            try:
                collect(cluster.gateway, request(PROMPT, num_tokens, ignore_eos=True))
            except grpc.RpcError as error:
                errors.append(error)
                return

    # Of several lengths: equal ones would end together, and what has not begun yet is answered with the new weights.
    lengths = (400, 370, 330, 290)
    with ThreadPoolExecutor(len(lengths)) as threads:
        streams = [threads.submit(stream_until_it_fails, num_tokens) for num_tokens in lengths]
        options = [word for setting in settings for word in ("--set", setting)]
        replaced = ctl(cluster, "replace-dense", *options, "--drop-caches")
        is_over.set()
        for stream in streams:
            stream.result()
    return replaced, errors


@pytest.fixture
def restored(cluster: Cluster) -> Iterator[None]:
    """Gives the cluster its own weights back after a test."""
    yield
    settings = (f"model.path={EMBEDDED_MODEL}", "dense.quantization=checkpoint")
    result = ctl(cluster, "replace-dense", *(word for each in settings for word in ("--set", each)), "--drop-caches")
    assert result.returncode == 0, result.stderr


@pytest.mark.usefixtures("restored")
def test_the_precision_changes_with_dropped_caches(cluster: Cluster) -> None:
    """Another precision has another hash, so no stream goes on with keys that the earlier one has computed."""
    unquantized = cluster.dense.GetInfo(dense_pb2.GetInfoRequest()).weights_hash
    dropped, errors = replace_under_streams(cluster, "dense.quantization=fp8")
    assert dropped.returncode == 0, dropped.stderr
    assert "other weights, the KV cache was dropped" in dropped.stdout
    assert {error.code() for error in errors} == {grpc.StatusCode.ABORTED}
    assert cluster.dense.GetInfo(dense_pb2.GetInfoRequest()).weights_hash != unquantized
    assert len(cluster.generate([1, 2, 3], 24, ignore_eos=True).token_ids) == 24


@pytest.mark.usefixtures("restored")
def test_other_weights_need_drop_caches(cluster: Cluster, tmp_path: Path) -> None:
    model_dir = tmp_path / "other-weights"
    shutil.copytree(EMBEDDED_MODEL, model_dir)
    weights = load_file(model_dir / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 0.25
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    pid, old_hash = cluster.pid_of("dense_worker"), cluster.dense.GetInfo(dense_pb2.GetInfoRequest()).weights_hash
    refused = ctl(cluster, "replace-dense", "--set", f"model.path={model_dir}")
    assert refused.returncode == 1
    assert "other weights" in refused.stderr and old_hash[:16] in refused.stderr and "--open-requests" in refused.stderr
    assert cluster.pid_of("dense_worker") == pid
    settings = (f"model.path={model_dir}", "dense.quantization=checkpoint")
    dropped, errors = replace_under_streams(cluster, *settings)
    assert dropped.returncode == 0, dropped.stderr
    assert "other weights, the KV cache was dropped" in dropped.stdout
    assert {error.code() for error in errors} == {grpc.StatusCode.ABORTED}
    assert all("other weights" in str(error.details()) for error in errors)
    model = AutoModelForCausalLM.from_pretrained(model_dir, num_hidden_layers=2, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    token_ids = list(cluster.gateway.Tokenize(gateway_pb2.TokenizeRequest(text=PROMPT)).token_ids)
    answer = cluster.generate(token_ids, 24, ignore_eos=True).token_ids
    prompt = torch.tensor([token_ids])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    assert answer == expected[0, len(token_ids) :].tolist()
    cluster.wait_idle(WAIT_S)
