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

import structlog

from services.gateway.access.admission import Ticket
from services.gateway.core.answer_text import answer_text
from services.gateway.core.chunks import NO_REPORTS, Chunk, Completion, Finish, Prompt
from services.gateway.link.dense_pool import DensePool
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import FinishReason, JournalEntry
from services.gateway.metrics.gateway_metrics import EndedAnswer, GatewayMetrics
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.text.deltas import ContentDelta
from services.gateway.text.tokenizer import Tokenizer
from services.rpc.spans import Span

access_log = structlog.get_logger(log="access")  # see `configure_logs`


class Generation:
    """All answers to one request. Call `next_chunk` until `is_finished`, or `completions`. Always call `close`.

    Construction submits the request and raises `InvalidRequest` if its request_id is in use.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        journal: Journal,
        dense: DensePool,
        metrics: GatewayMetrics,
        ticket: Ticket,
        span: Span,
    ) -> None:
        """`ticket` and `span` end with the generation."""
        self.request = request
        self._tokenizer, self._journal, self._dense, self._metrics = tokenizer, journal, dense, metrics
        self._ticket, self._span = ticket, span
        self._prompt_text = _prompt_text(request, tokenizer) if request.echo else ""
        self._entries = tuple(journal.open(request))  # the journal removes them from its list
        self._updates = self._entries[0].updates
        self._open = set(self._entries)  # in the journal
        self._answers: list[_Answer] = []  # none before the first chunk is asked for
        self._num_running = len(self._entries)
        for entry in self._entries:
            if not entry.is_follower:
                dense.submit(entry)

    @property
    def request_id(self) -> str:
        return self.request.spec.request_id

    @property
    def is_finished(self) -> bool:
        """Whether `next_chunk` has returned the last chunk of every answer."""
        return self._num_running == 0

    async def next_chunk(self) -> Chunk:
        """Waits for new tokens of any answer. Raises a `TwostrokeError` if a sequence has failed."""
        self._make_answers()
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
        self._make_answers()
        answer = self._answers[0]
        if take_text is not None and answer.is_plain and len(self._answers) == 1:
            await self._updates.forward(answer.text_passer(take_text, take, take_entries), can_take)
        else:
            await self._updates.forward(take_entries, can_take)

    def _make_answers(self) -> None:
        """Makes them when the request is on its way to the dense worker, and not when the first token is here."""
        if not self._answers:
            self._answers = [
                _Answer(entry, self._prompt_text, self._tokenizer, self._metrics) for entry in self._entries
            ]

    def _chunk_of(self, entry: JournalEntry) -> Chunk | None:
        """The chunk with an entry's new tokens; None if its answer has ended before."""
        answer = self._answers[entry.index]
        if answer.finish is not None:
            return None  # the answer ended at a stop string; these tokens come after it
        chunk = answer.next_chunk()
        if chunk.finish is not None:
            self._close(entry)
            self._updates.leave(entry)
            self._num_running -= 1
            if self.is_finished:
                self._end()
        return chunk

    async def completions(self) -> tuple[list[Completion], Prompt | None]:
        """The `n` answers, by index; with `best_of` those with the highest mean log-probability per token.

        The answers of a beam search come in the order of their scores.
        """
        completions = [Completion(index) for index in range(len(self._entries))]
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
        for entry in self._entries:
            if not entry.is_ended:
                self._dense.cancel(entry)
                entry.finish(FinishReason.ABORT)

    def close(self) -> None:
        """Forgets the request and stops its running sequences. Does nothing the second time."""
        for entry in self._entries:
            if entry in self._open:
                self._close(entry)
        self._end()
        self._ticket.close()

    def _end(self) -> None:
        # Before the client sees the end, for its next request.
        self._ticket.end(sum(len(entry.output_token_ids) for entry in self._entries))
        self._span.end(
            next((str(entry.error) for entry in self._entries if entry.error is not None), None),
            request_id=self.request_id,
            num_answers=len(self._entries),
            num_prompt_tokens=len(self.request.spec.prompt_token_ids),
            num_output_tokens=sum(answer.num_output_tokens for answer in self._answers),
        )

    def _close(self, entry: JournalEntry) -> None:
        """Cancels a sequence if it still runs, removes it from the journal, and reports the end of its answer."""
        self._open.remove(entry)
        if not entry.is_ended:
            self._dense.cancel(entry)
        self._journal.close(entry)
        answer = self._answers[entry.index] if self._answers else None
        num_output_tokens = 0 if answer is None else answer.num_output_tokens
        outcome = "cancelled" if entry.error is None else "error"
        if answer is not None and answer.finish is not None:
            outcome = answer.finish.reason.value
        ended = EndedAnswer(
            outcome,
            len(entry.spec.prompt_token_ids),
            entry.num_cached_tokens,
            num_output_tokens,
            entry.timings(num_output_tokens),
            entry.request.n,
            entry.request.max_tokens,
        )
        self._metrics.on_end(ended)
        if entry.error is not None and not entry.output_token_ids:
            self._metrics.on_rejected(entry.error)
        _log_end(entry, ended)


class _Answer:
    """One sequence of a request; turns its tokens into text."""

    __slots__ = (
        "_last_chunk_at",
        "_lead",
        "_metrics",
        "_own_logprobs",
        "_text",
        "append_plain",
        "entry",
        "finish",
        "is_plain",
        "num_output_tokens",
    )

    def __init__(
        self, entry: JournalEntry, prompt_text: str, tokenizer: Tokenizer, metrics: GatewayMetrics
    ) -> None:
        self.entry = entry
        self.finish: Finish | None = None
        self._metrics = metrics
        self._last_chunk_at: float | None = None  # time of the last chunk with tokens
        self._text = answer_text(entry.request, tokenizer)
        self.append_plain = self._text.detokenizer.append  # for a plain answer that has not ended
        self._lead = prompt_text  # precedes the first text
        self.num_output_tokens = 0  # returned in chunks so far
        self._own_logprobs = array("f")  # of these tokens, if requested
        request = entry.request
        # Whether a chunk that is not the last one has nothing but text and tokens.
        self.is_plain = not (
            request.may_be_cut
            or request.returns_prompt
            or request.is_stepwise
            or request.num_logprobs is not None
            or entry.records
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
        piece = self._text.append(text_token_ids, reason)
        if piece.is_cut:
            reason, stop_token_id = FinishReason.STOP, None
            token_ids, logprobs = token_ids[: piece.num_tokens], logprobs[: piece.num_tokens]
        self._own_logprobs.extend(logprobs.own)
        self.num_output_tokens += len(token_ids)
        if token_ids:
            self._measure(len(token_ids))
        if self._lead:
            piece.text = self._lead + piece.text
            if request.parsing is not None:
                piece.deltas.insert(0, ContentDelta(self._lead))
            self._lead = ""
        if reason is not None:
            self.finish = Finish(
                reason=reason,
                stop_string=piece.stop_string,
                stop_token_id=stop_token_id,
                num_prompt_tokens=request.num_source_tokens + len(request.spec.prompt_token_ids),
                num_cached_tokens=entry.num_cached_tokens,
                num_output_tokens=self.num_output_tokens,
                seed=entry.spec.sampling.seed,
                timings=entry.timings(self.num_output_tokens),
                num_reasoning_tokens=self._text.num_reasoning_tokens,
                num_calls=self._text.num_calls,
                beam_score=entry.beam_score,
            )
        prompt = None
        if is_first and (token_ids or reason is not None) and not entry.index and request.returns_prompt:
            reports = entry.take_reports(0, is_last=False, with_prompt=True)
            prompt = Prompt(request.spec.prompt_token_ids, reports)
        return Chunk(
            entry.index,
            piece.text,
            token_ids,
            None if request.num_logprobs is None else logprobs,
            self.num_output_tokens,
            self.finish,
            prompt,
            piece.deltas,
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


def _log_end(entry: JournalEntry, ended: EndedAnswer) -> None:
    times, request = ended.timings, entry.request
    access_log.info(
        "request ended",
        request_id=entry.spec.request_id,
        seq_id=f"{entry.seq_id:x}",
        num_prompt_tokens=ended.num_prompt_tokens,
        num_cached_tokens=ended.num_cached_tokens,
        num_output_tokens=ended.num_output_tokens,
        reason=ended.outcome,
        ttft_ms=None if times.first_token_s is None else round(1e3 * times.first_token_s, 1),
        duration_ms=round(1e3 * times.total_s, 1),
        **({"user": request.user} if request.user else {}),
        **({"caller": request.caller} if request.caller else {}),
        **({} if entry.error is None else {"error": str(entry.error)}),
    )


def _prompt_text(request: GenerationRequest, tokenizer: Tokenizer) -> str:
    if request.prompt_text is not None:
        return request.prompt_text
    return tokenizer.decode(request.text_token_ids, request.skip_special_tokens)
