"""Groups the sequences of a step that are padded to one rectangle and processed by one attention call.

Plain numpy, once per step. Usually there is one group. Very uneven lengths make several, so that one long sequence does
not increase the work and memory of all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# This many query-key pairs of padding cost about as much as further calls for another group.
_CHEAP_PADDING = 2048


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Sequences padded to `max_tokens` queries and `max_context` keys each."""

    seqs: np.ndarray  # int64 [group_size], ascending indices into the batch
    rows: np.ndarray  # int64 [group_size, max_tokens], rows of qkv; padding repeats the last one
    query_positions: np.ndarray  # int64 [group_size, max_tokens], positions of `rows`
    is_valid: np.ndarray  # bool [group_size, max_tokens], False where padded
    max_context: int
    is_causal: bool  # no query has keys from before this step, so the mask is a triangle

    @property
    def has_consecutive_rows(self) -> bool:
        """Whether the group is one unpadded slice of the batch."""
        return bool(self.is_valid.all()) and self.rows[-1, -1] - self.rows[0, 0] + 1 == self.rows.size


def build_padded_groups(num_tokens: np.ndarray, context_lens: np.ndarray) -> list[PaddedGroup]:
    """Assigns each sequence of the int [num_seqs] arrays to a group of single tokens, first chunks or later chunks."""
    num_tokens, context_lens = num_tokens.astype(np.int64), context_lens.astype(np.int64)
    first_rows = num_tokens.cumsum() - num_tokens
    is_single = num_tokens == 1
    is_first = (num_tokens == context_lens) & ~is_single
    groups = []
    for members, is_causal in ((is_single, False), (is_first, True), (~is_single & ~is_first, False)):
        for seqs in _split(members.nonzero()[0], num_tokens, context_lens):
            counts = num_tokens[seqs, None]
            steps = np.arange(counts.max())[None, :]
            offsets = np.minimum(steps, counts - 1)
            groups.append(
                PaddedGroup(
                    seqs=seqs,
                    rows=first_rows[seqs, None] + offsets,
                    query_positions=context_lens[seqs, None] - counts + offsets,
                    is_valid=steps < counts,
                    max_context=int(context_lens[seqs].max()),
                    is_causal=is_causal,
                )
            )
    return groups


def _split(seqs: np.ndarray, num_tokens: np.ndarray, context_lens: np.ndarray) -> list[np.ndarray]:
    """Splits `seqs` into parts that may be padded together, largest first. Usually one part is enough."""
    if not len(seqs):
        return []
    num_pairs = num_tokens[seqs] * context_lens[seqs]
    if _may_pad(len(seqs) * num_tokens[seqs].max() * context_lens[seqs].max(), num_pairs.sum()):
        return [seqs]
    parts: list[list[int]] = []
    max_tokens = max_context = useful = 0
    for index in np.argsort(-num_pairs, kind="stable").tolist():
        seq, pairs = int(seqs[index]), int(num_pairs[index])
        tokens, context = max(max_tokens, int(num_tokens[seq])), max(max_context, int(context_lens[seq]))
        if parts and _may_pad((len(parts[-1]) + 1) * tokens * context, useful + pairs):
            parts[-1].append(seq)
            max_tokens, max_context, useful = tokens, context, useful + pairs
        else:
            parts.append([seq])
            max_tokens, max_context, useful = int(num_tokens[seq]), int(context_lens[seq]), pairs
    return [np.sort(np.array(part)) for part in parts]


def _may_pad(num_padded_pairs: int, num_pairs: int) -> bool:
    return num_padded_pairs <= num_pairs + num_pairs // 4 + _CHEAP_PADDING
