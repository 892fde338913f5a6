"""An EAGLE-3 head beside prompts in parts, preemptions and cached prefixes: the tokens are those of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.dense.eagle_head import config_of, random_head, write_head
from tests.support.plain_services import PlainServices, plain_services
from tests.support.reference import VOCAB_SIZE, make_served_model, random_prompts, reference_tokens
from tests.support.warm_process import run_warm

MAX_ROUNDS = 8  # until enough requests run at once: on a busy machine some come late
MODULES = {"dense_worker": "tests.support.workers.speculating_dense_worker"}


@dataclass
class Served:
    path: Path
    services: PlainServices
    step_log: Path

    def steps(self) -> list[dict[str, float]]:
        """All complete lines of the step log."""
        return [json.loads(line) for line in self.step_log.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model and a random head. The caches of both have room for few sequences."""
    directory = tmp_path_factory.mktemp("served")
    path = make_served_model(directory / "model", "llama")
    head = random_head(64, VOCAB_SIZE, layers=(2, 0, 1), draft_vocab_size=500)
    write_head(directory / "head", head.tensors, config_of(head, VOCAB_SIZE))
    step_log = directory / "steps"
    settings = (
        f"model.path={path}",
        "scheduler.max_num_batched_tokens=40",
        "scheduler.max_num_seqs=16",
        "scheduler.policy=max_utilization",
        "attention.block_size=8",
        "attention.num_blocks=28",
        "scheduler.speculation=eagle3",
        f"scheduler.speculation_model={directory / 'head'}",
        f"scheduler.draft_cache_bytes={6 * 64 * 2 * 2 * 16 * 4}",
        f"dense.step_log={step_log}",
    )
    with plain_services(directory, *settings, modules=MODULES) as services:
        yield Served(path, services, step_log)


def test_tokens_are_those_of_hugging_face(served: Served) -> None:
    services = served.services
    prompts = random_prompts(16, longest=90, seed=1)
    max_tokens = [24 + i for i in range(16)]
    expected = [reference_tokens(served.path, prompt, count) for prompt, count in zip(prompts, max_tokens, strict=True)]
    for prompt, count, tokens in zip(prompts[:4], max_tokens, expected, strict=False):
        assert services.generate(prompt, count).token_ids == tokens
    for _ in range(MAX_ROUNDS):
        assert [answer.token_ids for answer in services.generate_all(prompts, max_tokens)] == expected
        if services.dense_status().num_preemptions:
            break
    assert services.dense_status().num_preemptions > 0, "the cache was meant to be too small"
    services.generate(prompts[15], 1)
    again = services.generate(prompts[15], max_tokens[15])
    assert again.token_ids == expected[15]
    assert again.finish.usage.num_cached_tokens > 0, "the prefix was meant to be found"
    services.wait_idle()
    steps = served.steps()
    assert any(step["num_sampled"] > step["num_seqs"] > 0 for step in steps), "no step has verified drafts"
    assert any(step.get("draft_ms", 0.0) > 0.0 for step in steps)


def test_a_head_that_does_not_fit_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    """The embedded model has another hidden size."""
    head = random_head(64, VOCAB_SIZE, layers=(2, 0, 1))
    write_head(tmp_path / "head", head.tensors, config_of(head, VOCAB_SIZE))
    settings = (
        f"dense.address=unix:{tmp_path}/dense.sock",
        f"attention.address=unix:{tmp_path}/attention.sock",
        "scheduler.speculation=eagle3",
        f"scheduler.speculation_model={tmp_path / 'head'}",
    )
    ended = run_warm("services.dense_worker", *(part for each in settings for part in ("--set", each)))
    assert ended.returncode == 1
    assert f"{tmp_path / 'head'}/config.json has hidden_size 64, the model's is 256" in ended.stderr
