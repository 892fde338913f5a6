"""One request's life: submitted, its tokens turned into text, cut at a stop string, finished, closed.

Runs in the task that answers the client, so a slow client delays nobody: tokens that arrive meanwhile
wait in the journal and leave in one chunk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from services.common.token_logprobs import TokenLogprobs
from services.gateway.access.admission import Ticket
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import FinishReason, JournalEntry, UpdateQueue
from services.gateway.metrics import GatewayMetrics
from services.gateway.request import GenerationRequest
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopStrings
from services.gateway.text.tokenizer import Tokenizer
from services.rpc.spans import NoSpan, Span

log = structlog.get_logger()

MAX_INLINE_VALUES = 1000  # tokens and log-probabilities that the event loop encodes itself


class Submitter(Protocol):
    """Where sequences are computed: `DensePool`."""

    def submit(self, entry: JournalEntry) -> None: ...
    def cancel(self, entry: JournalEntry) -> None: ...


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one answer, in seconds; those before the first token are None if there was none."""

    queue_s: float | None  # until it first took part in a step
    first_token_s: float | None
    per_token_s: float | None  # mean time from one token to the next; None for fewer than two
    total_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """How and why an answer ended; counts are tokens."""

    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    seed: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request that asked to see it again."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # of all tokens but the first, if asked for and computed


@dataclass(slots=True)  # not frozen: that takes three times as long to make, and there is one for every token
class Chunk:
    """What is new since the last chunk of the same answer."""

    index: int  # of the answer
    text: str  # whole characters; may lag behind `token_ids`
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # aligned with `token_ids`, if asked for
    num_output_tokens: int  # of the answer so far, these included
    finish: Finish | None  # on the last chunk, which has the last tokens, too, unless more became known only later
    prompt: Prompt | None  # on the first chunk of answer 0, if asked for


@dataclass(slots=True)
class Completion:
    """One whole answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


def is_large(pieces: Sequence[Chunk | Completion], prompts: Sequence[Prompt | None]) -> bool:
    """Whether these take more than a millisecond to encode: then a thread does it, and the event loop goes on."""
    num_values = sum(len(each.token_ids) for each in pieces)
    for logprobs in (*(each.logprobs for each in pieces), *(each.logprobs for each in prompts if each is not None)):
        if logprobs:
            num_values += len(logprobs) * (1 + len(logprobs[-1].top))
    return num_values > MAX_INLINE_VALUES


class Generation:
    """All answers to one request. Call `next_chunk` until `is_finished`, or `completions`; `close` in any case.

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
        """`span` is ended with the generation."""
        self.request = request
        self._ticket = ticket
        self._span = span or NoSpan()
        self._updates = UpdateQueue()
        self._prompt_text = _prompt_text(request, tokenizer) if request.echo else ""
        self._answers = [
            _Answer(entry, self._prompt_text, TextBuilder(request, tokenizer), journal, dense, metrics)
            for entry in journal.open(request, self._updates)
        ]
        self._num_running = len(self._answers)
        for answer in self._answers:
            dense.submit(answer.entry)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_finished(self) -> bool:
        """Whether every answer's last chunk has been handed out."""
        return self._num_running == 0

    async def next_chunk(self) -> Chunk:
        """Waits for new tokens of any answer. Raises a `TwostrokeError` where a sequence cannot go on."""
        while True:
            entry = await self._updates.next()
            answer = self._answers[entry.index]
            if answer.finish is not None:
                continue  # it ended at a stop string; these are tokens beyond
            chunk = answer.next_chunk()
            if chunk.finish is not None:
                self._num_running -= 1
                if self.is_finished:
                    self._end()
            return chunk

    async def completions(self) -> tuple[list[Completion], Prompt | None]:
        """The `n` answers, by index; with `best_of`, the likeliest by the mean log-probability of a token."""
        completions = [Completion(index) for index in range(len(self._answers))]
        prompt = None
        while not self.is_finished:
            chunk = await self.next_chunk()
            completion = completions[chunk.index]
            completion.text += chunk.text
            completion.token_ids += chunk.token_ids
            completion.logprobs += chunk.logprobs or ()
            completion.finish = chunk.finish
            prompt = prompt or chunk.prompt
        if self.request.best_of > self.request.n:
            completions.sort(key=lambda each: self._answers[each.index].mean_logprob, reverse=True)
            completions = [replace(each, index=i) for i, each in enumerate(completions[: self.request.n])]
        return completions, prompt

    def close(self) -> None:
        """Forgets the request, and stops what still runs of it. Closing twice does nothing."""
        for answer in self._answers:
            answer.close()
        self._end()
        if self._ticket is not None:
            self._ticket.close()

    def _end(self) -> None:
        if self._ticket is not None:  # before the client can know, so that its next request finds the place free
            self._ticket.end(sum(len(answer.entry.output_token_ids) for answer in self._answers))
        self._span.end(
            next((str(answer.entry.error) for answer in self._answers if answer.entry.error is not None), None),
            request_id=self.request_id,
            num_answers=len(self._answers),
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=sum(answer.num_output_tokens for answer in self._answers),
        )


class _Answer:
    """One sequence of a request, from its tokens to its text."""

    def __init__(
        self,
        entry: JournalEntry,
        prompt_text: str,
        text: TextBuilder,
        journal: Journal,
        dense: Submitter,
        metrics: GatewayMetrics,
    ) -> None:
        self.entry = entry
        self.finish: Finish | None = None
        self._journal = journal
        self._dense = dense
        self._metrics = metrics
        self._last_chunk_at: float | None = None  # that had tokens
        self._text = text
        self._lead = prompt_text  # goes before the first text
        self.num_output_tokens = 0  # handed out so far
        self._is_closed = False

    def next_chunk(self) -> Chunk:
        """What the entry has to tell. Raises the error that ended it."""
        entry, request = self.entry, self.entry.request
        is_first = self.num_output_tokens == 0
        token_ids, logprobs = entry.take()
        reason = entry.finish_reason  # set in the same step as the last token
        stop_token_id = token_ids[-1] if reason is FinishReason.STOP else None
        text_token_ids = token_ids if stop_token_id is None else token_ids[:-1]  # it is not part of the text
        text, num_tokens, stop_string = self._text.append(text_token_ids, is_last=reason is not None)
        if stop_string is not None:
            reason, stop_token_id = FinishReason.STOP, None
            token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
        self.num_output_tokens += len(token_ids)
        if token_ids:
            self._measure(len(token_ids))
        if self._lead:
            text, self._lead = self._lead + text, ""
        if reason is not None:
            self.finish = Finish(
                reason=reason,
                stop_string=stop_string,
                stop_token_id=stop_token_id,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=entry.num_cached_tokens,
                num_output_tokens=self.num_output_tokens,
                seed=entry.sampling.seed,
                timings=self._timings(),
            )
            self.close()
        prompt = None
        if is_first and not entry.index and (request.echo or request.num_prompt_logprobs is not None):
            # An answer may have been aborted before they were there.
            has_logprobs = request.num_prompt_logprobs is not None and entry.wanted_prompt_logprobs is None
            prompt = Prompt(request.prompt_token_ids, entry.prompt_logprobs if has_logprobs else None)
        return Chunk(
            entry.index,
            text,
            token_ids,
            None if request.num_logprobs is None else logprobs,
            self.num_output_tokens,
            self.finish,
            prompt,
        )

    def close(self) -> None:
        """See `Generation.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self.entry.is_ended:
            self._dense.cancel(self.entry)
        self._journal.close(self.entry)
        self._report_end()

    def _measure(self, num_tokens: int) -> None:
        now = time.monotonic()
        if self._last_chunk_at is None:
            self._metrics.on_first_tokens(num_tokens, now - self.entry.arrival)
        else:
            self._metrics.on_more_tokens(num_tokens, now - self._last_chunk_at)
        self._last_chunk_at = now

    @property
    def mean_logprob(self) -> float:
        """Of the tokens handed out; minus infinity if there are none."""
        values = [each.logprob for each in self.entry.logprobs[: self.num_output_tokens]]
        return math.fsum(values) / len(values) if values else -math.inf

    def _timings(self) -> Timings:
        entry, num_gaps = self.entry, self.num_output_tokens - 1
        first_token_s = per_token_s = None
        if entry.first_token_at is not None and entry.last_token_at is not None:
            first_token_s = entry.first_token_at - entry.arrival
            if num_gaps > 0:
                per_token_s = (entry.last_token_at - entry.first_token_at) / num_gaps
        return Timings(entry.queue_s, first_token_s, per_token_s, time.monotonic() - entry.arrival)

    def _report_end(self) -> None:
        entry, timings = self.entry, self._timings()
        end = "cancelled" if entry.error is None else "error"
        if self.finish is not None:
            end = self.finish.reason.value
        num_prompt_tokens = len(entry.request.prompt_token_ids)
        self._metrics.on_end(end, num_prompt_tokens, entry.num_cached_tokens, timings.total_s, timings.per_token_s)
        if entry.error is not None and not entry.output_token_ids:
            self._metrics.on_rejected(entry.error)
        log.info(
            "request ended",
            request_id=entry.request.request_id,
            seq_id=f"{entry.seq_id:x}",
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=entry.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
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
    return tokenizer.decode(request.prompt_token_ids, request.skip_special_tokens)


class TextBuilder:
    """Turns the tokens of one answer into its text: whole characters, up to the first stop string."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(
            tokenizer.hf_tokenizer, request.prompt_token_ids, request.skip_special_tokens
        )
        self._stop_strings: StopStrings | None = None  # most requests have none, and do not pay for them
        if request.stop:
            self._stop_strings = StopStrings(request.stop, request.include_stop_str_in_output)

    def append(self, token_ids: list[int], is_last: bool) -> tuple[str, int, str | None]:
        """New text, how many of `token_ids` it took, and the stop string that ended it, if one did."""
        if self._stop_strings is None:
            text = self._detokenizer.append(token_ids)
            return text + self._detokenizer.flush() if is_last else text, len(token_ids), None
        pieces = []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            text, stop_string = self._stop_strings.feed(self._detokenizer.append([token_id]))
            pieces.append(text)
            if stop_string is not None:
                return "".join(pieces), num_tokens, stop_string
        stop_string = None
        if is_last:
            text, stop_string = self._stop_strings.feed(self._detokenizer.flush())
            pieces.append(text)
            if stop_string is None:
                pieces.append(self._stop_strings.flush())
        return "".join(pieces), len(token_ids), stop_string
