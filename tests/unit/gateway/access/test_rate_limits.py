"""Token buckets, compared with direct arithmetic, and the limits of one caller."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import PermissionDenied, RateLimited
from services.gateway.access.rate_limits import PartsUsage, RateLimits, TokenBucket, Usage

events = st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 50)), max_size=60)  # pause in seconds, amount


@given(events, st.floats(1, 600))
def test_no_interval_gets_more_than_its_rate_and_one_burst(
    pauses: list[tuple[float, float]], per_minute: float
) -> None:
    now_s = 0.0
    bucket = TokenBucket(per_minute, now_s)
    taken: list[tuple[float, float]] = []
    for pause_s, amount in pauses:
        now_s += pause_s
        amount = min(amount, per_minute)
        if bucket.wait_s(amount, now_s) == 0:
            bucket.take(amount, now_s)
            taken.append((now_s, amount))
    for first, (start_s, _) in enumerate(taken):
        for last, (end_s, _) in enumerate(taken[first:], start=first):
            total = sum(amount for _, amount in taken[first : last + 1])
            assert total <= per_minute * (1 + (end_s - start_s) / 60) + 1e-6


@given(st.floats(1, 600), st.floats(0, 5000), st.floats(0.1, 600))
def test_the_wait_of_a_bucket_is_exact(
    per_minute: float, debt: float, amount: float
) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    bucket.take(debt, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    if wait_s > 1e-3:
        assert bucket.wait_s(amount, wait_s * 0.99) > 0
    assert bucket.wait_s(amount, wait_s) == pytest.approx(0, abs=1e-6)


def test_a_changed_rate_keeps_the_debt() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(120, 0.0)  # 60 more than it contains
    bucket.set_rate(600, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(6.1)


def test_a_refusal_names_the_limit_and_does_not_count() -> None:
    usage = Usage("team", RateLimits(max_concurrent_answers=2))
    usage.open_request()
    with pytest.raises(RateLimited, match=r"'team' would have 3 answers at once, its limit is 2"):
        usage.add_answers(2)
    usage.add_answers(1)
    with pytest.raises(RateLimited) as refused:
        usage.open_request()
    assert refused.value.retry_after_s is not None
    usage.close_answers(2)
    usage.open_request()
    assert usage.num_open_answers == 1

    with pytest.raises(PermissionDenied, match=r"3 answers at once, the limit of the API key 'team' is 2"):
        usage.check_size(3)  # the size alone exceeds the limit
    usage.check_size(2)

    usage = Usage("team", RateLimits(requests_per_minute=2))
    usage.open_request()
    usage.open_request()
    with pytest.raises(RateLimited, match="2 requests a minute") as refused:
        usage.open_request()
    assert 0 < refused.value.retry_after_s <= 30

    usage = Usage("team", RateLimits(tokens_per_minute=100))
    usage.open_request()
    usage.add_tokens(300)  # the number is known only after the answer
    with pytest.raises(RateLimited, match="100 tokens a minute") as refused:
        usage.open_request()
    assert refused.value.retry_after_s == pytest.approx(121, abs=2)


def test_changed_limits_count_the_requests_already_open() -> None:
    usage = Usage("team", RateLimits())
    for _ in range(5):
        usage.open_request()
    usage.set_limits(RateLimits(max_concurrent_answers=5))
    with pytest.raises(RateLimited, match="6 answers"):
        usage.open_request()
    usage.set_limits(RateLimits())
    usage.open_request()


def test_several_prompts_are_admitted_together_or_not_at_all() -> None:
    usage = Usage("team", RateLimits(requests_per_minute=6))
    usage.open_request()
    usage.check_prompts(5, 5)
    with pytest.raises(RateLimited, match="6 requests a minute") as refused:
        usage.check_prompts(6, 6)
    assert refused.value.retry_after_s == pytest.approx(10, abs=0.1)
    with pytest.raises(PermissionDenied, match="it has 7 prompts, the limit of the API key 'team' is 6 requests"):
        usage.check_prompts(7, 7)
    for _ in range(5):  # the checks above counted nothing
        usage.open_request()
    Usage("slow", RateLimits(requests_per_minute=0.5)).check_prompts(1, 1)


def test_the_parts_of_a_request_count_their_tokens_and_nothing_else() -> None:
    whole = Usage("team", RateLimits(max_concurrent_answers=1, requests_per_minute=1, tokens_per_minute=100))
    whole.open_request()
    parts = PartsUsage(whole)
    for _ in range(3):
        parts.open_request()
        parts.add_tokens(50)
        parts.close_answers(1)
    assert whole.num_open_answers == 1
    whole.close_answers(1)
    with pytest.raises(RateLimited, match="has used up its 100 tokens a minute"):
        whole.open_request()
