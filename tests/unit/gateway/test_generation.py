"""Tokens to chunks, for tokens that come several at a time or end within a character."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.common.config import EMBEDDED_MODEL
from services.common.errors import CapacityError
from services.common.sampling_params import SamplingParams
from services.gateway.generation import Chunk, Generation
from services.gateway.journal import FinishReason, Journal, JournalEntry
from services.gateway.tokenizer import load_tokenizer
from tests.generation_requests import make_request

TOKENIZER = load_tokenizer(EMBEDDED_MODEL)
REFERENCE = TOKENIZER.hf_tokenizer


class RecordingDense:
    """Stands in for `DenseClient`: the test itself feeds the submitted entry."""

    def __init__(self) -> None:
        self.submitted: list[JournalEntry] = []
        self.cancelled: list[JournalEntry] = []

    def submit(self, entry: JournalEntry) -> None:
        self.submitted.append(entry)

    def cancel(self, entry: JournalEntry) -> None:
        self.cancelled.append(entry)


def ids(text: str) -> list[int]:
    return REFERENCE(text, add_special_tokens=False)["input_ids"]


def begin(**fields: Any) -> tuple[Generation, JournalEntry, RecordingDense, Journal]:
    dense, journal = RecordingDense(), Journal()
    request = make_request(**{"sampling": SamplingParams(seed=9), "max_tokens": 1000, **fields})
    generation = Generation(request, TOKENIZER, journal, dense)
    return generation, dense.submitted[0], dense, journal


def feed(entry: JournalEntry, token_ids: list[int], reason: FinishReason | None = None) -> None:
    for token_id in token_ids:
        entry.append(token_id, 0.0)
    if reason is not None:
        entry.finish(reason)


def next_chunk(generation: Generation) -> Chunk:
    return asyncio.run(generation.next_chunk())


def test_a_stop_string_within_waiting_tokens_cuts_tokens_and_text() -> None:
    generation, entry, dense, journal = begin(stop=("three",))
    before, stop, after = ids("one two"), ids(" three"), ids(" four five")
    feed(entry, before + stop + after)
    chunk = next_chunk(generation)
    assert chunk.text == "one two "
    assert chunk.token_ids == before + stop
    assert chunk.finish is not None
    assert chunk.finish.num_output_tokens == len(before + stop)
    assert (chunk.finish.reason, chunk.finish.stop_string) == (FinishReason.STOP, "three")
    assert dense.cancelled == [entry]
    assert len(journal) == 0


def test_a_stop_string_wins_over_a_later_end() -> None:
    generation, entry, dense, _ = begin(stop=("two",), stop_token_ids=(2,))
    feed(entry, [*ids("one two three"), 2], FinishReason.STOP)
    finish = next_chunk(generation).finish
    assert finish is not None
    assert (finish.stop_string, finish.stop_token_id) == ("two", None)
    assert dense.cancelled == []  # it has ended already


@pytest.mark.parametrize("stop", [(), ("absent",)])
def test_an_answer_cut_within_a_character_ends_as_it_decodes(stop: tuple[str, ...]) -> None:
    cut = next(token_ids[:-1] for token_ids in map(ids, "🙂龘ⵣ") if len(token_ids) > 1)
    token_ids = [*ids("Hi "), *cut]
    generation, entry, _, _ = begin(stop=stop)
    feed(entry, token_ids)
    first = next_chunk(generation)
    entry.finish(FinishReason.LENGTH)
    last = next_chunk(generation)
    assert "\ufffd" not in first.text
    assert last.token_ids == []
    assert first.text + last.text == REFERENCE.decode(token_ids, clean_up_tokenization_spaces=False)


def test_one_line_is_logged_for_each_end() -> None:
    with capture_logs() as events:
        generation, entry, _, _ = begin()
        feed(entry, ids("Hi"), FinishReason.LENGTH)
        next_chunk(generation)
        generation.close()

        generation, entry, _, _ = begin()
        generation.close()

        generation, entry, _, _ = begin()
        entry.fail(CapacityError("too long"))
        with pytest.raises(CapacityError):
            next_chunk(generation)
        generation.close()
    assert [event["reason"] for event in events] == ["length", "cancelled", "error"]
    assert [event["num_output_tokens"] for event in events] == [len(ids("Hi")), 0, 0]
    assert events[2]["error"] == "too long"
    assert all(event["request_id"] == "r" for event in events)
