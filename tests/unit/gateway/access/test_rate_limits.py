"""Token buckets against the arithmetic they stand for, and what one caller may have at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import PermissionDenied, RateLimited
from services.gateway.access.rate_limits import RateLimits, TokenBucket, Usage

events = st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 50)), max_size=60)  # pause in seconds, amount


@given(events, st.floats(1, 600))
def test_no_stretch_of_time_gets_more_than_its_share_and_one_burst(
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
def test_after_the_wait_it_names_the_amount_is_there_and_not_earlier(
    per_minute: float, debt: float, amount: float
) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    bucket.take(debt, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    if wait_s > 1e-3:
        assert bucket.wait_s(amount, wait_s * 0.99) > 0
    assert bucket.wait_s(amount, wait_s) == pytest.approx(0, abs=1e-6)


def test_a_rate_changes_without_forgiving_debts() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(120, 0.0)  # 60 too many
    bucket.set_rate(600, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(6.1)


def test_every_limit_refuses_with_its_number_and_counts_nothing() -> None:
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
        usage.check_size(3)  # whenever it comes
    usage.check_size(2)

    usage = Usage("team", RateLimits(requests_per_minute=2))
    usage.open_request()
    usage.open_request()
    with pytest.raises(RateLimited, match="2 requests a minute") as refused:
        usage.open_request()
    assert 0 < refused.value.retry_after_s <= 30

    usage = Usage("team", RateLimits(tokens_per_minute=100))
    usage.open_request()
    usage.add_tokens(300)  # known only afterwards
    with pytest.raises(RateLimited, match="100 tokens a minute") as refused:
        usage.open_request()
    assert refused.value.retry_after_s == pytest.approx(121, abs=2)


def test_limits_that_come_and_go_keep_what_is_open() -> None:
    usage = Usage("team", RateLimits())
    for _ in range(5):
        usage.open_request()
    usage.set_limits(RateLimits(max_concurrent_answers=5))
    with pytest.raises(RateLimited, match="6 answers"):
        usage.open_request()
    usage.set_limits(RateLimits())
    usage.open_request()


def test_several_prompts_come_in_all_or_none() -> None:
    usage = Usage("team", RateLimits(requests_per_minute=6))
    usage.open_request()
    usage.check_prompts(5, 5)
    with pytest.raises(RateLimited, match="6 requests a minute") as refused:
        usage.check_prompts(6, 6)
    assert refused.value.retry_after_s == pytest.approx(10, abs=0.1)
    with pytest.raises(PermissionDenied, match="it has 7 prompts, the limit of the API key 'team' is 6 requests"):
        usage.check_prompts(7, 7)
    for _ in range(5):  # none of these was counted
        usage.open_request()
    Usage("slow", RateLimits(requests_per_minute=0.5)).check_prompts(1, 1)
