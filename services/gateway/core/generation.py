"""The life of a request: submit it, turn its tokens into text, cut it at a stop string, finish it, close it.

It runs in the task that answers the client, so a slow client delays no other: tokens that arrive meanwhile wait in the
journal and are sent in one chunk.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import structlog

from services.gateway.access.admission import Ticket
from services.gateway.core.chunks import NO_REPORTS, Chunk, Completion, Finish, Prompt, Timings
from services.gateway.core.parsed_text import ParsedText
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import FinishReason, JournalEntry, UpdateQueue
from services.gateway.link.stepwise import TurnQueue
from services.gateway.metrics.gateway_metrics import EndedAnswer, GatewayMetrics
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.text.deltas import ContentDelta, Delta
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_patterns import make_stops
from services.gateway.text.tokenizer import Tokenizer
from services.rpc.spans import NoSpan, Span

access_log = structlog.get_logger(log="access")  # see `configure_logs`


class Submitter(Protocol):
    """Submits sequences to dense workers: `DensePool`."""

    def submit(self, entry: JournalEntry) -> None: ...
    def cancel(self, entry: JournalEntry) -> None: ...


class Generation:
    """All answers to one request. Call `next_chunk` until `is_finished`, or `completions`. Always call `close`.

    Construction submits the request and raises `InvalidRequest` if its request_id is in use.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        journal: Journal,
        dense: Submitter,
        metrics: GatewayMetrics,
        ticket: Ticket | None = None,
        span: Span | None = None,
    ) -> None:
        """`span` ends with the generation."""
        self.request = request
        self._ticket = ticket
        self._span = span or NoSpan()
        self._updates = TurnQueue(request.num_sequences) if request.is_stepwise else UpdateQueue(journal.turns)
        self._prompt_text = _prompt_text(request, tokenizer) if request.echo else ""
        self._entries = tuple(journal.open(request, self._updates))  # the journal removes them from its list
        self._parts = tokenizer, journal, dense, metrics
        self._made: list[_Answer] = []  # none before the first chunk is asked for
        self._is_closed = False
        self._num_running = len(self._entries)
        for entry in self._entries:
            if not entry.is_follower:
                dense.submit(entry)

    @cached_property
    def _answers(self) -> list[_Answer]:
        """Made when the request is on its way to the dense worker."""
        self._made = [_Answer(entry, self._prompt_text, *self._parts) for entry in self._entries]
        return self._made

    @property
    def request_id(self) -> str:
        return self.request.spec.request_id

    @property
    def is_finished(self) -> bool:
        """Whether `next_chunk` has returned the last chunk of every answer."""
        return self._num_running == 0

    async def next_chunk(self) -> Chunk:
        """Waits for new tokens of any answer. Raises a `TwostrokeError` if a sequence has failed."""
        assert self._answers, "they are made now, and not when the first token is here"
        while True:
            chunk = self._chunk_of(await self._updates.next())
            if chunk is not None:
                return chunk

    async def forward(
        self,
        take: Callable[[list[Chunk]], None],
        can_take: Callable[[], bool],
        take_text: Callable[[str], None] | None = None,
    ) -> None:
        """Passes chunks to `take` as soon as there are tokens, those of a step at once, without waking a task.

        Returns when the last chunk has been passed, or `can_take` is false and there are more: then call `next_chunk`.
        Raises what `next_chunk` would raise. Not for stepwise requests. With `take_text` chunks of a single answer that
        would have nothing but some text and its tokens are not made: it gets the text.
        """
        assert not self.request.is_stepwise, "the answers to a stepwise request take turns"

        def take_entries(entries: list[JournalEntry]) -> bool:
            chunks: list[Chunk] = []
            try:
                for entry in entries:
                    chunk = self._chunk_of(entry)
                    if chunk is not None:
                        chunks.append(chunk)
            finally:
                if chunks:
                    take(chunks)
            return self._num_running > 0

        if self.is_finished:
            return
        answer = self._answers[0]
        if take_text is not None and answer.is_plain and len(self._answers) == 1:
            await self._updates.forward(answer.text_passer(take_text, take, take_entries), can_take)
        else:
            await self._updates.forward(take_entries, can_take)

    def _chunk_of(self, entry: JournalEntry) -> Chunk | None:
        """The chunk with an entry's new tokens; None if its answer has ended before."""
        answer = self._answers[entry.index]
        if answer.finish is not None:
            return None  # the answer ended at a stop string; these tokens come after it
        chunk = answer.next_chunk()
        if chunk.finish is not None:
            self._updates.leave(entry)
            self._num_running -= 1
            if self.is_finished:
                self._end()
        return chunk

    async def completions(self) -> tuple[list[Completion], Prompt | None]:
        """The `n` answers, by index; with `best_of` those with the highest mean log-probability per token.

        The answers of a beam search come in the order of their scores.
        """
        completions = [Completion(index) for index in range(len(self._answers))]
        prompt = None
        while not self.is_finished:
            chunk = await self.next_chunk()
            completions[chunk.index].append(chunk)
            prompt = prompt or chunk.prompt
        if self.request.num_sequences > self.request.n:
            completions.sort(key=lambda each: self._answers[each.index].mean_logprob, reverse=True)
            completions = [replace(each, index=i) for i, each in enumerate(completions[: self.request.n])]
        return completions, prompt

    def abort(self) -> None:
        """Ends the answers as they are."""
        _, _, dense, _ = self._parts
        for entry in self._entries:
            if not entry.is_ended:
                dense.cancel(entry)
                entry.finish(FinishReason.ABORT)

    def close(self) -> None:
        """Forgets the request and stops its running sequences. Does nothing the second time."""
        for answer in self._made:
            answer.close()
        if not self._made and not self._is_closed:
            _, journal, dense, metrics = self._parts
            for entry in self._entries:
                _close(entry, journal, dense, metrics)
        self._is_closed = True
        self._end()
        if self._ticket is not None:
            self._ticket.close()

    def _end(self) -> None:
        if self._ticket is not None:  # before the client sees the end, for its next request
            self._ticket.end(sum(len(entry.output_token_ids) for entry in self._entries))
        self._span.end(
            next((str(entry.error) for entry in self._entries if entry.error is not None), None),
            request_id=self.request_id,
            num_answers=len(self._entries),
            num_prompt_tokens=len(self.request.spec.prompt_token_ids),
            num_output_tokens=sum(answer.num_output_tokens for answer in self._made),
        )


class _Answer:
    """One sequence of a request; turns its tokens into text."""

    __slots__ = (
        "_dense",
        "_is_closed",
        "_journal",
        "_last_chunk_at",
        "_lead",
        "_metrics",
        "_own_logprobs",
        "_parsed",
        "_text",
        "append_plain",
        "entry",
        "finish",
        "is_plain",
        "num_output_tokens",
    )

    def __init__(
        self,
        entry: JournalEntry,
        prompt_text: str,
        tokenizer: Tokenizer,
        journal: Journal,
        dense: Submitter,
        metrics: GatewayMetrics,
    ) -> None:
        self.entry = entry
        self.finish: Finish | None = None
        self._journal = journal
        self._dense = dense
        self._metrics = metrics
        self._last_chunk_at: float | None = None  # time of the last chunk with tokens
        self._text = _TextBuilder(entry.request, tokenizer)
        self.append_plain = self._text.append_plain
        self._parsed: ParsedText | None = None  # in place of `_text`, if content, reasoning and calls are told apart
        if entry.request.parsing is not None:
            self._parsed = ParsedText(entry.request, entry.request.parsing, tokenizer)
        self._lead = prompt_text  # precedes the first text
        self.num_output_tokens = 0  # returned in chunks so far
        self._own_logprobs = array("f")  # of these tokens, if requested
        self._is_closed = False
        request = entry.request
        # Whether a chunk that is not the last one has nothing but text and tokens.
        self.is_plain = not (
            prompt_text
            or entry.records
            or request.stop
            or request.stop_regex
            or request.is_stepwise
            or request.returns_prompt
            or request.parsing is not None
            or request.num_logprobs is not None
        )

    def next_chunk(self) -> Chunk:
        """A chunk with the entry's new tokens. Raises the error that ended the entry."""
        entry, request = self.entry, self.entry.request
        if self.is_plain and not entry.is_ended:
            token_ids = entry.take_plain_tokens()
            self.num_output_tokens += len(token_ids)
            self._measure(len(token_ids))
            return self._plain_chunk(self.append_plain(token_ids), token_ids)
        is_first = self.num_output_tokens == 0
        token_ids, logprobs, reason = entry.take_new_tokens()
        stop_token_id = None
        if reason is FinishReason.STOP and token_ids[-1] in request.spec.stop_token_ids:
            stop_token_id = token_ids[-1]  # otherwise the grammar of the output is complete
        text_token_ids = token_ids if stop_token_id is None else token_ids[:-1]  # without the stop token
        deltas: list[Delta] = []
        if self._parsed is None:
            text, num_tokens, stop_string = self._text.append(text_token_ids, is_last=reason is not None)
            is_cut = stop_string is not None
        else:
            is_limit = reason is not None and reason is not FinishReason.STOP
            piece = self._parsed.append(text_token_ids, reason is not None, is_limit)
            deltas, text, num_tokens, stop_string = piece.deltas, piece.text, piece.num_tokens, piece.stop_string
            is_cut = piece.is_cut
        if is_cut:
            reason, stop_token_id = FinishReason.STOP, None
            token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
        self._own_logprobs.extend(logprobs.own)
        self.num_output_tokens += len(token_ids)
        if token_ids:
            self._measure(len(token_ids))
        if self._lead:
            text = self._lead + text
            if self._parsed is not None:
                deltas.insert(0, ContentDelta(self._lead))
            self._lead = ""
        if reason is not None:
            self.finish = Finish(
                reason=reason,
                stop_string=stop_string,
                stop_token_id=stop_token_id,
                num_prompt_tokens=request.num_source_tokens + len(request.spec.prompt_token_ids),
                num_cached_tokens=entry.num_cached_tokens,
                num_output_tokens=self.num_output_tokens,
                seed=entry.spec.sampling.seed,
                timings=_timings(entry, self.num_output_tokens),
                num_reasoning_tokens=None if self._parsed is None else self._parsed.num_reasoning_tokens,
                num_calls=0 if self._parsed is None else self._parsed.num_calls,
                beam_score=entry.beam_score,
            )
            self.close()
        prompt = None
        if is_first and (token_ids or reason is not None) and not entry.index and request.returns_prompt:
            reports = entry.take_reports(0, is_last=False, with_prompt=True)
            prompt = Prompt(request.spec.prompt_token_ids, reports)
        return Chunk(
            entry.index,
            text,
            token_ids,
            None if request.num_logprobs is None else logprobs,
            self.num_output_tokens,
            self.finish,
            prompt,
            deltas,
            entry.take_reports(len(token_ids), is_last=reason is not None) if entry.records else NO_REPORTS,
            entry.num_cached_tokens,
        )

    def text_passer(
        self,
        take_text: Callable[[str], None],
        take: Callable[[list[Chunk]], None],
        take_entries: Callable[[list[JournalEntry]], bool],
    ) -> Callable[[list[JournalEntry]], bool]:
        """A function that passes the new texts of a plain answer on, the only one to its request.

        It runs for every token, and the objects of other streams have displaced this one's from the processor's caches:
        so it reads few objects and calls little. `take` gets a chunk whose tokens complete no text, `take_entries` the
        entry when it has ended.
        """
        entry, append, take_tokens = self.entry, self.append_plain, self.entry.take_plain_tokens
        on_more_tokens, monotonic = self._metrics.on_more_tokens, time.monotonic

        def pass_text(entries: list[JournalEntry]) -> bool:
            """Returns whether more will come."""
            if entry.finish_reason is not None or entry.error is not None:  # `is_ended`, without a call
                return take_entries(entries)
            token_ids = take_tokens()
            self.num_output_tokens += len(token_ids)
            if self._last_chunk_at is None:
                self._measure(len(token_ids))
            else:
                now = monotonic()
                on_more_tokens(len(token_ids), now - self._last_chunk_at)
                self._last_chunk_at = now
            if text := append(token_ids):
                take_text(text)
            else:
                take([self._plain_chunk(text, token_ids)])
            return True

        return pass_text

    def _plain_chunk(self, text: str, token_ids: list[int]) -> Chunk:
        entry = self.entry
        return Chunk(
            entry.index, text, token_ids, None, self.num_output_tokens, None, None,
            num_cached_tokens=entry.num_cached_tokens,
        )  # fmt: skip

    def close(self) -> None:
        """Cancels the sequence if it still runs, and removes it from the journal. Does nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        _close(self.entry, self._journal, self._dense, self._metrics, self.finish, self.num_output_tokens)

    def _measure(self, num_tokens: int) -> None:
        now = time.monotonic()
        if self._last_chunk_at is None:
            self._metrics.on_first_tokens(num_tokens, now - self.entry.arrival)
        else:
            self._metrics.on_more_tokens(num_tokens, now - self._last_chunk_at)
        self._last_chunk_at = now

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the returned tokens; minus infinity if there are none."""
        values = self._own_logprobs
        return math.fsum(values) / len(values) if values else -math.inf


def _timings(entry: JournalEntry, num_output_tokens: int) -> Timings:
    num_gaps = num_output_tokens - 1
    first_token_s = per_token_s = None
    if entry.first_token_at is not None and entry.last_token_at is not None:
        first_token_s = entry.first_token_at - entry.arrival
        if num_gaps > 0:
            per_token_s = (entry.last_token_at - entry.first_token_at) / num_gaps
    return Timings(entry.queue_s, first_token_s, per_token_s, time.monotonic() - entry.arrival)


def _close(
    entry: JournalEntry,
    journal: Journal,
    dense: Submitter,
    metrics: GatewayMetrics,
    finish: Finish | None = None,
    num_output_tokens: int = 0,
) -> None:
    """Cancels a sequence if it still runs, removes it from the journal, and reports the end of its answer.

    `finish`: of a complete answer; `num_output_tokens`: those that it has returned.
    """
    if not entry.is_ended:
        dense.cancel(entry)
    journal.close(entry)
    timings = _timings(entry, num_output_tokens)
    end = "cancelled" if entry.error is None else "error"
    if finish is not None:
        end = finish.reason.value
    num_prompt_tokens = len(entry.spec.prompt_token_ids)
    metrics.on_end(
        EndedAnswer(
            end,
            num_prompt_tokens,
            entry.num_cached_tokens,
            num_output_tokens,
            timings.total_s,
            timings.queue_s,
            timings.first_token_s,
            timings.per_token_s,
        )
    )
    if entry.error is not None and not entry.output_token_ids:
        metrics.on_rejected(entry.error)
    access_log.info(
        "request ended",
        request_id=entry.spec.request_id,
        seq_id=f"{entry.seq_id:x}",
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=entry.num_cached_tokens,
        num_output_tokens=num_output_tokens,
        reason=end,
        ttft_ms=None if timings.first_token_s is None else round(1e3 * timings.first_token_s, 1),
        duration_ms=round(1e3 * timings.total_s, 1),
        **({"user": entry.request.user} if entry.request.user else {}),
        **({"caller": entry.request.caller} if entry.request.caller else {}),
        **({} if entry.error is None else {"error": str(entry.error)}),
    )


def _prompt_text(request: GenerationRequest, tokenizer: Tokenizer) -> str:
    if request.prompt_text is not None:
        return request.prompt_text
    return tokenizer.decode(request.text_token_ids, request.skip_special_tokens)


class _TextBuilder:
    """Turns the tokens of one answer into its text: whole characters, up to the first stop string."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(
            tokenizer.hf_tokenizer, request.text_token_ids, request.skip_special_tokens
        )
        # Most requests have none, and do not pay for them.
        self._stops = make_stops(request.stop, request.stop_regex, request.include_stop_str_in_output)
        self._num_early = request.spec.sampling.min_tokens  # tokens to come that no stop string ends
        self.append_plain = self._detokenizer.append  # new text, where there are no stop strings and it is not the last

    def append(self, token_ids: list[int], is_last: bool) -> tuple[str, int, str | None]:
        """New text, how many of `token_ids` it took, and the stop string that ended it, if one did."""
        if self._stops is None:
            text = self._detokenizer.append(token_ids)
            return text + self._detokenizer.flush() if is_last else text, len(token_ids), None
        pieces = []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            text, stop_string = self._detokenizer.append([token_id]), None
            if self._num_early:
                self._num_early -= 1
            else:
                text, stop_string = self._stops.feed(text)
            pieces.append(text)
            if stop_string is not None:
                return "".join(pieces), num_tokens, stop_string
        stop_string = None
        if is_last:
            text, stop_string = self._stops.feed(self._detokenizer.flush())
            pieces.append(text)
            if stop_string is None:
                pieces.append(self._stops.flush())
        return "".join(pieces), len(token_ids), stop_string
