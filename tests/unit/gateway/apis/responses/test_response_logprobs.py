"""A response with log-probabilities keeps them in arrays, as the budget of memory counts them."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic_core import from_json

from services.common.config import EMBEDDED_MODEL
from services.common.token_logprobs import LogprobRows
from services.gateway.apis.responses.format import ResponsesFormat
from services.gateway.apis.responses.schema import ResponsesRequest
from services.gateway.core.chunks import Chunk, Completion, Finish
from services.gateway.core.request_service import BYTES_PER_LOGPROB
from services.gateway.http.json_pieces import json_pieces
from services.gateway.link.journal_entry import FinishReason, Timings
from services.gateway.text.tokenizer import Tokenizer, load_tokenizer
from services.pb import sampling_pb2

NUM_TOKENS, NUM_TOP = 400, 20
FINISH = Finish(FinishReason.LENGTH, None, None, 1, 0, NUM_TOKENS, 0, Timings(None, None, None, 0.0))


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    yield tokenizer
    tokenizer.close()


def format_of(tokenizer: Tokenizer, *, stream: bool) -> ResponsesFormat:
    body = ResponsesRequest.model_validate(
        {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": NUM_TOP, "stream": stream}
    )
    names, local_model = SimpleNamespace(first="model"), SimpleNamespace(sampling_defaults={})
    service: Any = SimpleNamespace(tokenizer=tokenizer, names=names, local_model=local_model)
    return ResponsesFormat(service, body, "id", {})


def rows_of(first: int, count: int) -> LogprobRows:
    rows = LogprobRows()
    for i in range(first, first + count):
        top = [(100 + (i * NUM_TOP + j) % 800, -0.5 * j) for j in range(NUM_TOP)]
        rows.append(
            sampling_pb2.TokenLogprobs(
                logprob=-i / 8, top_token_ids=[each for each, _ in top], top_logprobs=[each for _, each in top]
            )
        )
    return rows


def encoded(objects: Sequence[Any]) -> list[Any]:
    """What a client reads."""
    return [from_json(b"".join(json_pieces(each))) for each in objects]


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_kept_of_each_value_is_what_the_budget_counts(tokenizer: Tokenizer, stream: bool) -> None:
    answer_format = format_of(tokenizer, stream=stream)
    rows, token_ids = rows_of(0, NUM_TOKENS), [100 + i for i in range(NUM_TOKENS)]
    tracemalloc.start()
    try:
        if stream:
            for i in range(NUM_TOKENS):
                finish = FINISH if i == NUM_TOKENS - 1 else None
                chunk = Chunk(0, "a", token_ids[i : i + 1], rows[i : i + 1], i + 1, finish, None)
                answer_format.chunk(0, chunk)
            end: Any = answer_format.closing()
        else:
            completion = Completion(0, "a" * NUM_TOKENS, token_ids, rows, FINISH)
            end = answer_format.whole([([completion], None)])
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 2 * BYTES_PER_LOGPROB * NUM_TOKENS * (1 + NUM_TOP), "as objects they take twenty times as much"
    assert end


def test_each_object_of_a_stream_has_its_log_probabilities(tokenizer: Tokenizer) -> None:
    """A piece of the text has those of its tokens, and of tokens before it without text; the last objects have all."""
    answer_format, rows = format_of(tokenizer, stream=True), rows_of(0, 4)
    texts, events = ["", "ab", "c", ""], list[Any]()
    for i, text in enumerate(texts):
        chunk = Chunk(0, text, [200 + i], rows[i : i + 1], i + 1, FINISH if i == 3 else None, None)
        events += encoded(answer_format.chunk(0, chunk))
    events += encoded(answer_format.closing())

    def values(logprobs: Sequence[Any]) -> list[float]:
        assert all(len(each["top_logprobs"]) == NUM_TOP for each in logprobs)
        return [each["logprob"] for each in logprobs]

    own = [-i / 8 for i in range(4)]
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [values(each["logprobs"]) for each in deltas] == [own[:2], own[2:3]]
    of_type = {each["type"]: each for each in events}
    for part in (
        of_type["response.output_text.done"],
        of_type["response.content_part.done"]["part"],
        of_type["response.output_item.done"]["item"]["content"][0],
        of_type["response.incomplete"]["response"]["output"][0]["content"][0],
    ):
        assert values(part["logprobs"]) == own
