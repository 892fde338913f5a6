"""The sizes of captured steps: every step fits, with little padding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.common.batch_buckets import (
    MAX_CAPTURED_CHUNK_ROWS,
    MAX_CAPTURED_TOKENS,
    SHORT_STEP_TOKENS,
    batch_buckets,
    bucket_for,
    chunk_buckets,
    token_buckets,
)


@given(st.integers(1, 1024))
def test_every_batch_fits_with_little_padding(max_num_seqs: int) -> None:
    buckets = batch_buckets(max_num_seqs)
    assert buckets == sorted(set(buckets)) and buckets[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        padding = bucket_for(buckets, num_seqs) - num_seqs
        assert 0 <= padding <= max(3, num_seqs / 8)


@given(st.integers(1, 1024), st.integers(1, 9000))
def test_token_buckets_continue_beyond_batch_buckets(max_num_seqs: int, max_num_tokens: int) -> None:
    buckets = token_buckets(max_num_seqs, max_num_tokens)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == min(max_num_tokens, MAX_CAPTURED_TOKENS)
    assert set(batch_buckets(min(max_num_seqs, buckets[-1]))) <= set(buckets)


@given(st.integers(1, 1024), st.integers(1, 9000), st.data())
def test_padding_never_changes_whether_a_step_is_short(
    max_num_seqs: int, max_num_tokens: int, data: st.DataObject
) -> None:
    """The dense worker pads every step; the attention worker pads steps with one token per sequence."""
    tokens = token_buckets(max_num_seqs, max_num_tokens)
    num_tokens = data.draw(st.integers(1, tokens[-1]))
    is_short = num_tokens <= SHORT_STEP_TOKENS
    assert (bucket_for(tokens, num_tokens) <= SHORT_STEP_TOKENS) == is_short
    batches = batch_buckets(max_num_seqs)
    if num_tokens <= max_num_seqs:
        assert (bucket_for(batches, num_tokens) <= SHORT_STEP_TOKENS) == is_short


@given(st.integers(1, 9000))
def test_short_chunks_fit_and_stay_short_when_padded(max_num_tokens: int) -> None:
    buckets = chunk_buckets(max_num_tokens)
    assert buckets == sorted(set(buckets)) and buckets[-1] == min(max_num_tokens, MAX_CAPTURED_CHUNK_ROWS)
    for num_tokens in range(1, buckets[-1] + 1):
        assert (bucket_for(buckets, num_tokens) <= SHORT_STEP_TOKENS) == (num_tokens <= SHORT_STEP_TOKENS)
