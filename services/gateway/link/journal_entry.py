"""`JournalEntry`: one open sequence, with everything that is needed to continue it after a worker died.

That is its request and all tokens so far, or what a beam search has found so far. The reader of the dense worker's
stream appends tokens, and the request's handler takes them. Both run in the gateway's event loop, so there are no
locks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from services.common.errors import TwostrokeError
from services.common.token_logprobs import LogprobRows
from services.gateway.features.installed import REPORTS
from services.gateway.features.report import ReportPart, ReportRecord
from services.gateway.link.search_record import SearchRecord
from services.gateway.request.generation_request import GenerationRequest
from services.pb import dense_pb2

ROUND_SIZE = 16  # requests whose tokens are handed out in one iteration of the event loop
NUM_WAKES = 64  # tasks that wait for tokens and are woken in one; fewer would make the last tokens of a step later
ROUND_SIZE_AT_ARRIVALS = 2  # both while requests arrive, each of which needs some ten iterations to begin
ROUNDS_OF_ARRIVAL = 64  # how many are smaller after a request has arrived
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


class Rounds:
    """Hands out the tokens of a step, to some requests in each iteration of the event loop.

    What is written in an iteration leaves at its end, so the first tokens of a step need not wait for the last. And if
    the next step is read meanwhile, requests that have not had their turn get the tokens of both at once: so a gateway
    keeps up that has too little time for an event to each request and step. Iterations are shorter while requests
    arrive: the many that come at once would otherwise wait for most of the tokens of those that run. A request's first
    turn comes before all others', so that its first token does not wait for them either.
    """

    def __init__(self, size: int, *, is_wake: bool = False) -> None:
        """`size`: how many have their turn in an iteration.

        `is_wake`: the first ones have it when they are added, since a task that is woken runs later anyway.
        """
        self._size = size
        self._is_wake = is_wake
        self._num_left = size if is_wake else 0  # how many more need not wait for a later iteration
        self._first: deque[Callable[[], None]] = deque()  # of requests that have had no turn
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False  # whether the loop will call `_run`
        self._num_small = 0  # rounds to come that are smaller

    def shrink(self) -> None:
        """Makes the next rounds smaller."""
        self._num_small = ROUNDS_OF_ARRIVAL

    def add(self, hand_out: Callable[[], None], *, is_first: bool = False) -> None:
        """Calls `hand_out` in its turn. `is_first`: its request has had none."""
        if self._num_left > 0:
            self._num_left -= 1
            hand_out()
        else:
            (self._first if is_first else self._waiting).append(hand_out)
        if not self._is_due:
            self._schedule()

    def _schedule(self) -> None:
        self._is_due = True
        asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        first, waiting, size = self._first, self._waiting, self._size
        if self._num_small > 0:
            self._num_small -= 1
            size = ROUND_SIZE_AT_ARRIVALS
        num_turns = min(len(first) + len(waiting), size)
        try:
            for _ in range(num_turns):
                (first or waiting).popleft()()
        finally:
            self._num_left = size - num_turns if self._is_wake else 0
            self._is_due = False
            if first or waiting:
                self._schedule()


class Turns:
    """The rounds of all requests whose tokens are forwarded, and of all those whose tasks are woken."""

    def __init__(self) -> None:
        self.forwards, self.wakes = Rounds(ROUND_SIZE), Rounds(NUM_WAKES, is_wake=True)

    def note_arrival(self) -> None:
        """Called when a request has arrived: others may be behind it."""
        self.forwards.shrink()
        self.wakes.shrink()


class UpdateQueue:
    """A queue of the sequences of a request that have updates, for the request's handler.

    The handler waits for the next one, or has all that there are passed to a function, which wakes no task. Either has
    its turn.
    """

    __slots__ = ("_can_take", "_entries", "_is_new", "_num_due", "_take", "_turns", "_waiter")

    def __init__(self, turns: Turns | None = None) -> None:
        """`turns`: those of all requests; None: its own."""
        self._turns = turns or Turns()
        self._entries: list[JournalEntry] = []  # each entry at most once
        self._num_due = 0  # of them, that `next` may return in this turn
        self._is_new = True  # whether it has had no turn
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[list[JournalEntry]], bool] | None = None  # given while `forward` runs
        self._can_take: Callable[[], bool] = bool

    def put(self, entry: JournalEntry) -> None:
        """Adds an entry that is not in the queue."""
        entries = self._entries
        entries.append(entry)
        if self._take is not None:
            if len(entries) == 1:
                # Its other updates of this step come first.
                self._turns.forwards.add(self._deliver, is_first=self._is_new)
        elif self._waiter is not None and len(self._entries) == 1:
            self._turns.wakes.add(self._wake, is_first=self._is_new)

    async def next(self) -> JournalEntry:
        """Waits for an entry with updates. For one caller at a time."""
        if not self._num_due:
            await self._turn()
        self._num_due -= 1
        return self._entries.pop(0)

    async def _turn(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        if self._entries:
            self._turns.wakes.add(self._wake, is_first=self._is_new)
        try:
            await self._waiter
        finally:
            self._waiter = None
        self._num_due = len(self._entries)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._entries:
            self._is_new = False
            self._waiter.set_result(None)

    async def forward(self, take: Callable[[list[JournalEntry]], bool], can_take: Callable[[], bool]) -> None:
        """Passes entries with updates to `take`, all that there are at once, until `take` says that these were the last
        ones or raises, as this then does. Returns as well when there are some and `can_take` is false.

        Like `next` for one caller at a time. `take` runs in the event loop, but not in the task that called this.
        """
        self._take, self._can_take = take, can_take
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            self._deliver()
            await waiter
        finally:
            self._take = None

    def _deliver(self) -> None:
        # In locals first: Python calls a method faster than what a slot holds.
        waiter, take, can_take, entries = self._waiter, self._take, self._can_take, self._entries
        if take is None or waiter is None or waiter.done():
            return  # `forward` has ended; what is in the queue stays there
        if not entries:
            return
        if not can_take():
            waiter.set_result(None)
            return
        self._is_new = False
        self._entries, self._num_due = [], 0
        try:
            if not take(entries):
                waiter.set_result(None)
        except Exception as error:
            waiter.set_exception(error)

    def leave(self, entry: JournalEntry) -> None:
        """Called when the last chunk of an answer has been made."""


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
        "is_follower",
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
        "updates",
        "was_alone_in_crash",
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
