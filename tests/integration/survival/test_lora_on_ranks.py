"""Adapters on two ranks: the tokens of Hugging Face with each merged in, whoever dies, and as they are swapped.

There are more adapters than slots, so some are loaded while streams with others run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.adapters import make_adapter, merge_adapter
from tests.support.clients.streams import Collected, collect, collect_all
from tests.support.cluster import Cluster, request, running_cluster
from tests.support.rank_processes import PROCESSES, pid_of
from tests.support.reference import make_served_model, random_prompts, reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

ARRANGEMENTS = {"tensor": "dense.tensor_parallel_size=2", "pipeline": "dense.pipeline_parallel_size=2"}
ADAPTERS: dict[str, dict[str, Any]] = {
    "0": {"rank": 4, "alpha": 8},
    "1": {"rank": 16, "use_rslora": True, "modules": ("q_proj", "v_proj", "o_proj")},
    "2": {"rank": 8, "modules": ("gate_proj", "up_proj", "down_proj"), "ranks": {"down_proj": 64}},
}
PROMPTS = random_prompts(3, 40, seed=5)
NUM_LONG_TOKENS = 100  # so many that a kill comes in the middle

Sent = tuple[str, list[int]]  # the name of an adapter, and a prompt


@dataclass
class Server:
    cluster: Cluster
    models: dict[str, Path]  # as merged for Hugging Face, by the name of the adapter; "" is the model itself
    directory: Path  # of the adapters

    def ask(
        self, sent: Sequence[Sent], num_tokens: int, disturb: Callable[[], object] = lambda: None
    ) -> list[Collected]:
        messages = [request(prompt, num_tokens, model=name, ignore_eos=True) for name, prompt in sent]
        return collect_all(self.cluster.gateway, messages, disturb)

    def check_answers(self, sent: Sequence[Sent], num_tokens: int, found: Sequence[Collected]) -> None:
        """In the main thread: Hugging Face loads one model at a time."""
        for (name, prompt), each in zip(sent, found, strict=True):
            assert each.token_ids[0] == reference_tokens(self.models[name], prompt, num_tokens), f"adapter {name!r}"

    def check(self, sent: Sequence[Sent], num_tokens: int) -> None:
        self.check_answers(sent, num_tokens, self.ask(sent, num_tokens))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_long = metafunc.config.getoption("--all-families")
    if "server" in metafunc.fixturenames:
        arrangements = list(ARRANGEMENTS) if is_long else ["tensor"]
        metafunc.parametrize("server", arrangements, indirect=True, scope="module")
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", PROCESSES if is_long else ("dense_worker-1",))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    models = {"": make_served_model(directory / "model", "llama", num_hidden_layers=2)}
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        adapter = make_adapter(directory / "adapters" / name, models[""], seed=seed, **options)
        models[name] = merge_adapter(directory / f"merged{name}", models[""], adapter)
    return models


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("lora-on-ranks")
    adapters = directory / "adapters"
    shutil.copytree(models[""].parent / "adapters", adapters)
    modules = json.dumps([f"{name}={adapters / name}" for name in ADAPTERS])
    settings = (f"model.path={models['']}", "dense.max_loras=2", f"gateway.lora_modules={modules}")
    with running_cluster(directory, *settings, ARRANGEMENTS[request.param], is_warm=True) as cluster:
        yield Server(cluster, models, adapters)
        cluster.wait_idle()


def test_more_adapters_than_slots_take_turns_in_shared_steps(server: Server) -> None:
    server.check([(name, prompt) for prompt in PROMPTS for name in ("2", "0", "", "1")], 16)


def test_streams_with_adapters_survive_kills(server: Server, name: str) -> None:
    """And so does one whose adapter is asked for, and gets a free slot, as the process dies."""
    sent = [("0", PROMPTS[0]), ("", PROMPTS[1]), ("0", PROMPTS[2])]
    late_sent = [("1", PROMPTS[1])]
    pids = {each: pid_of(server.cluster, each) for each in PROCESSES}
    with ThreadPoolExecutor(1) as thread:
        late: list[Future[list[Collected]]] = []

        def disturb() -> None:
            late.append(thread.submit(server.ask, late_sent, NUM_LONG_TOKENS))
            os.kill(pids[name], signal.SIGKILL)

        found = server.ask(sent, NUM_LONG_TOKENS, disturb)
        found_late = late[0].result()
    server.check_answers(sent, NUM_LONG_TOKENS, found)
    server.check_answers(late_sent, NUM_LONG_TOKENS, found_late)
    changed = {each for each in PROCESSES if pid_of(server.cluster, each) != pids[each]}
    assert changed == {name}, f"{changed}: the other processes live on"
    server.cluster.wait_idle()


def test_an_adapter_that_a_new_rank_cannot_load_ends_only_its_requests(server: Server) -> None:
    """Its files go while it is in a slot; then a rank dies, and its successor needs them."""
    cluster, path = server.cluster, server.directory / "0" / "adapter_model.safetensors"
    sent = [("0", PROMPTS[0]), ("2", PROMPTS[0])]
    server.check(sent, 4)
    content = path.read_bytes()
    path.unlink()
    old = pid_of(cluster, "dense_worker-1")
    os.kill(old, signal.SIGKILL)
    server.check(sent[1:], 8)
    assert pid_of(cluster, "dense_worker-1") != old
    with pytest.raises(grpc.RpcError) as failed:
        collect(cluster.gateway, request(PROMPTS[0], 4, model="0"))
    assert failed.value.code() is grpc.StatusCode.ABORTED and "cannot be loaded: " in failed.value.details()
    path.write_bytes(content)
    server.check(sent, 8)
    cluster.wait_idle()
