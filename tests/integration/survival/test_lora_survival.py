"""Adapters end to end: shared steps, more adapters than slots, and the same tokens over kills and a replacement.

Hugging Face gives the expected tokens, with each adapter merged into its own copy of the model.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.pb import gateway_pb2, sampling_pb2
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.clients.http_clients import client
from tests.support.clients.streams import Collected, collect, collect_all
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, ctl, request, running_cluster
from tests.support.reference import make_served_model, random_prompts, reference_beams, reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

ADAPTERS: dict[str, dict[str, Any]] = {
    "0": {"rank": 4, "alpha": 8},
    "1": {"rank": 16, "use_rslora": True, "modules": ("q_proj", "v_proj", "o_proj")},
    "2": {"rank": 8, "modules": ("gate_proj", "up_proj", "down_proj"), "ranks": {"down_proj": 64}},
    "3": {"rank": 32, "alpha": 16, "modules": ("k_proj", "down_proj")},
}
MAX_LORAS = 2
MAX_ROUNDS = 30  # until all requests are in one step: they do not come at once
NUM_LONG_TOKENS = 120  # so many that a kill comes in the middle
PROMPTS = random_prompts(3, 40, seed=5)


@dataclass
class Server:
    cluster: Cluster
    models: dict[str, Path]  # as merged for Hugging Face, by the name of the adapter; "" is the model itself
    directory: Path  # of the adapters
    step_log: Path

    def check(self, sent: Sequence[tuple[str, list[int]]], found: Sequence[Collected], num_tokens: int) -> None:
        for (name, prompt), each in zip(sent, found, strict=True):
            assert each.token_ids[0] == reference_tokens(self.models[name], prompt, num_tokens), f"adapter {name!r}"

    def batch_sizes(self) -> list[int]:
        return [json.loads(line).get("num_seqs", 0) for line in self.step_log.read_text().splitlines()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("lora")
    model = make_served_model(directory / "model", "llama", num_hidden_layers=2)
    adapters = directory / "adapters"
    models = {"": model}
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        adapter = make_adapter(adapters / name, model, seed=seed, **options)
        models[name] = merge_adapter(directory / f"merged{name}", model, adapter)
    modules = json.dumps([f"{name}={adapters / name}" for name in ADAPTERS if name != "3"])
    settings = {
        "model.path": model,
        "dense.max_loras": MAX_LORAS,
        "dense.step_log": directory / "steps",
        "gateway.lora_modules": modules,
        "gateway.lora_directory": adapters,
    }
    with running_cluster(directory, *(f"{key}={value}" for key, value in settings.items()), is_warm=True) as cluster:
        yield Server(cluster, models, adapters, directory / "steps")
        cluster.wait_idle()


def messages(
    sent: Sequence[tuple[str, list[int]]], num_tokens: int, **options: Any
) -> list[gateway_pb2.GenerateRequest]:
    return [request(prompt, num_tokens, model=name, ignore_eos=True, **options) for name, prompt in sent]


def test_six_concurrent_prompts_are_each_answered_by_their_adapter_in_shared_steps(server: Server) -> None:
    """The same three prompts with and without adapters, twice: the prefixes that they leave must not be mixed up."""
    sent = [(name, prompt) for prompt in PROMPTS[:2] for name in ("", "0", "1")]
    num_before = len(server.batch_sizes())
    for round_number in range(MAX_ROUNDS):
        found = collect_all(server.cluster.gateway, messages(sent, 40))
        server.check(sent, found, 40)
        sizes = server.batch_sizes()[num_before:]
        if round_number > 0 and len(sent) in sizes:
            return
    raise AssertionError(f"no step had {len(sent)} sequences in {MAX_ROUNDS} rounds: {sizes}")


def test_searches_with_adapters_find_the_beams_of_the_merged_models(server: Server) -> None:
    """At the same time, in shared steps: beams are forked with their adapter."""
    num_beams, num_tokens = 4, 12
    search = sampling_pb2.BeamSearch(length_penalty=1.0, early_stopping=sampling_pb2.EARLY_STOPPING_HEURISTIC)
    sent = [(name, prompt) for prompt in PROMPTS[1:] for name in ("", "0", "1")]
    with ThreadPoolExecutor(len(sent)) as pool:
        answers = [
            pool.submit(
                server.cluster.gateway.Generate,
                request(prompt, num_tokens, model=name, n=num_beams, best_of=num_beams, beam_search=search),
                timeout=REQUEST_TIMEOUT_S,
            )
            for name, prompt in sent
        ]
    for (name, prompt), answer in zip(sent, answers, strict=True):
        found = [(list(each.token_ids), each.finish.beam_score) for each in answer.result().completions]
        expected = reference_beams(server.models[name], prompt, num_beams, num_tokens, None)
        assert [token_ids for token_ids, _ in found] == [token_ids for token_ids, _ in expected], f"adapter {name!r}"
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-3)


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_searches_with_adapters_go_on_over_a_kill(server: Server, role: str) -> None:
    num_beams, gateway = 3, server.cluster.gateway
    search = sampling_pb2.BeamSearch(length_penalty=2.0, early_stopping=sampling_pb2.EARLY_STOPPING_NEVER)
    sent = [("0", PROMPTS[1]), ("1", PROMPTS[2])]
    options = {"length_penalty": 2.0, "early_stopping": "never"}
    for _ in range(MAX_ROUNDS):
        with ThreadPoolExecutor(len(sent)) as pool:
            answers = [
                pool.submit(gateway.Generate, each, timeout=REQUEST_TIMEOUT_S)
                for each in messages(sent, NUM_LONG_TOKENS, best_of=num_beams, n=num_beams, beam_search=search)
            ]
            has_begun = run_steps(server, 30, num_beams * len(sent), answers)
            server.cluster.kill(role)
            for (name, prompt), answer in zip(sent, answers, strict=True):
                found = [(list(each.token_ids), each.finish.beam_score) for each in answer.result().completions]
                expected = reference_beams(
                    server.models[name], prompt, num_beams, NUM_LONG_TOKENS, None, **options
                )
                assert [each for each, _ in found] == [each for each, _ in expected], f"adapter {name!r}"
                assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-3)
        server.cluster.wait_idle()
        if has_begun:
            return
    raise AssertionError(f"the searches had ended before the kill in all of {MAX_ROUNDS} rounds")


def run_steps(server: Server, num_steps: int, num_sequences: int, answers: Sequence[Future[Any]]) -> bool:
    """Waits for so many steps of so many sequences; returns whether they came before the first answer."""
    last = None
    while not any(answer.done() for answer in answers):
        status = server.cluster.attention_status()
        if last is None and status.num_sequences == num_sequences:
            last = status.num_steps + num_steps
        if last is not None and status.num_steps >= last:
            return True
    return False


def test_more_adapters_than_slots_take_turns_and_others_go_on(server: Server) -> None:
    with client(server.cluster.http_address) as http:
        assert http.post("/v1/load_lora_adapter", json={"lora_name": "3", "lora_path": "3"}).status_code == 200
    sent = [(name, prompt) for prompt in PROMPTS for name in ("3", "0", "", "1", "2")]
    found = collect_all(server.cluster.gateway, messages(sent, 12))
    server.check(sent, found, 12)
    server.cluster.wait_idle()


@pytest.mark.parametrize(
    "roles", [("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker")], ids=" and ".join
)
def test_streams_with_adapters_survive_kills(server: Server, roles: tuple[str, ...]) -> None:
    sent = [("0", PROMPTS[0]), ("2", PROMPTS[1]), ("", PROMPTS[1]), ("0", PROMPTS[2])]
    found = collect_all(server.cluster.gateway, messages(sent, NUM_LONG_TOKENS), lambda: server.cluster.kill(*roles))
    server.check(sent, found, NUM_LONG_TOKENS)
    server.cluster.wait_idle()


def test_streams_with_adapters_survive_the_replacement_of_the_dense_worker(server: Server) -> None:
    sent = [("1", PROMPTS[0]), ("2", PROMPTS[0]), ("", PROMPTS[2])]
    done = []
    found = collect_all(
        server.cluster.gateway,
        messages(sent, NUM_LONG_TOKENS),
        lambda: done.append(ctl(server.cluster, "replace-dense")),
    )
    assert done[0].returncode == 0, done[0].stderr
    server.check(sent, found, NUM_LONG_TOKENS)
    server.cluster.wait_idle()


def test_an_adapter_that_has_changed_on_disk_fails_only_its_own_requests(server: Server) -> None:
    """It is loaded under another name; then its file changes before the dense worker reads it."""
    cluster = server.cluster
    shutil.copytree(server.directory / "0", server.directory / "changing")
    cluster.gateway.LoadAdapter(gateway_pb2.LoadAdapterRequest(name="changing", path="changing"), timeout=60)
    # Its hash is that of "0", which must leave its slot first.
    for name in ("1", "2"):
        collect(cluster.gateway, request(PROMPTS[0], 2, model=name))
    (server.directory / "changing" / "adapter_model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(grpc.RpcError) as failed:
        collect(cluster.gateway, request(PROMPTS[0], 2, model="changing"))
    assert failed.value.code() is grpc.StatusCode.ABORTED and "'changing' cannot be loaded" in failed.value.details()
    sent = [("0", PROMPTS[0]), ("2", PROMPTS[0])]
    server.check(sent, collect_all(cluster.gateway, messages(sent, 5)), 5)
    cluster.wait_idle()


def model_info_once_ready(cluster: Cluster) -> gateway_pb2.ModelInfoResponse:
    """A new gateway answers before it is connected to the dense worker, and says so."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while True:
        try:
            return cluster.gateway.ModelInfo(
                gateway_pb2.ModelInfoRequest(), timeout=REQUEST_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() < deadline, error
            time.sleep(0.1)


def test_a_restarted_gateway_serves_what_a_client_has_loaded(server: Server) -> None:
    cluster = server.cluster
    cluster.gateway.LoadAdapter(gateway_pb2.LoadAdapterRequest(name="kept", path="3"), timeout=60)
    cluster.kill("gateway")
    info = model_info_once_ready(cluster)
    assert {"kept", "0", "1", "2"} <= {each.name for each in info.adapters}
    found = collect(cluster.gateway, request(PROMPTS[0], 12, model="kept", ignore_eos=True))
    assert found.token_ids[0] == reference_tokens(server.models["3"], PROMPTS[0], 12)
    cluster.wait_idle()
