"""`JournalEntry`: one open sequence, with everything that is needed to continue it after a worker died.

That is its request and all tokens so far, or what a beam search has found so far. The reader of the dense worker's
stream appends tokens, and the request's handler takes them. Both run in the gateway's event loop, so there are no
locks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from services.common.errors import TwostrokeError
from services.common.token_logprobs import LogprobRows
from services.gateway.link.logits import LogitRows
from services.gateway.link.search_record import SearchRecord
from services.gateway.request.generation_request import GenerationRequest
from services.pb import dense_pb2, sampling_pb2
from services.step import TokenReport


class FinishReason(Enum):
    """Why a generation ended without an error."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the client called Abort


class UpdateQueue:
    """A queue of the sequences of a request that have updates, for the request's handler."""

    def __init__(self) -> None:
        self._entries: deque[JournalEntry] = deque()  # each entry at most once
        self._waiter: asyncio.Future[None] | None = None

    def put(self, entry: JournalEntry) -> None:
        """Adds an entry that is not in the queue."""
        self._entries.append(entry)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> JournalEntry:
        """Waits for an entry with updates. For one caller at a time."""
        while not self._entries:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._entries.popleft()


class JournalEntry:
    """One open sequence: answer `index` of its request. Ends with at most `request.max_tokens` tokens.

    A beam search is one sequence with several answers. The entry of the first answer is submitted; the others are its
    followers, which no worker knows.
    """

    __slots__ = (
        "_is_in_updates",
        "_num_taken_tokens",
        "_on_start",
        "arrival",
        "beam_score",
        "context_logits",
        "crash_start",
        "error",
        "finish_reason",
        "first_token_at",
        "followers",
        "hidden_states",
        "index",
        "is_admitted",
        "is_follower",
        "last_token_at",
        "logits",
        "logprobs",
        "num_cached_tokens",
        "num_crashes",
        "output_token_ids",
        "progress",
        "prompt_logprobs",
        "queue_s",
        "request",
        "search",
        "seq_id",
        "spec",
        "updates",
    )

    def __init__(
        self,
        seq_id: int,
        request: GenerationRequest,
        index: int,
        updates: UpdateQueue,
        on_start: Callable[[JournalEntry], None],
    ) -> None:
        """The entry adds itself to `updates` when it has an update; `on_start` is called when it first runs."""
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.spec = request.spec_of(index)
        self.output_token_ids: list[int] = []
        self.logprobs = LogprobRows()  # of the tokens that have not been taken yet, if requested
        self.prompt_logprobs = LogprobRows()  # of all prompt tokens but the first, if requested
        self.logits = LogitRows() if self.spec.return_generation_logits else None  # of output tokens
        report = self.spec.token_report
        self.context_logits = LogitRows() if report is TokenReport.CONTEXT_LOGITS else None  # after prompt tokens
        self.hidden_states = LogitRows() if report is TokenReport.HIDDEN_STATES else None  # of all computed tokens
        self.progress: int | None = None  # computed tokens of the prompt that the client has not been told of
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when it first ran
        self.queue_s: float | None = None  # from its arrival at the dense worker until it first ran
        self.arrival = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.error: TwostrokeError | None = None
        self.is_admitted = False  # whether steps of the dense worker may run it
        self.num_crashes = 0  # consecutive worker crashes, without a token in between, that it may have caused
        self.crash_start = 0  # index of the first token being computed in the last of these crashes, if known
        self.followers: list[JournalEntry] = []
        self.is_follower = False
        self.beam_score: float | None = None
        num_beams = 0 if self.spec.beam_search is None else self.spec.beam_search.num_beams
        self.search = SearchRecord(num_beams) if num_beams else None  # None: its tokens are sampled
        self._on_start = on_start
        self._num_taken_tokens = 0  # by the request's handler
        self.updates = updates
        self._is_in_updates = False

    @property
    def is_ended(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None or self.error is not None

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of all prompt tokens but the first have arrived."""
        return len(self.prompt_logprobs) == self.spec.num_prompt_tokens - 1

    @property
    def has_context_logits(self) -> bool:
        """Whether the logits after all prompt tokens have arrived."""
        return self.context_logits is not None and self.context_logits.num_rows == self.spec.num_prompt_tokens

    @property
    def token_report(self) -> TokenReport:
        """What the dense worker still has to report of each token. Hidden states come again from the first token on."""
        asked = self.spec.token_report
        is_over = self.has_context_logits if asked is TokenReport.CONTEXT_LOGITS else bool(self.output_token_ids)
        return TokenReport.NONE if is_over and asked is not TokenReport.HIDDEN_STATES else asked

    @property
    def queue_timeout_ms(self) -> int:
        """The rest of its waiting time in milliseconds; 0 (no limit) after it has run."""
        limit_s = self.request.queue_timeout_s
        if limit_s is None or self.queue_s is not None:
            return 0
        return max(1, round(1e3 * (self.arrival + limit_s - time.monotonic())))

    def start(self, queue_s: float, num_cached_tokens: int) -> None:
        """Notes the sequence's first step. A later call, after a worker died, changes nothing."""
        if self.queue_s is None:
            self.queue_s, self.num_cached_tokens = queue_s, num_cached_tokens
            self._on_start(self)
            for follower in self.followers:
                follower.start(queue_s, num_cached_tokens)

    def append(self, token_id: int, now: float) -> None:
        """Adds one token, which arrived at `now` on the monotonic clock."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.num_crashes = 0
        self.output_token_ids.append(token_id)
        if not self._is_in_updates:
            self._put_in_updates()

    def add_search_step(self, step: dense_pb2.BeamStep) -> None:
        """Adds a token to each beam of a search."""
        assert self.search is not None, "only a search has beams"
        self.num_crashes = 0
        self.search.add(step)

    def add_prompt_logprobs(self, start: int, logprobs: Sequence[sampling_pb2.TokenLogprobs]) -> None:
        """Stores log-probabilities of prompt tokens from index `start` on. A span may arrive again after a crash."""
        num_known = len(self.prompt_logprobs) - (start - 1)
        if num_known >= 0:  # else those before them are still to come again
            for each in logprobs[num_known:]:
                self.prompt_logprobs.append(each)

    def keep_token_report(self, start: int, num_rows: int, values: bytes) -> None:
        """Stores what is reported of the tokens from index `start` on. They may come again after a crash."""
        rows = self.context_logits if self.hidden_states is None else self.hidden_states
        if rows is not None:
            rows.set_rows(start, num_rows, values)
        elif self.spec.token_report is TokenReport.PROGRESS and not self.is_ended:
            self.progress = start + num_rows
            if not self._is_in_updates:
                self._put_in_updates()

    def take_progress(self) -> int | None:
        """Takes the number of computed tokens of the prompt; None if it has not changed."""
        progress, self.progress = self.progress, None
        return progress

    def finish(self, reason: FinishReason) -> None:
        """Ends the sequence; its last token has been appended before."""
        if self.request.max_tokens == 0 and reason is not FinishReason.ABORT:
            self._forget_token()
            reason = FinishReason.LENGTH
        self.finish_reason = reason
        self._put_in_updates()

    def _forget_token(self) -> None:
        """Drops the token of a request for the prompt only. It arrived with the end, so no handler has seen it."""
        self.output_token_ids.clear()
        self.logprobs = LogprobRows()
        self.first_token_at = self.last_token_at = None

    def fail(self, error: TwostrokeError) -> None:
        """Ends the sequence with an error for its client, unless it has ended already."""
        if not self.is_ended:
            self.error = error
            self._put_in_updates()

    def take_new_tokens(self) -> tuple[list[int], LogprobRows]:
        """Takes all tokens not taken yet, with their log-probabilities if requested.

        Raises the error that ended the sequence when all its tokens are taken.
        """
        self._is_in_updates = False
        start = self._num_taken_tokens
        token_ids = self.output_token_ids[start:]
        if self.error is not None:
            if not token_ids:
                raise self.error
            self._put_in_updates()  # so that the next call raises
        self._num_taken_tokens += len(token_ids)
        logprobs = self.logprobs
        if logprobs:
            self.logprobs = LogprobRows()
        return token_ids, logprobs

    def _put_in_updates(self) -> None:
        if not self._is_in_updates:
            self._is_in_updates = True
            self.updates.put(self)
