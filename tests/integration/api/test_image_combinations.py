"""Pictures beside the other options of a server that has them all on; Hugging Face gives the expected tokens.

LoRA adapters, speculation, several attention workers, a host tier, and so few blocks that streams are preempted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from services.launch.service_configs import METRICS_PORT_STEP
from services.pb import gateway_pb2
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.clients.streams import collect_all
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port, reserve_port, running_cluster
from tests.support.dense.vision_models import noise
from tests.support.scrape import Scrape
from tests.support.served_vision import (
    Truth,
    Turn,
    beams_message,
    chat_message,
    make_served_vision_model,
)

pytestmark = pytest.mark.timeout(300)  # processes start, and the machine may be slow

FIRST, SECOND = noise(50, 37, 1), noise(20, 60, 2)
TURNS: list[Turn] = [("user", ["What is ", FIRST, " beside ", SECOND, "?"])]
NUM_BLOCKS, BLOCK_SIZE = 14, 16  # of each of two attention workers: little more than the longest stream needs
MAX_MODEL_LEN = 200
NUM_STREAMS, NUM_LONG_TOKENS = 6, 100
MAX_ROUNDS = 5  # until sequences give way
TOLERANCE = 1e-3  # of log-probabilities: float32 sums in another order


@dataclass
class Server:
    cluster: Cluster
    metrics: list[str]  # addresses of the two attention workers'
    model: Path
    plain: Truth
    adapted: Truth

    def ask(self, message: gateway_pb2.GenerateRequest) -> gateway_pb2.GenerateResponse:
        return self.cluster.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)

    def num_read_blocks(self) -> float:
        """Blocks that either attention worker has read back from the host tier."""
        return sum(Scrape(each).value("twostroke_attention_host_kv_read_blocks_total") for each in self.metrics)


def two_metrics_addresses() -> list[str]:
    """Free addresses as the launcher gives them to two workers."""
    first = free_port()
    while not reserve_port(first + METRICS_PORT_STEP):
        first = free_port()
    return [f"127.0.0.1:{first}", f"127.0.0.1:{first + METRICS_PORT_STEP}"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("images")
    model = make_served_vision_model(directory / "model")
    # The tower's layers have other names, and keep their weights.
    adapter = make_adapter(directory / "adapter", model, modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    merged = merge_adapter(directory / "merged", model, adapter)
    metrics = two_metrics_addresses()
    settings = {
        "model.path": model,
        "model.max_model_len": MAX_MODEL_LEN,
        "scheduler.max_num_batched_tokens": 64,
        "scheduler.policy": "max_utilization",  # sequences give way
        "scheduler.speculation": "ngram",
        "scheduler.max_beam_width": 4,
        "dense.max_loras": 1,
        "gateway.lora_modules": f'["adapted={adapter}"]',
        "attention.workers": 2,
        "attention.block_size": BLOCK_SIZE,
        "attention.num_blocks": NUM_BLOCKS,
        "attention.host_kv_bytes": 2**25,
        "attention.metrics_address": metrics[0],
    }
    with running_cluster(directory, *(f"{key}={value}" for key, value in settings.items()), is_warm=True) as cluster:
        yield Server(cluster, metrics, model, Truth(model), Truth(merged))
        cluster.wait_idle()


def test_an_adapter_of_the_text_part(server: Server) -> None:
    message = chat_message(TURNS, 12)
    message.model = "adapted"
    [expected], _ = server.adapted.generate(TURNS, 12)
    assert server.ask(message).completions[0].token_ids == expected != server.plain.generate(TURNS, 12)[0][0]


def test_several_answers_with_log_probabilities(server: Server) -> None:
    message = chat_message(TURNS, 12)
    message.n, message.logprobs = 2, 1
    [expected], _ = server.plain.generate(TURNS, 12)
    logprobs = server.plain.logprobs(TURNS, expected)
    for each in server.ask(message).completions:
        assert each.token_ids == expected
        assert [token.logprob for token in each.logprobs] == pytest.approx(logprobs, abs=TOLERANCE)


def test_beams(server: Server) -> None:
    message = beams_message(TURNS, 10, num_beams=3)
    found = server.ask(message).completions
    rows, scores = server.plain.generate(TURNS, 10, num_beams=3, num_return_sequences=3)
    assert [list(each.token_ids) for each in found] == rows
    assert [each.finish.beam_score for each in found] == pytest.approx(scores, abs=TOLERANCE)


def test_structured_output(server: Server) -> None:
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    texts = {each: tokenizer.decode([each]) for each in range(len(tokenizer))}
    digits = [each for each, text in texts.items() if text and set(text) <= set("0123456789")]
    message = chat_message(TURNS, 12)
    message.sampling.structured_output.regex = "[0-9]{100}"  # so that the answer only ends by its length
    rows, _ = server.plain.generate(TURNS, 12, prefix_allowed_tokens_fn=lambda *_: digits)
    assert server.ask(message).completions[0].token_ids == rows[0]


def test_preempted_streams_with_drafts_go_on(server: Server) -> None:
    pictures = [noise(44, 44, 10 + index) for index in range(NUM_STREAMS)]
    chats: list[list[Turn]] = [[("user", [each, " What?"])] for each in pictures]
    messages = [chat_message(turns, NUM_LONG_TOKENS) for turns in chats]
    expected = [server.plain.generate(turns, NUM_LONG_TOKENS)[0][0] for turns in chats]
    for _ in range(MAX_ROUNDS):
        found = collect_all(server.cluster.gateway, messages)
        assert [each.token_ids[0] for each in found] == expected
        if server.cluster.dense_status().num_preemptions:
            return
    raise AssertionError("the cache was meant to be too small")


def test_a_prompt_comes_back_from_the_host_tier(server: Server) -> None:
    message = chat_message(TURNS, 12)
    [expected], _ = server.plain.generate(TURNS, 12)
    assert server.ask(message).completions[0].token_ids == expected
    before = server.num_read_blocks()
    for attempt in range(MAX_ROUNDS):
        pictures = [noise(60, 60, 100 + attempt * NUM_STREAMS + index) for index in range(NUM_STREAMS)]
        collect_all(server.cluster.gateway, [chat_message([("user", [each, "What?"])], 8) for each in pictures])
        assert server.ask(message).completions[0].token_ids == expected
        if server.num_read_blocks() > before:
            return
    raise AssertionError("the others' prompts were meant to take all blocks of both workers")
