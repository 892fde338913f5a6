"""`Generation` makes chunks of tokens, also when several tokens arrive together or end within a character."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.common.config import EMBEDDED_MODEL, GatewaySection
from services.common.errors import CapacityError
from services.common.sampling_params import SamplingParams
from services.common.token_logprobs import TokenLogprobs, encode_logprobs
from services.gateway.apis.shared.generations import Generations
from services.gateway.core.chunks import Chunk, Prompt
from services.gateway.core.generation import Generation
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import FinishReason, JournalEntry
from services.gateway.metrics.gateway_metrics import GatewayMetrics
from services.gateway.resources.heavy_work import HeavyWork
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.parsing import Parsing
from services.gateway.text.reasoning.think_tags import Beginning
from services.gateway.text.tokenizer import load_tokenizer
from services.gateway.text.tools.tool import NO_TOOLS
from services.pb import gateway_pb2
from tests.support.clients.generation_requests import make_generation, make_request
from tests.support.reports import prompt_logprobs, write_prompt_logprobs

TOKENIZER = load_tokenizer(EMBEDDED_MODEL)
REFERENCE = TOKENIZER.hf_tokenizer


class RecordingDense:
    """Replaces `DenseClient`. The test itself gives tokens to the submitted entry."""

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
    generation = make_generation(request, TOKENIZER, journal, dense, GatewayMetrics(CollectorRegistry()))
    return generation, dense.submitted[0], dense, journal


def feed(entry: JournalEntry, token_ids: list[int], reason: FinishReason | None = None) -> None:
    for token_id in token_ids:
        entry.append(token_id, 0.0)
    if reason is not None:
        entry.finish(reason)


def next_chunk(generation: Generation) -> Chunk:
    return asyncio.run(generation.next_chunk())


def test_tokens_and_text_after_a_stop_string_are_dropped() -> None:
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
    assert dense.cancelled == []  # not needed: it has already ended


@pytest.mark.parametrize("is_parsed", [False, True])
def test_no_stop_string_ends_an_answer_before_min_tokens(is_parsed: bool) -> None:
    early, late = ids("one two three"), ids(" four two five")
    parsing = Parsing(None, NO_TOOLS, Beginning.CONTENT) if is_parsed else None
    sampling = SamplingParams(seed=9, min_tokens=len(early))
    generation, entry, _, _ = begin(stop=("two",), sampling=sampling, parsing=parsing)
    feed(entry, early + late)
    chunk = next_chunk(generation)
    assert chunk.text == "one two three four "
    assert chunk.finish is not None and chunk.finish.stop_string == "two"
    assert len(early) < chunk.finish.num_output_tokens < len(early + late)


@pytest.mark.parametrize("stop", [(), ("absent",)])
def test_an_answer_that_ends_within_a_character_equals_its_decoded_tokens(stop: tuple[str, ...]) -> None:
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


def test_each_end_of_a_request_is_logged_in_one_line() -> None:
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


def begin_many(**fields: Any) -> tuple[Generation, RecordingDense, Journal]:
    dense, journal = RecordingDense(), Journal()
    request = make_request(**{"sampling": SamplingParams(seed=2**64 - 1), "max_tokens": 1000, **fields})
    return make_generation(request, TOKENIZER, journal, dense, GatewayMetrics(CollectorRegistry())), dense, journal


def feed_logprobs(entry: JournalEntry, text: str, logprob: float) -> None:
    for token_id in ids(text):
        entry.logprobs.append(encode_logprobs(TokenLogprobs(logprob, ((token_id, logprob),))))
        entry.append(token_id, 0.0)
    entry.finish(FinishReason.LENGTH)


def test_each_answer_has_its_own_seed_and_text() -> None:
    generation, dense, journal = begin_many(n=3, best_of=3)
    assert [entry.spec.sampling.seed for entry in dense.submitted] == [2**64 - 1, 0, 1]
    for entry, text in zip(dense.submitted, ("one", "two", "three"), strict=True):
        feed(entry, ids(text), FinishReason.LENGTH)
    completions, prompt = asyncio.run(generation.completions())
    assert [(each.index, each.text) for each in completions] == [(0, "one"), (1, "two"), (2, "three")]
    assert generation.is_finished
    assert (prompt, len(journal)) == (None, 0)


def test_chunks_of_several_answers_have_the_order_of_their_tokens() -> None:
    generation, dense, _ = begin_many(n=2, best_of=2)
    first, second = dense.submitted
    seen = []
    for entry, text in [(second, "b"), (first, "a"), (second, "d")]:
        feed(entry, ids(text))
        chunk = next_chunk(generation)
        seen.append((chunk.index, chunk.text))
    assert seen == [(1, "b"), (0, "a"), (1, "d")]
    generation.close()
    assert dense.cancelled == [first, second]


def test_the_best_answers_have_the_highest_mean_log_probability() -> None:
    generation, dense, _ = begin_many(n=2, best_of=3)
    for entry, text, logprob in zip(
        dense.submitted, ("unlikely", "best of them all", "good"), (-3.0, -0.5, -0.7), strict=True
    ):
        feed_logprobs(entry, text, logprob)
    completions, _ = asyncio.run(generation.completions())
    assert [(each.index, each.text) for each in completions] == [(0, "best of them all"), (1, "good")]


def test_log_probabilities_after_a_stop_string_are_dropped() -> None:
    generation, dense, _ = begin_many(stop=("three",), num_logprobs=1)
    feed_logprobs(dense.submitted[0], "one two three four", -1.0)
    chunk = next_chunk(generation)
    assert chunk.logprobs is not None
    assert [value.top[0][0] for value in chunk.logprobs] == chunk.token_ids == ids("one two three")


def test_every_answer_begins_with_the_echoed_prompt() -> None:
    prompt_token_ids = ids("The capital")
    options = {"prompt_token_ids": prompt_token_ids, "echo": True, "features": prompt_logprobs(0), "n": 2, "best_of": 2}
    generation, dense, _ = begin_many(**options)
    first, second = dense.submitted
    values = [TokenLogprobs(-float(i), ()) for i in range(1, len(prompt_token_ids))]
    assert first.spec.features == prompt_logprobs(0) and first.records["prompt_logprobs"].num_reported == 1
    assert not second.spec.features, "they are the same for all answers; only the first requests them"
    rows = write_prompt_logprobs(values)
    first.keep_report("prompt_logprobs", 1, 1, rows[:1].tobytes())
    first.keep_report("prompt_logprobs", 1, len(rows), rows.tobytes())  # a second time, after a worker died
    assert first.records["prompt_logprobs"].num_reported == len(prompt_token_ids)
    for entry, text in ((first, " of France"), (second, " of Peru")):
        feed(entry, ids(text), FinishReason.LENGTH)
    completions, prompt = asyncio.run(generation.completions())
    assert [each.text for each in completions] == ["The capital of France", "The capital of Peru"]
    assert prompt == Prompt(prompt_token_ids, {"prompt_logprobs": values})


def test_an_error_of_one_answer_ends_the_request() -> None:
    generation, dense, journal = begin_many(n=2, best_of=2)
    dense.submitted[1].fail(CapacityError("too long"))
    with pytest.raises(CapacityError):
        next_chunk(generation)
    generation.close()
    assert dense.cancelled == [dense.submitted[0]]
    assert len(journal) == 0


def test_timings_follow_the_tokens() -> None:
    generation, dense, _ = begin_many()
    entry = dense.submitted[0]
    entry.start(queue_s=0.25, num_cached_tokens=0)
    for i, token_id in enumerate(ids("one two three")):
        entry.append(token_id, entry.arrival + 1.0 + 0.5 * i)
    entry.finish(FinishReason.LENGTH)
    finish = next_chunk(generation).finish
    assert finish is not None
    assert finish.timings.queue_s == 0.25
    assert finish.timings.first_token_s == pytest.approx(1.0)
    assert finish.timings.per_token_s == pytest.approx(0.5)


async def turns_of_the_loop() -> None:
    """Lets everything run that is due, and what that makes due."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_forwarded_chunks_have_all_that_came_together_and_go_on_to_the_last() -> None:
    async def test() -> tuple[list[Chunk], int]:
        generation, entry, _, _ = begin()
        first, last = ids(" one"), ids(" two three")
        chunks: list[Chunk] = []
        task = asyncio.ensure_future(generation.forward(chunks.extend, lambda: True))
        await turns_of_the_loop()
        feed(entry, first)
        await turns_of_the_loop()
        num_first = len(chunks)
        feed(entry, last, FinishReason.LENGTH)
        await asyncio.wait_for(task, 10)
        return chunks, num_first

    chunks, num_first = asyncio.run(test())
    assert num_first == 1, "the first tokens did not wait for the last ones"
    assert [chunk.token_ids for chunk in chunks] == [ids(" one"), ids(" two three")]
    assert "".join(chunk.text for chunk in chunks) == " one two three"
    assert [chunk.finish is None for chunk in chunks] == [True, False]


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_texts_alone_are_forwarded_where_chunks_would_have_nothing_else(stop: tuple[str, ...]) -> None:
    tokens = ids(" one 漢 two")
    texts_so_far = {k: REFERENCE.decode(tokens[:k]) for k in range(1, len(tokens))}
    incomplete = [k for k, text in texts_so_far.items() if text.endswith("\N{REPLACEMENT CHARACTER}")]
    assert incomplete, "some tokens complete no character"

    async def test() -> tuple[list[str], list[Chunk], int]:
        generation, entry, _, _ = begin(stop=stop)
        texts, chunks, order = list[str](), list[Chunk](), list[str]()

        def take(taken: list[Chunk]) -> None:
            chunks.extend(taken)
            order.extend(chunk.text for chunk in taken)

        def take_text(text: str) -> None:
            texts.append(text)
            order.append(text)

        task = asyncio.ensure_future(generation.forward(take, lambda: True, take_text))
        for token_id in tokens:
            await turns_of_the_loop()
            feed(entry, [token_id])
        await turns_of_the_loop()
        feed(entry, ids(" three"), FinishReason.LENGTH)
        await asyncio.wait_for(task, 10)
        assert "".join(order) == " one 漢 two three"
        return texts, chunks, chunks[-1].finish.num_output_tokens

    texts, chunks, num_tokens = asyncio.run(test())
    assert num_tokens == len(tokens) + len(ids(" three"))
    if stop:
        assert not texts, "a stop string may end it anywhere"
    else:
        assert "".join(texts) == " one 漢 two"
        assert [chunk.num_output_tokens for chunk in chunks] == [*incomplete, num_tokens]
        assert [chunk.text for chunk in chunks] == [""] * len(incomplete) + [" three"]


def test_the_chunks_of_all_answers_of_a_step_are_forwarded_together() -> None:
    async def test() -> list[list[tuple[int, str, bool]]]:
        generation, dense, _ = begin_many(n=3, best_of=3)
        together: list[list[Chunk]] = []
        task = asyncio.ensure_future(generation.forward(together.append, lambda: True))
        await turns_of_the_loop()
        one, two = ids(" one"), ids(" two")
        for entry in dense.submitted:
            feed(entry, one)
        await turns_of_the_loop()
        feed(dense.submitted[2], two)
        feed(dense.submitted[0], two, FinishReason.LENGTH)
        await turns_of_the_loop()
        for entry in dense.submitted[1:]:
            feed(entry, [], FinishReason.LENGTH)
        await asyncio.wait_for(task, 10)
        return [[(chunk.index, chunk.text, chunk.finish is not None) for chunk in chunks] for chunks in together]

    assert asyncio.run(test()) == [
        [(0, " one", False), (1, " one", False), (2, " one", False)],
        [(2, " two", False), (0, " two", True)],
        [(1, "", True), (2, "", True)],
    ]


def test_chunks_before_an_error_of_another_answer_are_forwarded() -> None:
    async def test() -> list[Chunk]:
        generation, dense, _ = begin_many(n=2, best_of=2)
        taken: list[Chunk] = []
        task = asyncio.ensure_future(generation.forward(taken.extend, lambda: True))
        await turns_of_the_loop()
        feed(dense.submitted[0], ids(" one"))
        dense.submitted[1].fail(CapacityError("the worker has no place"))
        with pytest.raises(CapacityError, match="the worker has"):
            await asyncio.wait_for(task, 10)
        return taken

    assert [(chunk.index, chunk.text) for chunk in asyncio.run(test())] == [(0, " one")]


def test_nothing_is_forwarded_while_it_cannot_be_taken_and_all_of_it_stays() -> None:
    async def test() -> tuple[list[Chunk], Chunk]:
        generation, entry, _, _ = begin()
        taken: list[Chunk] = []
        task = asyncio.ensure_future(generation.forward(taken.extend, lambda: not taken))
        await turns_of_the_loop()
        feed(entry, ids(" one"))
        await turns_of_the_loop()
        feed(entry, ids(" two"))
        await asyncio.wait_for(task, 10)
        feed(entry, ids(" three"))
        await turns_of_the_loop()
        return taken, await generation.next_chunk()

    taken, rest = asyncio.run(test())
    assert [chunk.text for chunk in taken] == [" one"]
    assert rest.text == " two three"


@pytest.mark.parametrize("is_of_worker", [True, False])
def test_an_error_of_a_sequence_or_of_the_taker_ends_forwarding(is_of_worker: bool) -> None:
    def refuse(chunks: list[Chunk]) -> None:
        raise CapacityError("the taker has no place")

    async def test() -> None:
        generation, entry, _, _ = begin()
        task = asyncio.ensure_future(generation.forward(refuse, lambda: True))
        await turns_of_the_loop()
        if is_of_worker:
            entry.fail(CapacityError("the worker has no place"))
        else:
            feed(entry, ids(" one"))
        await asyncio.wait_for(task, 10)

    with pytest.raises(CapacityError, match="the worker has" if is_of_worker else "the taker has"):
        asyncio.run(test())


def test_a_cancelled_handler_gets_no_more_chunks() -> None:
    async def test() -> list[Chunk]:
        generation, entry, _, _ = begin()
        taken: list[Chunk] = []
        task = asyncio.ensure_future(generation.forward(taken.extend, lambda: True))
        await turns_of_the_loop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        feed(entry, ids(" one"))
        await turns_of_the_loop()
        return taken

    assert asyncio.run(test()) == []


def test_answers_of_which_nobody_has_read_are_not_made_to_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[object]()

    def make(*given: Any) -> Detokenizer:
        made.append(given)
        return Detokenizer(*given)

    monkeypatch.setattr("services.gateway.core.answer_text.Detokenizer", make)
    for read in (False, True):
        generation, dense, journal = begin_many(n=3, best_of=3)
        if read:
            feed(dense.submitted[0], ids("Hi"))
            next_chunk(generation)
        with capture_logs() as events:
            generation.close()
            generation.close()
        assert len(made) == 3 * read
        assert (dense.cancelled, len(journal)) == (dense.submitted, 0)
        assert [event["reason"] for event in events] == ["cancelled"] * 3


def test_an_aborted_request_of_which_nobody_has_read_ends_as_it_is() -> None:
    generation, dense, journal = begin_many(n=2, best_of=2)
    generation.abort()
    assert dense.cancelled == dense.submitted
    completions, _ = asyncio.run(generation.completions())
    assert [each.finish and each.finish.reason for each in completions] == [FinishReason.ABORT] * 2
    assert len(journal) == 0


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_prompts_of_requests_are_closed_in_one_iteration_of_the_loop_each(is_cancelled: bool) -> None:
    async def test() -> None:
        work, journals = HeavyWork(), list[Journal]()
        requests = [Generations(Mock(heavy_work=work)) for _ in range(3)]
        for each in requests:
            for _ in range(4):
                generation, _, journal = begin_many(n=2, best_of=2)
                each.running.append(generation)
                journals.append(journal)

        def num_open() -> int:
            return sum(map(len, journals))

        counts, closing = [num_open()], [asyncio.ensure_future(each.close()) for each in requests]
        while not all(each.done() for each in closing):
            await asyncio.sleep(0)
            counts.append(num_open())
            if is_cancelled and counts[-1] == 18:
                for each in closing:
                    each.cancel()
        assert num_open() == 0
        if not is_cancelled:
            assert max(before - after for before, after in itertools.pairwise(counts)) == 2, counts
        await asyncio.gather(*closing, return_exceptions=True)
        work.close()

    asyncio.run(test())


def test_the_further_prompts_of_requests_are_started_in_one_iteration_of_the_loop_each() -> None:
    """The first ones are those of requests that wait for their beginnings."""

    async def test() -> None:
        work, iteration, started_in = HeavyWork(), 0, list[int]()
        messages = [gateway_pb2.GenerateRequest() for _ in range(6)]

        async def start(*_: object, **__: object) -> Any:
            started_in.append(iteration)
            return Mock(request=Mock(max_num_logprobs=0))

        section = GatewaySection(max_answers=100)
        service = Mock(heavy_work=work, section=section, reading=lambda *_: nullcontext(set()), start=start)
        service.metrics.noting_rejection = nullcontext
        service.room = lambda *_: nullcontext(lambda _: None)
        requests = [asyncio.ensure_future(Generations(service).start(messages, Mock())) for _ in range(4)]
        while not all(each.done() for each in requests):
            await asyncio.sleep(0)
            iteration += 1
        further = started_in[4:]
        assert started_in[:4] == [0] * 4
        assert len(further) == len(set(further)) == 20
        work.close()

    asyncio.run(test())
