"""Finds the entries of a plan that contradict the KV cache. Part of `kv_cache.py`."""

from __future__ import annotations

import numpy as np

from services.attn_worker.cache.sequence_rows import NO_SEQUENCE
from services.common.errors import NotFound, RequestAborted, TwostrokeError


def find_errors(
    seq_ids: list[int],
    rows: np.ndarray,  # int64, of the block tables, by entry
    num_held_tokens: np.ndarray,  # int64, of the entries' sequences in the KV cache
    num_tokens: np.ndarray,  # int64, of the entries
    positions: np.ndarray,  # int64, of their first tokens
    max_model_len: int,
) -> dict[int, TwostrokeError]:
    """The errors by seq_id, found by one vectorised check; messages are built only on failure."""
    errors: dict[int, TwostrokeError] = {}
    is_wrong = (rows == NO_SEQUENCE) | (num_held_tokens < positions)
    is_wrong |= positions + num_tokens > max_model_len
    if len(set(seq_ids)) < len(seq_ids):
        is_wrong |= np.array([seq_ids.count(seq_id) > 1 for seq_id in seq_ids])
    for index in np.flatnonzero(is_wrong).tolist():
        seq_id = seq_ids[index]
        if rows[index] == NO_SEQUENCE:
            errors.setdefault(seq_id, NotFound(f"sequence {seq_id} is not open"))
        else:
            errors[seq_id] = RequestAborted(
                f"{seq_ids.count(seq_id)} entries of a step plan {num_tokens[index]} tokens after"
                f" {positions[index]} for sequence {seq_id}; it has {num_held_tokens[index]} tokens,"
                f" max_model_len is {max_model_len}"
            )
    return errors
