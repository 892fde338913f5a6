"""`JournalEntry`: one open sequence, with everything that is needed to continue it after a worker died.

That is its request and all tokens so far, or what a beam search has found so far. The reader of the dense worker's
stream appends tokens, and the request's handler takes them. Both run in the gateway's event loop, so there are no
locks. `StreamSequences` are those that one stream runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from services.common.errors import TwostrokeError
from services.common.token_logprobs import LogprobRows
from services.gateway.features.installed import REPORTS
from services.gateway.features.report import ReportPart, ReportRecord
from services.gateway.link.search_record import SearchRecord
from services.gateway.link.update_queue import UpdateQueue
from services.gateway.request.generation_request import GenerationRequest
from services.pb import dense_pb2

NO_RECORDS: Mapping[str, ReportRecord] = MappingProxyType({})


class FinishReason(Enum):
    """Why a generation ended without an error."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the client called Abort


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one answer, in seconds; those before the first token are None if there was none."""

    queue_s: float | None  # until its first step
    first_token_s: float | None
    per_token_s: float | None  # mean time from one token to the next; None for fewer than two
    total_s: float


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
        "crash_start",
        "error",
        "finish_reason",
        "first_token_at",
        "followers",
        "index",
        "is_admitted",
        "last_token_at",
        "logprobs",
        "num_cached_tokens",
        "num_crashes",
        "output_token_ids",
        "queue_s",
        "records",
        "request",
        "search",
        "seq_id",
        "spec",
        "stream",
        "updates",
        "was_alone_in_crash",
    )

    def __init__(
        self,
        seq_id: int,
        request: GenerationRequest,
        index: int,
        updates: UpdateQueue[JournalEntry],
        on_start: Callable[[JournalEntry], None],
    ) -> None:
        """The entry adds itself to `updates` when it has an update; `on_start` is called when it first runs."""
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.spec = request.spec_of(index)
        self.output_token_ids: list[int] = []
        self.logprobs = LogprobRows()  # of the tokens that have not been taken yet, if requested
        self.records = NO_RECORDS  # of what features report, by their names
        if self.spec.features:
            self.records = {
                name: REPORTS[name].record(self.spec, may_be_cut=request.may_be_cut)
                for name in self.spec.features
                if name in REPORTS
            }
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when it first ran
        self.queue_s: float | None = None  # from its arrival at the dense worker until it first ran
        self.arrival = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.error: TwostrokeError | None = None
        self.is_admitted = False  # whether steps of the dense worker may run it
        self.num_crashes = 0  # consecutive worker crashes, without a token in between, that it may have caused
        self.was_alone_in_crash = False  # in the last of these crashes
        self.crash_start = 0  # index of the first token being computed in the last of these crashes, if known
        self.followers: list[JournalEntry] = []
        self.beam_score: float | None = None
        num_beams = 0 if self.spec.beam_search is None else self.spec.beam_search.num_beams
        self.search = SearchRecord(num_beams) if num_beams else None  # None: its tokens are sampled
        self.stream: StreamSequences | None = None  # that runs it; None: it is not submitted
        self._on_start = on_start
        self._num_taken_tokens = 0  # by the request's handler
        self.updates = updates
        self._is_in_updates = False

    @property
    def is_ended(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None or self.error is not None

    @property
    def is_follower(self) -> bool:
        """Whether it is one of a beam search's answers, and not the first."""
        return self.search is not None and self.index > 0

    @property
    def queue_timeout_ms(self) -> int:
        """The rest of its waiting time in milliseconds; 0 (no limit) after it has run."""
        limit_s = self.request.queue_timeout_s
        if limit_s is None or self.queue_s is not None:
            return 0
        return max(1, round(1e3 * (self.arrival + limit_s - time.monotonic())))

    def timings(self, num_output_tokens: int) -> Timings:
        """The durations up to now, of an answer that has so many of the tokens."""
        first_token_s = per_token_s = None
        if self.first_token_at is not None and self.last_token_at is not None:
            first_token_s = self.first_token_at - self.arrival
            if num_output_tokens > 1:
                per_token_s = (self.last_token_at - self.first_token_at) / (num_output_tokens - 1)
        return Timings(self.queue_s, first_token_s, per_token_s, time.monotonic() - self.arrival)

    def start(self, queue_s: float, num_cached_tokens: int) -> None:
        """Notes the sequence's first step. After a worker died before the first token, there may be another one."""
        if self.queue_s is None:
            self.queue_s, self.num_cached_tokens = queue_s, num_cached_tokens
            self._on_start(self)
        elif self.output_token_ids:
            return
        self.num_cached_tokens = min(self.num_cached_tokens, num_cached_tokens)
        for follower in self.followers:
            follower.start(queue_s, num_cached_tokens)

    def append(self, token_id: int, now: float) -> None:
        """Adds one token, which arrived at `now` on the monotonic clock."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.num_crashes = 0
        self.output_token_ids.append(token_id)
        if not self._is_in_updates:  # `_put_in_updates`, without a call
            self._is_in_updates = True
            self.updates.put(self)

    def add_search_step(self, step: dense_pb2.BeamStep) -> None:
        """Adds a token to each beam of a search."""
        assert self.search is not None, "only a search has beams"
        self.num_crashes = 0
        self.search.add(step)

    def keep_report(self, feature: str, start: int, num_tokens: int, values: bytes) -> None:
        """Stores what a feature reports of the tokens from index `start` on. They may come again after a crash."""
        record = self.records.get(feature)
        if record is not None and record.keep(start, num_tokens, values) and not self.is_ended:
            self._put_in_updates()

    def take_reports(self, num_tokens: int, *, is_last: bool, with_prompt: bool = False) -> dict[str, ReportPart]:
        """What the next chunk shows of reports, by feature: of its tokens, or of the prompt that it shows."""
        found = {}
        for name, record in self.records.items():
            if REPORTS[name].is_shown_with_prompt == with_prompt:
                part = record.take(self, num_tokens, is_last)
                if part is not None:
                    found[name] = part
        return found

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

    def take_plain_tokens(self) -> list[int]:
        """`take_new_tokens` of an entry that has not ended and whose request wants no log-probabilities in chunks.

        With `best_of` there are some, to choose by: they stay in `logprobs` until `take_new_tokens` takes the rest.
        """
        self._is_in_updates = False
        start, token_ids = self._num_taken_tokens, self.output_token_ids
        self._num_taken_tokens = len(token_ids)
        return token_ids[start:]

    def take_new_tokens(self) -> tuple[list[int], LogprobRows, FinishReason | None]:
        """Takes all tokens not taken yet, with their log-probabilities if requested, and why these are the last ones.

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
        return token_ids, logprobs, self.finish_reason  # set in the same step as the last token

    def _put_in_updates(self) -> None:
        if not self._is_in_updates:
            self._is_in_updates = True
            self.updates.put(self)


class StreamSequences:
    """A sequence is in one of these at most, from `add` until the journal forgets it. Its length includes ended ones.
    """

    def __init__(self, gateway: int) -> None:
        """`gateway`: the upper half of all seq_ids of this gateway."""
        self.gateway = gateway
        self._entries: dict[int, JournalEntry] = {}
        self.get = self._entries.get  # returns the entry of a seq_id, or None; called for every token

    def add(self, entry: JournalEntry) -> None:
        """Adds a sequence, which this stream runs from now on, and no other."""
        if entry.stream is not None:
            entry.stream.discard(entry)
        entry.stream = self
        self._entries[entry.seq_id] = entry

    def discard(self, entry: JournalEntry) -> None:
        """Removes a sequence; later tokens for it are ignored."""
        del self._entries[entry.seq_id]

    def unfinished(self) -> Iterator[JournalEntry]:
        """Sequences that the dense worker must continue, in the order in which they were added."""
        return (entry for entry in self._entries.values() if not entry.is_ended)

    def __len__(self) -> int:
        return len(self._entries)
