"""One request's life: submitted, its tokens turned into text, cut at a stop string, finished, closed.

Runs in the task that answers the client, so a slow client delays nobody: tokens that arrive meanwhile
wait in the journal and leave in one chunk.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog

from services.gateway.dense_client import DenseClient
from services.gateway.detokenizer import Detokenizer
from services.gateway.journal import FinishReason, Journal
from services.gateway.request import GenerationRequest
from services.gateway.stop_strings import StopStrings
from services.gateway.tokenizer import Tokenizer

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Finish:
    """How and why a generation ended; counts are tokens."""

    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new since the last chunk."""

    text: str  # whole characters; may lag behind `token_ids`
    token_ids: list[int]
    finish: Finish | None  # on the last chunk


class Generation:
    """Call `next_chunk` until a chunk carries `finish`, and `close` in any case.

    Construction submits the request and raises `InvalidRequest` if its request_id is in use.
    """

    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, journal: Journal, dense: DenseClient
    ) -> None:
        self.request_id = request.request_id
        self._request = request
        self._journal = journal
        self._dense = dense
        self._text = TextBuilder(request, tokenizer)
        self._num_output_tokens = 0  # handed out so far
        self._finish: Finish | None = None
        self._start = time.monotonic()
        self._first_token: float | None = None  # when it came
        self._is_closed = False
        self._entry = journal.open(request)
        dense.submit(self._entry)

    async def next_chunk(self) -> Chunk:
        """Waits for new tokens. Raises a `TwostrokeError` where the sequence cannot go on."""
        token_ids = await self._entry.take()
        if self._first_token is None:
            self._first_token = time.monotonic()
        reason = self._entry.finish_reason  # set in the same step as the last token
        stop_token_id = token_ids[-1] if reason is FinishReason.STOP else None
        text_token_ids = token_ids if stop_token_id is None else token_ids[:-1]  # it is not part of the text
        text, num_tokens, stop_string = self._text.append(text_token_ids, is_last=reason is not None)
        if stop_string is not None:
            reason, stop_token_id = FinishReason.STOP, None
            token_ids = token_ids[:num_tokens]
        self._num_output_tokens += len(token_ids)
        if reason is not None:
            self._finish = Finish(
                reason=reason,
                stop_string=stop_string,
                stop_token_id=stop_token_id,
                num_prompt_tokens=len(self._request.prompt_token_ids),
                num_cached_tokens=self._entry.num_cached_tokens,
                num_output_tokens=self._num_output_tokens,
                seed=self._request.sampling.seed,
            )
            self.close()
        return Chunk(text, token_ids, self._finish)

    def close(self) -> None:
        """Forgets the request, and stops it if it still runs. Closing twice does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._journal.close(self._entry)
        if not self._entry.is_ended:
            self._dense.cancel(self._entry)
        self._log_end()

    def _log_end(self) -> None:
        now = time.monotonic()
        if self._finish is not None:
            end = self._finish.reason.value
        else:
            end = "cancelled" if self._entry.error is None else "error"
        log.info(
            "request ended",
            request_id=self._request.request_id,
            seq_id=f"{self._entry.seq_id:x}",
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=self._entry.num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            reason=end,
            ttft_ms=None if self._first_token is None else round(1e3 * (self._first_token - self._start), 1),
            duration_ms=round(1e3 * (now - self._start), 1),
            **({} if self._entry.error is None else {"error": str(self._entry.error)}),
        )


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
