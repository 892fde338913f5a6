"""Adapters together with drafts: several adapters in one step that verifies drafts, also over kills.

Hugging Face gives the expected tokens, with each adapter merged into its own copy of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.pb import gateway_pb2
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.clients.streams import collect_all
from tests.support.cluster import request
from tests.support.plain_services import PlainServices, plain_services
from tests.support.reference import make_served_model, random_prompts, reference_tokens

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 150
MAX_ROUNDS = 20  # until the requests share steps, and run still at a kill: they do not come at once
ADAPTERS = {"0": {"rank": 4, "alpha": 8}, "1": {"rank": 16, "modules": ("q_proj", "v_proj", "down_proj")}}
NAMES = ("", *ADAPTERS)  # "" is the model itself
PROMPT = random_prompts(1, 24, seed=5)[0] * 2


@dataclass
class Server:
    services: PlainServices
    expected: dict[str, list[int]]
    step_log: Path

    def messages(self) -> list[gateway_pb2.GenerateRequest]:
        return [request(PROMPT, NUM_TOKENS, model=name, ignore_eos=True) for name in NAMES]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The first round of answers is over, so that later ones can be copied from it."""
    directory = tmp_path_factory.mktemp("lora")
    model = make_served_model(directory / "model", "llama", num_hidden_layers=2)
    models = {"": model}
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        adapter = make_adapter(directory / name, model, seed=seed, **options)
        models[name] = merge_adapter(directory / f"merged{name}", model, adapter)
    expected = {name: reference_tokens(path, PROMPT, NUM_TOKENS) for name, path in models.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(NAMES), "every adapter changes the text"
    settings = {
        "model.path": model,
        "dense.max_loras": len(ADAPTERS),
        "dense.step_log": directory / "steps",
        "scheduler.speculation": "suffix",
        "gateway.lora_modules": json.dumps([f"{name}={directory / name}" for name in ADAPTERS]),
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    modules = {"dense_worker": "tests.support.workers.speculating_dense_worker"}
    with plain_services(directory, *overrides, modules=modules) as services:
        server = Server(services, expected, directory / "steps")
        collect_all(services.gateway, server.messages())
        yield server


def test_steps_verify_drafts_of_several_adapters(server: Server) -> None:
    for _ in range(MAX_ROUNDS):
        num_lines = len(server.step_log.read_text().splitlines())
        found = collect_all(server.services.gateway, server.messages())
        assert {name: each.token_ids[0] for name, each in zip(NAMES, found, strict=True)} == server.expected
        server.services.wait_idle()
        steps = [json.loads(line) for line in server.step_log.read_text().splitlines()[num_lines:]]
        num_runs = sum(step["num_seqs"] for step in steps)  # one for each sequence in each step
        drafted = [step["num_sampled"] - step["num_seqs"] for step in steps if step["num_seqs"] == len(NAMES)]
        # More than five: more than one sequence has drafts.
        if max(drafted, default=0) > 5 and num_runs < 0.6 * NUM_TOKENS * len(NAMES):
            return
    raise AssertionError(f"too few drafts in all of {MAX_ROUNDS} rounds; in the last one {num_runs} runs, {drafted}")


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_a_kill_changes_no_token(server: Server, role: str) -> None:
    services = server.services
    num_open = []  # sequences at each kill

    def kill() -> None:
        num_open.append(services.attention_status().num_sequences)
        services.kill(role)

    while not any(num_open):
        assert len(num_open) < MAX_ROUNDS, "the answers ended before each kill"
        found = collect_all(services.gateway, server.messages(), kill)
        assert {name: each.token_ids[0] for name, each in zip(NAMES, found, strict=True)} == server.expected
        services.wait_idle()
