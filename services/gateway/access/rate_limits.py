"""The limits of one caller: answers at once, requests and tokens per minute. Counts in the event loop, no timers.

They hold for all gateway processes of a server together: each learns what the others have counted (`KeyCounts`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from services.common.errors import PermissionDenied, RateLimited
from services.common.shared_counts import Count, Counts, KeyCounts

MINUTE_S = 60.0
CONCURRENCY_RETRY_S = 1.0  # nobody knows when one of the caller's own requests ends


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The limits of one caller; None means no limit."""

    max_concurrent_answers: int | None = None  # a request counts once for each of its answers
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # tokens of prompts and answers together


class TokenBucket:
    """Holds the amount for up to a minute and refills steadily: https://en.wikipedia.org/wiki/Token_bucket.

    Its level may become negative, because some amounts are known only afterwards. The long-term mean still keeps to the
    rate. What other processes take leaves it when this one looks, so let it look several times a minute (`refill`).
    """

    def __init__(self, per_minute: float, now_s: float, taken: Count | None = None) -> None:
        """`taken`: what all processes have ever taken; None: this is the only one."""
        self._per_minute = per_minute
        self._level = per_minute
        self._updated_s = now_s
        self._taken = taken or Count()
        self._taken_by_others = self._taken.others  # of it, what has left the bucket

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until the bucket holds `amount` or is full; 0 if it does now."""
        self.refill(now_s)
        missing = min(amount, self._per_minute) - self._level
        return max(0.0, missing) * MINUTE_S / self._per_minute

    def take(self, amount: int, now_s: float) -> None:
        """Takes `amount`, even if the bucket holds less."""
        self.refill(now_s)
        self._level -= amount
        self._taken.add(amount)

    def set_rate(self, per_minute: float, now_s: float) -> None:
        """Changes the rate. A negative level stays as it is."""
        self.refill(now_s)
        self._per_minute = per_minute
        self._level = min(self._level, per_minute)

    def refill(self, now_s: float) -> None:
        """Adds what has come since the last time, and takes what other processes have taken."""
        taken = self._taken.others
        self._level -= taken - self._taken_by_others
        self._taken_by_others = taken
        elapsed_s = max(0.0, now_s - self._updated_s)
        self._level = min(self._per_minute, self._level + elapsed_s * self._per_minute / MINUTE_S)
        self._updated_s = now_s


class Usage:
    """What one caller uses now and has used lately. It stays the same object when the limits change."""

    def __init__(self, name: str, limits: RateLimits, counts: KeyCounts | None = None) -> None:
        """`counts`: those of the key; None: this process is the only one."""
        self._counts = counts or Counts().of_keys([name])[0]
        self._name = name
        self._limits = limits
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.set_limits(limits)

    @property
    def num_open_answers(self) -> int:
        """Answers that all processes have under way."""
        return self._counts.open_answers.total

    def note_others(self) -> None:
        """Learns what other processes have counted. Call it every few seconds if there are any."""
        now_s = time.monotonic()
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.refill(now_s)

    def set_limits(self, limits: RateLimits) -> None:
        """Sets the limits that apply from now on."""
        now_s = time.monotonic()
        self._limits = limits
        counts = self._counts
        self._requests = _with_rate(self._requests, limits.requests_per_minute, now_s, counts.taken_requests)
        self._tokens = _with_rate(self._tokens, limits.tokens_per_minute, now_s, counts.taken_tokens)

    def open_request(self) -> None:
        """Counts one request, with one answer so far. If it raises `RateLimited`, it counts nothing."""
        self._check_answers(1)
        self.count_requests(1)
        self._counts.open_answers.add(1)

    def count_requests(self, count: int) -> None:
        """Counts requests that arrive together. If it raises `RateLimited`, it counts nothing."""
        now_s, limits = time.monotonic(), self._limits
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, now_s)):
            raise self._limited(f"has used up its {limits.tokens_per_minute:g} tokens a minute", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(count, now_s):
                raise self._limited(f"has used up its {limits.requests_per_minute:g} requests a minute", wait_s)
            self._requests.take(count, now_s)

    def check_prompts(self, num_prompts: int, num_answers: int) -> None:
        """Checks all prompts of a request at once, before each is opened, so that none is refused after others count.

        Raises `PermissionDenied` if the limits never allow this many, `RateLimited` if they do not allow them now.
        """
        self.check_size(num_answers)
        self._check_answers(num_answers)
        limit = self._limits.requests_per_minute
        if self._requests is None or limit is None:
            return
        if num_prompts > max(1, limit):
            raise PermissionDenied(
                f"it has {num_prompts} prompts, the limit of the API key {self._name!r} is {limit:g} requests a minute",
                "prompt",
            )
        if wait_s := self._requests.wait_s(num_prompts, time.monotonic()):
            raise self._limited(f"has used up its {limit:g} requests a minute", wait_s)

    def check_size(self, num_answers: int) -> None:
        """Raises `PermissionDenied` for a request with more answers than the limit ever allows."""
        limit = self._limits.max_concurrent_answers
        if limit is not None and num_answers > limit:
            raise PermissionDenied(
                f"it asks for {num_answers} answers at once, the limit of the API key {self._name!r} is {limit}",
                "n",
            )

    def add_answers(self, count: int) -> None:
        """Counts further answers of an open request. If it raises `RateLimited`, it counts nothing."""
        self._check_answers(count)
        self._counts.open_answers.add(count)

    def close_answers(self, count: int) -> None:
        """Counts answers as ended."""
        self._counts.open_answers.add(-count)

    def add_tokens(self, count: int) -> None:
        """Counts tokens that were sent or generated; too many delay later requests."""
        if self._tokens is not None:
            self._tokens.take(count, time.monotonic())

    def _check_answers(self, count: int) -> None:
        limit = self._limits.max_concurrent_answers
        if limit is not None and (num_answers := self.num_open_answers + count) > limit:
            raise self._limited(
                f"would have {num_answers} answers at once, its limit is {limit}",
                CONCURRENCY_RETRY_S,
            )

    def _limited(self, what: str, retry_after_s: float) -> RateLimited:
        return RateLimited(f"the API key {self._name!r} {what}", retry_after_s=retry_after_s)


class PartsUsage(Usage):
    """What the parts of one request use that is counted already: their tokens count, and nothing else."""

    def __init__(self, whole: Usage) -> None:
        super().__init__("", RateLimits())
        self._whole = whole

    def add_tokens(self, count: int) -> None:
        """Counts tokens towards the limit of the whole."""
        self._whole.add_tokens(count)


def _with_rate(
    bucket: TokenBucket | None, per_minute: float | None, now_s: float, taken: Count
) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now_s, taken)
    bucket.set_rate(per_minute, now_s)
    return bucket
