"""Grouping for padded attention: every row is computed once, and padding is limited."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.attn_worker.layers.mha.padded_groups import build_padded_groups

SEQUENCES = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 3, 16, 500]), st.sampled_from([0, 0, 5, 100, 4000])),
    max_size=40,
)


@settings(deadline=None)
@given(SEQUENCES)
def test_every_row_is_valid_exactly_once_and_padding_is_limited(sequences: list[tuple[int, int]]) -> None:
    num_tokens = np.array([count for count, _ in sequences], np.int32)
    context_lens = np.array([count + past for count, past in sequences], np.int32)
    positions = np.concatenate([[0], *(past + np.arange(count) for count, past in sequences)])[1:]
    seen = []
    for group in build_padded_groups(num_tokens, context_lens):
        assert group.max_context == context_lens[group.seqs].max()
        assert (positions[group.rows] == group.query_positions).all()
        kinds = {(count == 1, past == 0) for count, past in (sequences[seq] for seq in group.seqs)}
        assert kinds == {(False, True)} if group.is_causal else (False, True) not in kinds
        rows = group.rows[group.is_valid]
        seen.extend(rows.tolist())
        if group.has_consecutive_rows:
            assert group.rows.ravel().tolist() == list(range(rows[0], rows[0] + len(rows)))
        useful = (num_tokens[group.seqs].astype(int) * context_lens[group.seqs]).sum()
        assert group.rows.size * group.max_context <= 1.25 * useful + 2048
    assert sorted(seen) == list(range(num_tokens.sum()))


@pytest.mark.parametrize(("num_tokens", "past"), [(1, range(100, 200, 5)), (64, [0] * 8)])
def test_similar_sequences_share_one_unpadded_group(num_tokens: int, past: list[int]) -> None:
    counts = np.full(len(past), num_tokens)
    [group] = build_padded_groups(counts, counts + past)
    assert group.has_consecutive_rows


def test_one_long_sequence_does_not_widen_the_others() -> None:
    context_lens = np.array([50] * 30 + [8000] + [60] * 30)
    groups = build_padded_groups(np.ones(61, int), context_lens)
    assert sorted((len(group.seqs), group.max_context) for group in groups) == [(1, 8000), (60, 60)]
