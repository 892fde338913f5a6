"""A table of vectors beside a prompt, as clients of TensorRT-LLM send it, over Triton's protocol and over kills.

Hugging Face gives the expected tokens, with the rows and the embeddings of tokens as `inputs_embeds`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.pb import triton_pb2_grpc
from tests.support.clients.inference_messages import int32, message, output, texts
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, running_cluster
from tests.support.prompt_vectors import embeddings_of, random_vectors, tokens_after_vectors
from tests.support.reference import VOCAB_SIZE, random_prompts, reference_model

pytestmark = pytest.mark.timeout(300)  # workers start several times, and the machine may be slow

NUM_ROWS, BLOCK_SIZE = 24, 16
NUM_LONG_TOKENS = 100  # so many that a kill comes in the middle
MAX_ATTEMPTS = 5  # on a busy machine the test may come too late for it
PROMPT = random_prompts(2, 40, seed=5)[1]
IN_FRONT = [*range(VOCAB_SIZE, VOCAB_SIZE + NUM_ROWS), *PROMPT]
# Rows in another order, one of them twice, and not all of them.
AMONG = [*PROMPT[:7], VOCAB_SIZE + 5, VOCAB_SIZE + 2, *PROMPT[7:20], VOCAB_SIZE + 5, VOCAB_SIZE + NUM_ROWS - 1, 9]


def table(seed: int) -> torch.Tensor:
    return random_vectors(EMBEDDED_MODEL, NUM_ROWS, seed).half().float()  # so that half precision is exact


def vectors_of(rows: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    of_tokens = embeddings_of(EMBEDDED_MODEL, [min(token_id, VOCAB_SIZE - 1) for token_id in token_ids])
    pairs = zip(token_ids, of_tokens, strict=True)
    return torch.stack([rows[id_ - VOCAB_SIZE] if id_ >= VOCAB_SIZE else of_token for id_, of_token in pairs])


def expected_tokens(rows: torch.Tensor, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    return tokens_after_vectors(EMBEDDED_MODEL, vectors_of(rows, token_ids), num_tokens)


def inputs(rows: torch.Tensor, token_ids: Sequence[int], num_tokens: int, **more: Any) -> dict[str, np.ndarray]:
    return {
        "input_ids": int32(token_ids),
        "input_lengths": int32([len(token_ids)]),
        "request_output_len": int32([num_tokens]),
        "end_id": int32([-1]),
        "prompt_embedding_table": rows.numpy()[None],
        "prompt_vocab_size": int32([len(rows)]),
        **more,
    }


@dataclass
class Server:
    cluster: Cluster
    stub: triton_pb2_grpc.GRPCInferenceServiceStub

    def infer(self, values: dict[str, np.ndarray], model: str = "tensorrt_llm") -> Any:
        return self.stub.ModelInfer(message(model, values), timeout=REQUEST_TIMEOUT_S)

    def answer(self, values: dict[str, np.ndarray]) -> list[int]:
        """The tokens after the prompt."""
        token_ids = output(self.infer(values), "output_ids")[0, 0].tolist()
        prompt = values["input_ids"][0].tolist()
        assert token_ids[: len(prompt)] == prompt
        return token_ids[len(prompt) :]

    def stream(self, values: dict[str, np.ndarray], on_token: Callable[[], object]) -> list[int]:
        sent = iter([message("tensorrt_llm", values | {"streaming": np.array([[True]])})])
        token_ids: list[int] = []
        for each in self.stub.ModelStreamInfer(sent, timeout=REQUEST_TIMEOUT_S):
            assert not each.error_message, each.error_message
            token_ids += output(each.infer_response, "output_ids")[0, 0].tolist()
            on_token()
        return token_ids

    def num_cached_tokens(self) -> int:
        return self.cluster.attention_status().num_cached_tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("table")
    settings = ("gateway.enable_prompt_embeds=true", "scheduler.max_num_batched_tokens=32", "scheduler.max_num_seqs=8")
    with (
        running_cluster(directory, *settings, is_warm=True) as cluster,
        grpc.insecure_channel(cluster.address) as channel,
    ):
        yield Server(cluster, triton_pb2_grpc.GRPCInferenceServiceStub(channel))
        cluster.wait_idle()


def test_ids_beyond_the_vocabulary_stand_for_rows(server: Server) -> None:
    for rows in (table(1), table(2)):
        for token_ids in (IN_FRONT, AMONG, [VOCAB_SIZE + 3]):
            expected = expected_tokens(rows, token_ids, 20)
            assert server.answer(inputs(rows, token_ids, 20)) == expected
            halves = inputs(rows, token_ids, 20, prompt_embedding_table=rows.half().numpy()[None])
            assert server.answer(halves) == expected


def test_each_row_of_a_batch_has_its_table(server: Server) -> None:
    tables = [table(1), table(2)]
    batch = {
        name: np.concatenate([inputs(rows, IN_FRONT, 12)[name] for rows in tables])
        for name in inputs(tables[0], IN_FRONT, 12)
    }
    token_ids = output(server.infer(batch), "output_ids")
    for rows, found in zip(tables, token_ids[:, 0].tolist(), strict=True):
        assert found[len(IN_FRONT) :] == expected_tokens(rows, IN_FRONT, 12)


def test_with_a_text_the_rows_stand_before_it(server: Server) -> None:
    rows, text = table(3), "San Francisco is a"
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    in_front = range(VOCAB_SIZE, VOCAB_SIZE + NUM_ROWS)
    expected = expected_tokens(rows, [*in_front, *tokenizer(text)["input_ids"]], 12)
    values = {
        "text_input": texts([text]),
        "max_tokens": int32([12]),
        "end_id": int32([-1]),
        "prompt_embedding_table": rows.numpy()[None],
        "prompt_table_extra_id": np.array([[7]], dtype=np.uint64),
    }
    for model in ("ensemble", "tensorrt_llm_bls"):
        whole = output(server.infer(values, model), "text_output")
        bare = output(server.infer(values | {"exclude_input_in_output": np.array([[True]])}, model), "text_output")
        assert bare == [tokenizer.decode(expected, skip_special_tokens=True)]
        assert whole == [text + bare[0]]


@torch.inference_mode()
def test_beams_follow_a_table(server: Server) -> None:
    rows = table(1)
    expected = reference_model(EMBEDDED_MODEL).generate(
        inputs_embeds=vectors_of(rows, AMONG)[None],
        attention_mask=torch.ones(1, len(AMONG), dtype=torch.int64),
        max_new_tokens=10,
        do_sample=False,
        num_beams=3,
        num_return_sequences=3,
        eos_token_id=None,
        length_penalty=0.0,
        early_stopping=True,
    )
    response = server.infer(inputs(rows, AMONG, 10, beam_width=int32([3]), exclude_input_in_output=np.array([[True]])))
    assert output(response, "output_ids")[0].tolist() == expected.tolist()


def test_the_prefix_cache_is_shared_by_equal_tables_alone(server: Server) -> None:
    rows = table(4)
    server.answer(inputs(rows, IN_FRONT, 2))
    num_cached = (len(IN_FRONT) - 1) // BLOCK_SIZE * BLOCK_SIZE
    other = rows.clone()
    other[-1, -1] += 1
    extra_ids = {"prompt_table_extra_ids": np.array([[5] * NUM_ROWS + [0] * len(PROMPT)], dtype=np.uint64)}
    none: dict[str, Any] = {}
    cases = [(rows, none, num_cached), (other, none, 0), (other, none, num_cached), (rows, extra_ids, num_cached)]
    for each, more, hit in cases:
        before = server.num_cached_tokens()
        found = server.answer(inputs(each, IN_FRONT, 2, **more))
        assert found == expected_tokens(each, IN_FRONT, 2)
        assert server.num_cached_tokens() - before == hit


LONG = [(1, IN_FRONT), (2, IN_FRONT), (1, AMONG)]  # the seed of the table, and the prompt


@pytest.fixture(scope="module")
def long_answers() -> list[list[int]]:
    return [expected_tokens(table(seed), token_ids, NUM_LONG_TOKENS) for seed, token_ids in LONG]


@pytest.mark.parametrize(
    "roles", [("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker")], ids=" and ".join
)
def test_streams_with_tables_survive_kills(
    server: Server, long_answers: list[list[int]], roles: tuple[str, ...]
) -> None:
    was_killed = False
    for _ in range(MAX_ATTEMPTS):
        sent = [(table(seed), token_ids) for seed, token_ids in LONG]
        begun = [threading.Event() for _ in sent]
        with ThreadPoolExecutor(len(sent)) as pool:
            futures = [
                pool.submit(server.stream, inputs(rows, token_ids, NUM_LONG_TOKENS), event.set)
                for (rows, token_ids), event in zip(sent, begun, strict=True)
            ]
            for event in begun:
                assert event.wait(REQUEST_TIMEOUT_S)
            if was_killed := not any(future.done() for future in futures):
                server.cluster.kill(*roles)
            assert [future.result() for future in futures] == long_answers
        if was_killed:
            break
    assert was_killed, "each time a stream had ended before the kill"
    server.cluster.wait_idle()
